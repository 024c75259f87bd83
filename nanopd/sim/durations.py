"""How long a step takes in a simulation: a function from the scheduler's plan to seconds.

Three sources: a step-time model that was fitted to measured steps; the analytical model's four numbers, for machines of
which nothing else is known; and a list of durations, recorded or drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nanopd.costmodel.analytical import AnalyticalModel
from nanopd.costmodel.checks import check_number
from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.hardware_profile import HardwareProfile
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.engine.plan import StepPlan
from nanopd.errors import SimulationError

StepTime = Callable[[StepPlan], float]  # seconds


def modelled(model: StepTimeModel) -> StepTime:
    """Step times of a fitted model."""
    return lambda plan: model.step_ms(StepFeatures.of(plan)) / 1e3


def analytical(profile: HardwareProfile) -> StepTime:
    """Step times of the analytical model, which has no notion of a step: decodes alone take d(b), a prompt of n tokens
    alone takes αn, and both together max(αn, d(b) + γn), since γ is by how much n prompt tokens delay the decodes."""
    model = AnalyticalModel(profile)
    alpha, gamma = profile.alpha_ms_per_token, profile.gamma_ms_per_token

    def seconds(plan: StepPlan) -> float:
        tokens, batch = plan.num_prefill_tokens, plan.num_decodes
        if not batch:
            return alpha * tokens / 1e3
        return max(alpha * tokens, model.decode_step_ms(batch) + gamma * tokens) / 1e3

    return seconds


def stretched(seconds: StepTime, factor: float) -> StepTime:
    """``factor`` times as long. Raises ConfigError unless that is at least 1 and finite."""
    check_number("the slowdown beside a busy neighbour", factor, least=1.0)
    return lambda plan: factor * seconds(plan)


def listed(seconds: Iterable[float]) -> StepTime:
    """Durations one after the other, whatever the plan. A step beyond the last raises SimulationError."""
    remaining = iter(seconds)

    def next_one(plan: StepPlan) -> float:
        try:
            return next(remaining)
        except StopIteration:
            raise SimulationError("the list of step durations is used up, and one more step was planned") from None

    return next_one
