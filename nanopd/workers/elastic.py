"""ElasticRunner: the whole card for whoever computes alone, an SM partition for whoever has company.

A fixed split wastes the SMs of a side that has nothing to do. Which runner takes a step is decided when the step is
launched and cannot change before it ends, so for one step after the other side wakes up the two overlap on the whole
card's SMs; that costs time and never correctness.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nanopd.engine.plan import StepPlan


class Occupancy:
    """Which of the workers on one card have a step on it now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def arrive(self, name: str) -> bool:
        """``name`` is about to launch a step. Returns whether it has company."""
        with self._lock:
            company = bool(self._busy - {name})
            self._busy.add(name)
            return company

    def leave(self, name: str) -> None:
        with self._lock:
            self._busy.discard(name)


class ElasticStep:
    """A launched step; the card counts as occupied until its tokens are there."""

    def __init__(self, pending: Any, leave: Callable[[], None]) -> None:
        self._pending, self._leave = pending, leave

    def wait(self) -> list[list[int]]:
        """See ``PendingStep.wait``."""
        try:
            return self._pending.wait()
        finally:
            self._leave()


class ElasticRunner:
    """Two runners over one pool and the same weights; each step goes to one of them.

    Args:
        name: of the worker.
        alone, beside: runners on the whole card, and in the partition that is the worker's beside a neighbour.
        occupancy: shared by the workers of one card.
        inside: entered around what the second one launches: the partition's stream, and what cuBLAS is told.
    """

    def __init__(
        self,
        name: str,
        alone: Any,
        beside: Any,
        occupancy: Occupancy,
        inside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.name = name
        self._inside = inside
        self.alone, self.beside = alone, beside
        self.occupancy = occupancy
        self.kv_cache = alone.kv_cache
        self.ops = alone.ops
        self.device = alone.device
        self.stream = None  # either's: whoever needs it finds it current while a step is launched

    def launch(self, plan: StepPlan, after_layer: Callable[[int], None] | None = None) -> ElasticStep:
        """See ``ModelRunner.launch``."""
        company = self.occupancy.arrive(self.name)
        try:
            if company:
                with self._inside():
                    pending = self.beside.launch(plan, after_layer)
            else:
                pending = self.alone.launch(plan, after_layer)
        except BaseException:
            self.occupancy.leave(self.name)
            raise
        return ElasticStep(pending, lambda: self.occupancy.leave(self.name))

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """See ``ModelRunner.execute``."""
        return self.launch(plan).wait()

    def capture_graphs(self, use_tqdm: bool = False) -> None:
        self.alone.capture_graphs(use_tqdm=use_tqdm)
        with self._inside():
            self.beside.capture_graphs(use_tqdm=use_tqdm)

    def close(self) -> None:
        self.alone.close()
        self.beside.close()
