"""What goes into the central scheduler and what comes out: limits, steps, events, and the predictor it asks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from nanopd.costmodel.checks import is_number, shown
from nanopd.engine.plan import StepPlan
from nanopd.engine.request import Request
from nanopd.errors import ConfigError
from nanopd.transfer.handoff import Handoff
from nanopd.workers.worker import Worker


@dataclass(frozen=True)
class CentralConfig:
    """Limits.

    * ``growth_tokens``: KV slots that a decode worker reserves beyond the prompt. More of them, fewer preemptions.
    * ``prefill_ahead_tokens``: requests are granted a reservation only while the prefill worker has fewer tokens than
      this to compute, so that blocks are not held for those who must still wait for long.
    * ``lease_s``: seconds after which a transfer counts as lost.
    * ``max_retries``: how often a request is computed anew after a failure that is not its own.
    * ``max_failed_steps``: a worker that fails this many steps in a row is given up.
    * ``max_unfinished``: requests beyond it are refused; None for no limit.
    * ``stream_layers``: send each prefill chunk's KV layer by layer while the step still computes.

    Raises ConfigError.
    """

    growth_tokens: int = 64
    prefill_ahead_tokens: int = 8192
    lease_s: float = 30.0
    max_retries: int = 2
    max_failed_steps: int = 3
    max_unfinished: int | None = None
    stream_layers: bool = True

    def __post_init__(self) -> None:
        least = {"growth_tokens": 0, "prefill_ahead_tokens": 1, "max_retries": 0, "max_failed_steps": 1}
        if self.max_unfinished is not None:
            least["max_unfinished"] = 1
        for name, limit in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < limit:
                raise ConfigError(f"{name} must be an int >= {limit}, got {value!r}")
        if not isinstance(self.stream_layers, bool):
            raise ConfigError(f"stream_layers must be True or False, got {self.stream_layers!r}")
        if not (is_number(self.lease_s) or self.lease_s == math.inf) or not self.lease_s > 0:
            raise ConfigError(f"lease_s must be a number of seconds > 0, got {shown(self.lease_s)}")


@dataclass(slots=True)
class WorkerStep:
    """What a worker is to do next: the plan, and handoffs to stream while it runs."""

    worker: Worker
    plan: StepPlan
    start: float
    handoffs: list[Handoff] = field(default_factory=list)


class Predictor(Protocol):
    """Guesses output lengths; see ``nanopd.router.predictor``."""

    def predict(self, request: Request) -> float: ...
    def observe(self, request: Request) -> None: ...


@dataclass(frozen=True, slots=True)
class Event:
    """One decision or change, for logs and for comparing a simulation with the run that it repeats."""

    time: float
    kind: str  # routed, granted, step, handoff, arrived, retried, expired, worker_failed, finished
    subject: str  # request or worker
    detail: str = ""
