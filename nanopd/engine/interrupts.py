"""Ctrl-C at a bad moment: a notebook's reader interrupts a step, and the engine must still be whole afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class InterruptGuard:
    """Makes an interrupt (SIGINT) wait until the end of a piece of bookkeeping.

    ``with guard:`` puts a signal handler in place, which takes some 30 µs the first time and nothing when nested;
    ``with guard.uninterrupted():`` inside of it marks the bookkeeping. Elsewhere an interrupt acts at once.
    Python delivers signals to the main thread, so in other threads there is nothing to do.
    """

    def __init__(self) -> None:
        self._depth = 0  # of `with guard` in the main thread
        self._busy = False
        self._pending: tuple[int, FrameType | None] | None = None
        self._previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            if self._depth == 0:
                handler = signal.getsignal(signal.SIGINT)
                self._previous = handler if callable(handler) else None  # else ignored, or not Python's business
                if self._previous is not None:
                    signal.signal(signal.SIGINT, self._receive)
            self._depth += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0 and self._previous is not None:
                signal.signal(signal.SIGINT, self._previous)
            self._deliver()

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        if self._busy or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self._deliver()

    def _deliver(self) -> None:
        if self._pending is not None and self._previous is not None and not self._busy:
            pending, self._pending = self._pending, None
            self._previous(*pending)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._busy or self._depth == 0:  # half way in or out of the guard: it must not be left in place
            self._pending = (number, frame)
        elif self._previous is not None:
            self._previous(number, frame)
