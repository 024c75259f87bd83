"""SimulatedRunner: answers with a duration and with made-up tokens where a real one would compute."""

from __future__ import annotations

import math

from nanopd.engine.plan import StepPlan
from nanopd.errors import ConfigError
from nanopd.sim.durations import StepTime

TOKEN = 1  # every output token: no stop token, so outputs end at their `max_tokens`
_ONE = [TOKEN]


class SimulatedRunner:
    """The runner of a worker in a simulation; ``execute`` has the signature of a real one, and takes no time.

    Args:
        alone: step times while no neighbour computes on the same card.
        beside: step times while one does; None: ``slowdown`` times as long as alone.
        slowdown: at least 1.0. Two workers that each use the whole card take turns: 2.0.

    Raises ConfigError for a slowdown below 1.
    """

    def __init__(self, alone: StepTime, beside: StepTime | None = None, slowdown: float = 1.0) -> None:
        if not (slowdown >= 1.0 and math.isfinite(slowdown)):
            raise ConfigError(f"the slowdown beside a busy neighbour must be at least 1 and finite, got {slowdown!r}")
        self._alone, self._beside, self._slowdown = alone, beside, slowdown

    def seconds(self, plan: StepPlan) -> tuple[float, float]:
        """How long the step takes if no neighbour computes, and if one does all the time."""
        alone = self._alone(plan)
        return alone, alone * self._slowdown if self._beside is None else max(alone, self._beside(plan))

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """The same token for everybody. The lists are shared: read only."""
        return [_ONE if len(chunk.samplers) == 1 else [TOKEN] * len(chunk.samplers) for chunk in plan.chunks]
