"""The conjugate pair behind the predictor: a normal sample's moments, and what they say of its mean and variance.

Murphy, "Conjugate Bayesian analysis of the Gaussian distribution", 2007, sections 3 and 3.5.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Moments(NamedTuple):
    """Weight, mean and sum of squared deviations of observations: enough to describe a normal sample."""

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merge(self, other: Moments) -> Moments:
        """Both samples together (Chan, Golub and LeVeque 1979: no cancellation)."""
        weight = self.weight + other.weight
        if weight == 0.0:
            return Moments()
        shift = other.mean - self.mean
        squares = self.squares + other.squares + shift**2 * self.weight * other.weight / weight
        return Moments(weight, self.mean + shift * other.weight / weight, squares)

    def fade(self, factor: float) -> Moments:
        return Moments(self.weight * factor, self.mean, self.squares * factor)


class NormalInverseGamma(NamedTuple):
    """sigma² ~ InverseGamma(shape, rate); mu | sigma² ~ Normal(mean, sigma² / kappa)."""

    mean: float
    kappa: float
    shape: float
    rate: float

    def update(self, data: Moments) -> NormalInverseGamma:
        """The posterior after ``data`` (Murphy 2007, equations 85 to 89)."""
        kappa = self.kappa + data.weight
        shift = data.mean - self.mean
        return NormalInverseGamma(
            mean=self.mean + shift * data.weight / kappa,
            kappa=kappa,
            shape=self.shape + data.weight / 2,
            rate=self.rate + data.squares / 2 + self.kappa * data.weight * shift**2 / (2 * kappa),
        )

    @property
    def predictive_scale(self) -> float:
        """Scale of the Student t that predicts the next observation (Murphy 2007, equation 100)."""
        return math.sqrt(self.rate * (self.kappa + 1) / (self.shape * self.kappa))

    @property
    def sigma(self) -> float:
        """Plug-in standard deviation of one observation."""
        return math.sqrt(self.rate / self.shape)
