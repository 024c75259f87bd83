"""EventQueue: what is to happen, in order of time. Equal times keep the order in which they were entered."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[[], None]


class EventQueue:
    """A binary heap over (time, number). The number makes ties, and with them whole runs, repeatable."""

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []  # [time, number, action], action None once it was called off
        self._num_entered = 0

    @property
    def next_time(self) -> float | None:
        """When the next event is due; None if there is none."""
        heap = self._heap
        while heap and heap[0][2] is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def enter(self, time: float, action: Action) -> list[Any]:
        """``action`` is to happen at ``time``. Returns a handle for `call_off`. O(log n)."""
        event = [time, self._num_entered, action]
        self._num_entered += 1
        heapq.heappush(self._heap, event)
        return event

    def call_off(self, event: list[Any]) -> None:
        """It will not happen; it leaves no trace, not even on the clock."""
        event[2] = None

    def take(self) -> tuple[float, Action]:
        """The next event, which the caller knows to be there (`next_time`)."""
        while True:
            time, _, action = heapq.heappop(self._heap)
            if action is not None:
                return time, action
