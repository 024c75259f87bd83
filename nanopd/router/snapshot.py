"""Snapshot: what a policy may know when it decides. Plain data of one moment."""

from __future__ import annotations

from dataclasses import dataclass

from nanopd.workers.worker import Role


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The load of one worker."""

    name: str
    role: Role
    profile: str | None  # key of its step-time model; None: the default one
    num_waiting: int  # requests queued on it
    waiting_tokens: int  # their tokens not yet computed, and those of requests in the middle of their prefill
    num_running: int  # requests that decode
    running_tokens: int  # KV tokens that its last step's decodes read
    free_blocks: int
    total_blocks: int
    block_size: int
    free_seats: int  # a decode worker's reservations count as taken
    step_started: float | None  # when the step in flight began, by the driver's clock
    takes_prompts: bool = False  # a decode worker that also serves collocated requests
    cached_tokens: int = 0  # of the prompt that is to be routed, found in this worker's prefix cache


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The load of the whole system."""

    now: float
    workers: tuple[WorkerSnapshot, ...]  # those that are alive
    backlog_requests: int  # disaggregated requests that wait for a decode worker's credit
    backlog_tokens: int
    transfers: int  # handoffs on links
    transfer_bytes: int
    kv_bytes_per_token: int
    link_gb_s: float | None  # None: no copy (shared pool)

    def of(self, role: Role) -> tuple[WorkerSnapshot, ...]:
        """Workers to which requests that need this role can go."""
        both = role is Role.COLLOCATED
        return tuple(worker for worker in self.workers if worker.role is role or (both and worker.takes_prompts))
