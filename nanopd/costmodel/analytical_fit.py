"""The analytical model's numbers from measured steps: α, β with the batch threshold, and γ.

* α: least-squares line through (prompt length, prefill time); α is its slope. The intercept, which the model has no
  place for, is reported.
* β and B*: d(b) = β · max(1, b / B*) through all decode points, on relative error. KV length is not in the formula, so
  wherever it matters the fit is poor, and says so.
* γ: line through the origin of (prompt tokens in the step, mixed step − the same decodes alone).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nanopd.costmodel.features import StepFeatures, StepPoint
from nanopd.costmodel.quality import FitQuality
from nanopd.errors import FitError


@dataclass(frozen=True, slots=True)
class AlphaFit:
    alpha_ms_per_token: float
    intercept_ms: float
    quality: FitQuality


@dataclass(frozen=True, slots=True)
class BetaFit:
    beta_ms: float
    batch_thresh: float
    quality: FitQuality


@dataclass(frozen=True, slots=True)
class GammaFit:
    gamma_ms_per_token: float
    pairs: tuple[tuple[int, float], ...]  # (prompt tokens in the step, delay of its decodes in ms)
    quality: FitQuality


def fit_alpha(points: Iterable[StepPoint]) -> AlphaFit:
    """From points of kind "prefill". Raises FitError without two different lengths, or if time does not grow."""
    chosen = [point for point in points if point.kind == "prefill" and not point.held_out]
    lengths = np.array([point.features.prefill_tokens for point in chosen], dtype=float)
    ms = [point.ms for point in chosen]
    if len(set(lengths)) < 2:
        raise FitError(f"alpha: {len(set(lengths))} different prompt lengths measured, at least 2 are needed")
    slope, intercept = map(float, np.polyfit(lengths, ms, 1))
    if slope <= 0:
        raise FitError(
            f"alpha: prefill time does not grow with the prompt (slope {slope:.3g} ms per token). Did something else "
            "use the machine? Measure again while nothing does, on a CPU with OMP_NUM_THREADS=1"
        )
    said = []
    if intercept > 0.1 * max(ms):
        said.append(f"alpha: a fixed {intercept:.3g} ms of each prefill has no place in the formula")
    predicted = np.maximum(slope * lengths + intercept, 1e-9)
    return AlphaFit(slope, intercept, FitQuality.of("alpha", list(predicted), ms, warnings=said))


def fit_beta(points: Iterable[StepPoint]) -> BetaFit:
    """From points of kind "decode". Raises FitError if there is none."""
    chosen = [point for point in points if point.kind == "decode" and not point.held_out]
    if not chosen:
        raise FitError("beta: no decode step measured, at least 1 is needed")
    batch = np.array([point.features.num_decodes for point in chosen], dtype=float)
    ms = np.array([point.ms for point in chosen])
    best = (np.inf, 0.0, 0.0)
    for thresh in np.unique(np.geomspace(1, batch.max(), 200)):
        shape = np.maximum(1.0, batch / thresh)
        beta = float((shape / ms).sum() / ((shape / ms) ** 2).sum())
        loss = float(((beta * shape / ms - 1.0) ** 2).sum())
        if loss < best[0] - 1e-12:
            best = loss, beta, float(thresh)
    _, beta, thresh = best
    said = []
    if thresh >= batch.max():
        said.append(f"batch_thresh: no knee up to batch {batch.max():.0f}, the largest measured")
    predicted = list(beta * np.maximum(1.0, batch / thresh))
    return BetaFit(beta, thresh, FitQuality.of("beta", predicted, list(ms), warnings=said))


def fit_gamma(points: Iterable[StepPoint]) -> GammaFit:
    """From points of kind "mixed" and the "decode" points nearest to them. Raises FitError without any pair.

    A negative slope, which only noise can give, is reported and becomes 0.
    """
    fixed = list(points)
    alone = [point for point in fixed if point.kind == "decode" and not point.held_out]
    mixed = [point for point in fixed if point.kind == "mixed" and not point.held_out]
    if not alone or not mixed:
        raise FitError(f"gamma: {len(mixed)} mixed and {len(alone)} pure decode steps measured, 1 of each is needed")
    tokens = np.array([point.features.prefill_tokens for point in mixed], dtype=float)
    decode = np.array([_nearest(alone, point.features).ms for point in mixed])
    ms = np.array([point.ms for point in mixed])
    slope = float((tokens * (ms - decode)).sum() / (tokens**2).sum())
    said = []
    if slope < 0:
        said.append(f"gamma: mixed steps were no slower than pure decodes (slope {slope:.3g} ms per token), taken as 0")
        slope = 0.0
    quality = FitQuality.of("gamma", list(decode + slope * tokens), list(ms), warnings=said)
    return GammaFit(slope, tuple(zip(map(int, tokens), map(float, ms - decode))), quality)


def _nearest(alone: Sequence[StepPoint], features: StepFeatures) -> StepPoint:
    """The pure decode step most like the decodes of a mixed one, by ratio of batch and of KV."""

    def distance(point: StepPoint) -> float:
        return sum(
            abs(np.log((1 + a) / (1 + b)))
            for a, b in (
                (point.features.num_decodes, features.num_decodes),
                (point.features.kv_tokens, features.kv_tokens),
            )
        )

    return min(alone, key=distance)
