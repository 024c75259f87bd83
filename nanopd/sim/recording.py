"""Recording: every call that a driver made into its central scheduler, in the order in which the lock let them in.

The state machine has no clock, no thread and no chance of its own: the same calls with the same arguments do the same.
So a recording holds what came from outside, requests, times, tokens, ends of transfers, failures, and what must come
out again: the events. `nanopd.sim.replay` repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from nanopd.costmodel.files import write_whole
from nanopd.engine.request import Request
from nanopd.errors import ConfigError, NanoPDError, RecordingError
from nanopd.router.central import CentralScheduler, Event, WorkerStep
from nanopd.workers.worker import Worker

FORMAT = "nanopd-recording-1"
Row = dict[str, Any]  # one call: "call", "now", and its arguments as JSON


@dataclass(frozen=True)
class Recording:
    """A run. ``setup``: workers, pools and limits. ``calls``: one `Row` each."""

    setup: Mapping[str, Any]
    calls: Sequence[Row]
    events: Sequence[Event]

    def step_seconds(self, worker: str) -> list[float]:
        """How long each step of a worker took, in order, for ``nanopd.sim.durations.listed``."""
        begun, seconds = 0.0, []
        for row in self.calls:
            if row.get("worker") != worker:
                continue
            if row["call"] == "begin_step" and row["planned"]:
                begun = row["now"]
            elif row["call"] in ("finish_step", "fail_step"):
                seconds.append(row["now"] - begun)
        return seconds

    def host_seconds(self, worker: str) -> list[float]:
        """From the end of each step of a worker to the begin of its next, where work was there: the host's time."""
        ended: float | None = None
        seconds = []
        for row in self.calls:
            if row.get("worker") != worker:
                continue
            if row["call"] == "begin_step":
                if row["planned"] and ended is not None:
                    seconds.append(row["now"] - ended)
                ended = None
            elif row["call"] == "finish_step":
                ended = row["now"]
        return seconds

    def save(self, path: str | Path) -> Path:
        """Write JSON, whole or not at all; a line per call and per event."""
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in self.calls)
        events = ",\n".join(json.dumps([e.time, e.kind, e.subject, e.detail]) for e in self.events)
        head = json.dumps({"format": FORMAT, "setup": self.setup})[:-1]
        return write_whole(path, [f'{head}, "calls": [\n{rows}\n], "events": [\n{events}\n]}}\n'])


def load_recording(path: str | Path) -> Recording:
    """Read what ``Recording.save`` wrote. Raises RecordingError if it is missing, damaged or of another version."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RecordingError(f"cannot read the recording {path}: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordingError(f'{path} is no recording with "format": "{FORMAT}"')
    try:
        return Recording(data["setup"], data["calls"], [Event(*event) for event in data["events"]])
    except (KeyError, TypeError) as error:
        raise RecordingError(f"{path} is damaged: {type(error).__name__}: {error}") from error


class Driver(Protocol):
    """A ``Server`` or a `VirtualDriver`."""

    @property
    def central(self) -> CentralScheduler: ...


class Recorder:
    """Listens between a driver and its central scheduler, from now on. Attach it before the first request.

    Raises ConfigError if requests were accepted already: their blocks and transfers would be missing from it.
    """

    def __init__(self, driver: Driver) -> None:
        central = driver.central
        if not central.is_fresh:
            raise ConfigError("a recording begins before the first request, and this server has accepted some")
        self._setup = describe(central)
        self._calls: list[Row] = []
        self._events: list[Event] = []
        self._inside = False  # in a call: what it calls itself is not from outside
        self._forward = central.observe
        central.observe = self._observe
        for name, encode in _ENCODERS.items():
            setattr(central, name, self._tap(name, getattr(central, name), encode))

    @property
    def recording(self) -> Recording:
        """All so far. To be read when the driver has come to rest."""
        return Recording(self._setup, list(self._calls), list(self._events))

    def _observe(self, event: Event) -> None:
        self._events.append(event)
        if self._forward is not None:
            self._forward(event)

    def _tap(self, name: str, call: Callable[..., Any], encode: Callable[..., Row]) -> Callable[..., Any]:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            row = {"call": name, **encode(*args, **kwargs)}
            self._inside = True
            try:
                result = call(*args, **kwargs)
            except NanoPDError as error:  # refused: it must be refused again
                row["raised"] = type(error).__name__
                raise
            finally:
                self._inside = False
                self._calls.append(row)
            if name == "begin_step":
                row["planned"] = result is not None
            return result

        return tapped


# --- what a call consists of -------------------------------------------------------------------------------------


def _submit(sequences: Sequence[Request], now: float, *, stream: bool = False, **rest: Any) -> Row:
    first = sequences[0]
    return {
        "now": now,
        "parent": first.parent_id,
        "names": [request.request_id for request in sequences],
        "prompt": list(first.prompt_token_ids),
        "params": asdict(first.params),
        "arrival": first.arrival_time,
        "stop_ids": sorted(first.stop_ids),
        "stream": stream,
    }


def _error(error: BaseException) -> Row:
    return {
        "error": type(error).__name__,
        "message": str(error),
        "guilty": list(getattr(error, "request_ids", ())),
    }


_ENCODERS: dict[str, Callable[..., Row]] = {
    "submit": _submit,
    "abort": lambda request_id, now: {"now": now, "request": request_id},
    "begin_step": lambda worker, now: {"now": now, "worker": worker.name},
    "finish_step": lambda step, tokens, now: {"now": now, "worker": step.worker.name, "tokens": _tokens(step, tokens)},
    "fail_step": lambda step, error, now: {"now": now, "worker": step.worker.name, **_error(error)},
    "worker_failed": lambda worker, error, now: {"now": now, "worker": worker.name, **_error(error)},
    "transfer_done": lambda transfer_id, now: {"now": now, "transfer": transfer_id},
    "transfer_failed": lambda transfer_id, error, now: {"now": now, "transfer": transfer_id, **_error(error)},
    "tick": lambda now: {"now": now},
    "close": lambda now: {"now": now},
}


def _tokens(step: WorkerStep, tokens: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(sampled) for sampled in tokens]


# --- what the calls went to --------------------------------------------------------------------------------------


def describe(central: CentralScheduler) -> dict[str, Any]:
    """Workers, pools, links and limits, as plain data."""
    pools = list({id(worker.block_manager): worker.block_manager for worker in central.workers.values()}.values())
    return {
        "workers": [_describe_worker(worker, pools.index(worker.block_manager)) for worker in central.workers.values()],
        "pools": [
            {
                "num_blocks": pool.num_blocks,
                "block_size": pool.block_size,
                "prefix_caching": pool.enable_prefix_caching,
                "watermark_blocks": pool.watermark_blocks,
            }
            for pool in pools
        ],
        "links": sorted(central.links),
        "config": asdict(central.config),
        "kv_bytes_per_token": central.kv_bytes_per_token,
        "link_gb_s": central.link_gb_s,
        "policy": central.policy.name,
    }


def _describe_worker(worker: Worker, pool: int) -> dict[str, Any]:
    return {
        "name": worker.name,
        "role": worker.role.value,
        "pool": pool,
        "scheduler": asdict(worker.scheduler.config),
        "fingerprint": asdict(worker.fingerprint),
        "profile": worker.profile,
        "takes_prompts": bool(getattr(worker, "takes_prompts", False)),
    }
