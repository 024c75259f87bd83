"""Streams and events behind the marks of a link, and what stands for them on the CPU, where calls do their work."""

from __future__ import annotations

import time

import torch

from nanopd.errors import ConfigError
from nanopd.transfer.marks import HostMark, Mark

Stream = torch.cuda.Stream | None  # None: the CPU, which has no streams

_POLL_SECONDS = (20e-6, 500e-6)  # first and longest pause between two looks at an event


class CudaMark:
    """A CUDA event on a stream, with its time."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # who waits for it sleeps
        self.event.record(stream)

    def done(self) -> bool:
        return self.event.query()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            self.event.synchronize()
            return True
        deadline, pause = time.perf_counter() + timeout, _POLL_SECONDS[0]
        while not self.event.query():
            remaining = deadline - time.perf_counter()
            if remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _POLL_SECONDS[1])
        return True

    def seconds_since(self, earlier: CudaMark) -> float:
        return earlier.event.elapsed_time(self.event) / 1e3


def mark(stream: Stream) -> Mark:
    """A mark after all that ``stream`` was given so far."""
    return HostMark() if stream is None else CudaMark(stream)


def follow(stream: Stream, earlier: Mark | None) -> None:
    """What ``stream`` is given from now on runs after ``earlier``. The host waits only if there is no stream."""
    if isinstance(earlier, CudaMark) and stream is not None:
        stream.wait_event(earlier.event)
    elif earlier is not None:
        earlier.wait()


def enter(stream: Stream) -> None:
    """Make ``stream`` the current one of this thread. For a link's own thread, which nobody else uses."""
    if stream is not None:
        torch.cuda.set_stream(stream)


def new_stream(device: torch.device, *, urgent: bool = False) -> Stream:
    """A stream on ``device``; kernels on an ``urgent`` one get the SMs first that others leave."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)


def refuse_foreign(name: str, stream: Stream, device: torch.device) -> None:
    """Raises ConfigError for a stream of another device than the pool's."""
    if stream is not None and stream.device != device:
        raise ConfigError(f"{name} is a stream of {stream.device}; the pool lies on {device}")
