"""How long prompts and outputs are: distributions over token counts, drawn from a given random generator."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from nanopd.costmodel.checks import check_count, check_number
from nanopd.errors import ConfigError

MOST_TOKENS = 10_000_000  # a longer prompt is a typing error
MOST_SIGMA = 10.0  # a factor of e^10 between typical lengths


class Lengths(Protocol):
    """A distribution over positive token counts."""

    def draw(self, rng: random.Random) -> int:
        """One length in tokens, at least 1."""
        ...

    def scaled(self, factor: float) -> Lengths:
        """The same shape with ``factor`` times the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length. Raises ConfigError below 1 token and above `MOST_TOKENS`."""

    tokens: int

    def __post_init__(self) -> None:
        check_count("a length in tokens", self.tokens, least=1, most=MOST_TOKENS)

    def draw(self, rng: random.Random) -> int:
        return self.tokens

    def scaled(self, factor: float) -> Fixed:
        return Fixed(_at_least_one(self.tokens * factor))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from ``low`` to ``high``, both included. Raises ConfigError unless 1 <= low <= high."""

    low: int
    high: int

    def __post_init__(self) -> None:
        check_count("low", self.low, least=1, most=MOST_TOKENS)
        check_count("high", self.high, least=1, most=MOST_TOKENS)
        if self.low > self.high:
            raise ConfigError(f"uniform lengths need 1 <= low <= high, got {self.low} and {self.high}")

    def draw(self, rng: random.Random) -> int:
        return self.low + int(rng.random() * (self.high - self.low + 1))

    def scaled(self, factor: float) -> Uniform:
        return Uniform(_at_least_one(self.low * factor), _at_least_one(self.high * factor))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """ln(length) ~ Normal(ln(median), sigma²), rounded, from 1 to `MOST_TOKENS`.

    Raises ConfigError unless 0 < median <= `MOST_TOKENS` and 0 < sigma <= 10.
    """

    median: float  # tokens
    sigma: float  # standard deviation of ln(tokens)

    def __post_init__(self) -> None:
        for name, value, most in (("median", self.median, MOST_TOKENS), ("sigma", self.sigma, MOST_SIGMA)):
            check_number(f"{name} of log-normal lengths", value, above=0.0)
            if value > most:
                raise ConfigError(f"{name} of log-normal lengths must be at most {most:,}, got {value!r}")

    @property
    def mean(self) -> float:
        """Tokens, before rounding."""
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, rng: random.Random) -> int:
        # The inverse CDF takes exactly one number from the generator, so that streams of draws stay aligned.
        quantile = min(max(rng.random(), 1e-12), 1 - 1e-12)
        return min(MOST_TOKENS, _at_least_one(self.median * math.exp(self.sigma * NormalDist().inv_cdf(quantile))))

    def scaled(self, factor: float) -> LogNormal:
        return LogNormal(self.median * factor, self.sigma)

    @classmethod
    def fit(cls, lengths: list[int]) -> LogNormal:
        """Maximum likelihood: mean and standard deviation of the logarithms. Raises ConfigError below two lengths."""
        logs = [math.log(n) for n in lengths if n > 0]
        if len(logs) < 2:
            raise ConfigError(f"a log-normal fit needs at least two positive lengths, got {len(logs)}")
        mean = math.fsum(logs) / len(logs)
        variance = math.fsum((x - mean) ** 2 for x in logs) / len(logs)
        return cls(math.exp(mean), math.sqrt(variance))


def _at_least_one(tokens: float) -> int:
    return max(1, round(tokens)) if math.isfinite(tokens) else MOST_TOKENS + 1  # which nobody accepts
