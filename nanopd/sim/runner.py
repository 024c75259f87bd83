"""SimulatedRunner: answers with a duration and with made-up tokens where a real one would compute."""

from __future__ import annotations

from nanopd.engine.plan import StepPlan
from nanopd.sim.durations import StepTime

TOKEN = 1  # every output token: no stop token, so outputs end at their `max_tokens`
_ONE = [TOKEN]


class SimulatedRunner:
    """The runner of a worker in a simulation; ``execute`` has the signature of a real one, and takes no time.

    Args:
        alone: step times while no neighbour computes on the same card.
        beside: step times while one does; None: the same. Never taken to be shorter than alone.
    """

    def __init__(self, alone: StepTime, beside: StepTime | None = None) -> None:
        self._alone, self._beside = alone, beside

    def seconds(self, plan: StepPlan) -> tuple[float, float]:
        """How long the step takes if no neighbour computes, and if one does all the time."""
        alone = self._alone(plan)
        return alone, alone if self._beside is None else max(alone, self._beside(plan))

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """The same token for everybody. The lists are shared: read only."""
        return [_ONE if len(chunk.samplers) == 1 else [TOKEN] * len(chunk.samplers) for chunk in plan.chunks]
