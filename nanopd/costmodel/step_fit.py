"""Fit a StepTimeModel to measured steps, on relative error.

On relative error, since a router cares about a 5 ms step that is off by 1 ms as much as about a 50 ms step that is off
by 10. With the knee and the launch floor given, the model is linear in its coefficients: non-negative least squares
on rows divided by the measured time. Knee and floor are searched over a grid. The loss is Cauchy's, c² log(1 + (r/c)²)
(Huber, "Robust Statistics", 1981), solved by reweighting: a step that was held up by somebody else counts little.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nanopd.costmodel.checks import is_number, shown
from nanopd.costmodel.features import StepFeatures, StepPoint
from nanopd.costmodel.nnls import Array, nnls
from nanopd.costmodel.quality import FitQuality
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.errors import ConfigError, FitError

MIN_POINTS = 8
_KNEES = 14  # candidates for the knee
_FLOORS = 12  # candidates for the number of launch-bound points
_CAUCHY = 0.1  # relative error from which on a point loses weight
_FLOOR_PRICE = 1.15  # a floor must explain that much, or it only explains noise
_ROUNDS = 4  # of reweighting
_COLUMNS = (
    "base_ms",
    "token_ms",
    "dense_token_ms",
    "pair_ms",
    "chunk_context_ms",
    "kv_token_ms",
    "chunk_ms",
    "sequence_ms",
)


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """A model, how good it is, and the points with those marked that it has not seen."""

    model: StepTimeModel
    quality: FitQuality
    points: tuple[StepPoint, ...]


def fit_step_time(
    points: Iterable[StepPoint], *, holdout: float = 0.2, seed: int = 0, name: str = "step time"
) -> StepTimeFit:
    """Fit to some of ``points`` and judge by the others.

    Points that are marked ``held_out`` are not fitted to. If none is, a random share ``holdout`` of them is marked; 0
    judges the model by the points it was fitted to.

    Raises:
        FitError: fewer than 8 points to fit to.
        ConfigError: ``holdout`` outside of [0, 0.9].
    """
    if not (is_number(holdout) and 0.0 <= holdout <= 0.9):
        raise ConfigError(f"holdout must be in [0, 0.9], got {shown(holdout)}")
    marked = list(points)
    if not any(point.held_out for point in marked):
        chosen = set(random.Random(seed).sample(range(len(marked)), int(holdout * len(marked))))
        marked = [replace(point, held_out=i in chosen) for i, point in enumerate(marked)]
    training = [point for point in marked if not point.held_out]
    if len(training) < MIN_POINTS:
        raise FitError(f"{name}: {len(training)} points to fit to, at least {MIN_POINTS} are needed")
    model = _search(training)
    quality = FitQuality.of(
        name,
        [model.step_ms(point.features) for point in marked],
        [point.ms for point in marked],
        [point.held_out for point in marked],
        _gaps(name, training),
    )
    return StepTimeFit(model, quality, tuple(marked))


# --- inside ------------------------------------------------------------------------------------------------------


def _search(points: Sequence[StepPoint]) -> StepTimeModel:
    """The best over all knees and, for each, over how many of the fastest steps with prefill are launch-bound."""
    features = [point.features for point in points]
    ms = np.array([point.ms for point in points])
    eager = np.array([f.num_prefills > 0 for f in features])
    largest = max(f.num_tokens for f in features)
    knees = np.unique(np.geomspace(8, max(largest / 2, 9), _KNEES).round())
    floors = [0.0, *np.quantile(ms[eager], np.linspace(0.05, 0.6, _FLOORS))] if eager.sum() >= MIN_POINTS else [0.0]
    best: tuple[float, StepTimeModel] | None = None
    for knee in knees:
        rows = np.array([_row(f, float(knee)) for f in features])
        for floor in floors:
            model = _fit(rows, ms, eager & (ms <= floor), float(knee))
            residuals = np.array([model.step_ms(point.features) / point.ms - 1.0 for point in points])
            loss = float(np.log1p((residuals / _CAUCHY) ** 2).sum())
            loss *= _FLOOR_PRICE if model.launch_ms else 1.0
            if best is None or loss < best[0]:
                best = loss, model
    assert best is not None
    return best[1]


def _row(f: StepFeatures, knee: float) -> tuple[float, ...]:
    """What each coefficient is multiplied by, in the order of ``_COLUMNS``."""
    return (
        1.0,
        f.num_tokens,
        max(0.0, f.num_tokens - knee),
        f.prefill_pairs,
        f.chunk_context,
        f.kv_tokens,
        f.num_prefills,
        f.num_decodes + f.num_prefills,
    )


def _fit(rows: Array, ms: Array, launch_bound: np.ndarray, knee: float) -> StepTimeModel:
    """Coefficients from the steps that the device bounds, and the launch floor from the others."""
    device = ~launch_bound
    relative, weights = rows[device] / ms[device, None], np.ones(device.sum())
    for _ in range(_ROUNDS):
        x = nnls(relative * weights[:, None], weights)
        weights = 1.0 / np.sqrt(1.0 + ((relative @ x - 1.0) / _CAUCHY) ** 2)
    values = dict(zip(_COLUMNS, map(float, x)))
    launch = 0.0
    if launch_bound.any():
        rest = ms[launch_bound] - rows[launch_bound, -1] * values["sequence_ms"]
        launch = max(0.0, float((rest / ms[launch_bound] ** 2).sum() / (1 / ms[launch_bound] ** 2).sum()))
    return StepTimeModel(**values, knee_tokens=knee, launch_ms=launch)


def _gaps(name: str, points: Sequence[StepPoint]) -> list[str]:
    """What the points cannot tell: such coefficients are 0, and predictions there are too low."""
    features = [point.features for point in points]
    if not any(f.num_decodes for f in features):
        return [f"{name}: only prefill was measured, so it knows nothing of decodes"]
    if not any(f.prefill_tokens for f in features):
        return [f"{name}: only decodes were measured, so it knows nothing of prefill"]
    said = []
    for what, values in (
        ("prefill tokens", {f.prefill_tokens for f in features}),
        ("decode batch", {f.num_decodes for f in features}),
        ("KV tokens of the decodes", {f.kv_tokens for f in features}),
    ):
        if len(values) < 3:
            said.append(f"{name}: only {len(values)} different values of {what}, so its cost is hardly known")
    return said
