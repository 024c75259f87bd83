"""What the router's tests share: requests, worker snapshots, and step-time models of an imagined card."""

from __future__ import annotations

from typing import Any

from nanopd.costmodel.step_time import StepTimeModel
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.router.snapshot import Snapshot, WorkerSnapshot
from nanopd.workers.worker import Role

WHOLE = StepTimeModel(base_ms=5.0, dense_token_ms=0.02, knee_tokens=100, pair_ms=2e-6, kv_token_ms=4e-5, launch_ms=6.0)
HALF = StepTimeModel(base_ms=6.0, dense_token_ms=0.04, knee_tokens=100, pair_ms=4e-6, kv_token_ms=5e-5, launch_ms=6.0)
MODELS = {"whole device": WHOLE, "half": HALF}


def request(prompt: int = 100, max_tokens: int = 500, request_id: str = "r") -> Request:
    return Request(request_id, [1] * prompt, SamplingParams(max_tokens=max_tokens))


def worker(role: Role, name: str | None = None, **fields: Any) -> WorkerSnapshot:
    """An idle worker with a large pool, but for ``fields``."""
    idle: dict[str, Any] = {
        "name": name or role.value, "role": role, "profile": None, "num_waiting": 0, "waiting_tokens": 0,
        "num_running": 0, "running_tokens": 0, "free_blocks": 50_000, "total_blocks": 50_000, "block_size": 16,
        "free_seats": 256, "step_started": None,
    }  # fmt: skip
    return WorkerSnapshot(**{**idle, **fields})


def snapshot(*workers: WorkerSnapshot, **fields: Any) -> Snapshot:
    """No backlog, no transfers, a shared pool, but for ``fields``."""
    quiet: dict[str, Any] = {
        "now": 0.0, "backlog_requests": 0, "backlog_tokens": 0, "transfers": 0, "transfer_bytes": 0,
        "kv_bytes_per_token": 147_456, "link_gb_s": None,
    }  # fmt: skip
    return Snapshot(workers=workers, **{**quiet, **fields})


def trio(**decodes: Any) -> tuple[WorkerSnapshot, WorkerSnapshot, WorkerSnapshot]:
    """One worker of each role; ``decodes`` (num_running, running_tokens) are on the two that decode."""
    return worker(Role.COLLOCATED, **decodes), worker(Role.PREFILL), worker(Role.DECODE, **decodes)
