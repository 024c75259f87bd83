"""How good a fit is, in numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanopd.costmodel.checks import check_count, check_number, is_number, shown
from nanopd.errors import ConfigError

GOOD_MEDIAN_ERROR = 0.10  # above it a fit is called poor
GOOD_R2 = 0.90


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Errors are relative, |predicted / measured − 1|, and on held-out points if there are any.

    ``r2`` is the share of the variance explained, 1 − Σ(measured − predicted)² / Σ(measured − mean)², on all points
    together; None if the measured values do not vary. ``warnings``: one sentence per thing that a reader should know.
    Raises ConfigError for values out of range.
    """

    num_points: int
    num_held_out: int
    r2: float | None
    median_error: float
    p90_error: float
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("num_points of a fit", self.num_points)
        check_count("num_held_out of a fit", self.num_held_out)
        check_number("median_error of a fit", self.median_error)
        check_number("p90_error of a fit", self.p90_error)
        if self.r2 is not None and not (is_number(self.r2) and self.r2 <= 1.0):
            raise ConfigError(f"r2 of a fit must be a finite number <= 1 or None, got {shown(self.r2)}")
        if not isinstance(self.warnings, tuple) or not all(isinstance(text, str) for text in self.warnings):
            raise ConfigError(f"warnings of a fit must be a tuple of texts, got {shown(self.warnings)}")

    @classmethod
    def of(
        cls,
        name: str,
        predicted: Sequence[float],
        measured: Sequence[float],
        held_out: Sequence[bool] | None = None,
        warnings: Sequence[str] = (),
    ) -> FitQuality:
        """Compare [n] predictions with [n] measurements, all positive. ``name`` begins the warnings of a poor fit."""
        p, m = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
        held = np.zeros(len(m), dtype=bool) if held_out is None else np.asarray(held_out, dtype=bool)
        errors = np.abs(p / m - 1.0)
        judged = errors[held] if held.any() else errors
        variance = float(((m - m.mean()) ** 2).sum())
        r2 = 1.0 - float(((m - p) ** 2).sum()) / variance if variance > 0 else None
        median, p90 = float(np.median(judged)), float(np.quantile(judged, 0.9))
        said = list(warnings)
        where = f"{held.sum()} held-out points" if held.any() else f"the {len(m)} points it was fitted to"
        if median > GOOD_MEDIAN_ERROR:
            said.append(
                f"{name}: poor fit, off by {median:.0%} in the median on {where} (good: {GOOD_MEDIAN_ERROR:.0%})"
            )
        if r2 is not None and r2 < GOOD_R2:
            said.append(f"{name}: poor fit, R² = {r2:.2f} (good: {GOOD_R2})")
        return cls(int((~held).sum()), int(held.sum()), r2, median, p90, tuple(said))
