"""Marks: points in the order of somebody's work that one can ask, wait for, and measure between."""

from __future__ import annotations

import time
from typing import Any, Protocol


class Mark(Protocol):
    """Everything enqueued before it is done once it is."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is done, at most ``timeout`` seconds. Returns whether it is."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Time between an earlier mark of the same kind and this one; both are done."""
        ...


class HostMark:
    """A moment of the host's clock. A CPU computes what it is told at once, so the work before it is done."""

    __slots__ = ("time",)

    def __init__(self, at: float | None = None) -> None:
        """``at``: seconds of ``time.perf_counter``, now if None. A moment to come is done when it has come."""
        self.time = time.perf_counter() if at is None else at

    def done(self) -> bool:
        return time.perf_counter() >= self.time

    def wait(self, timeout: float | None = None) -> bool:
        remaining = self.time - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining if timeout is None else min(remaining, timeout))
        return self.done()

    def seconds_since(self, earlier: HostMark) -> float:
        return self.time - earlier.time
