"""Worker: one place where steps run. A scheduler over a pool of KV blocks, and a runner on a device.

The three roles differ in how a request comes in and leaves:

* a `CollocatedWorker` computes the prompt and the output, one step may mix both;
* a `PrefillWorker` computes prompts and gives the request away with its first token;
* a `DecodeWorker` reserves blocks and a seat for a request before its prefill starts, and takes it over with its KV.

Policy only: no tensor, no thread, no clock. The scheduler is the engine's own, with the same continuous batching in
all three roles; so a decode worker whose pool runs out preempts, and recomputes by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any

from nanopd.engine.request import Request
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import ConfigError, UnknownRequestError
from nanopd.kv.block_manager import BlockLease, BlockManager, BlockTable
from nanopd.kv.fingerprint import LayoutFingerprint


class Role(StrEnum):
    COLLOCATED = "collocated"
    PREFILL = "prefill"
    DECODE = "decode"


class Worker:
    """What the roles share.

    Args:
        name: unique among the workers of a cluster.
        scheduler: its policy. Workers that share a pool have one ``block_manager`` in their schedulers.
        runner: carries out plans, see ``nanopd.engine.engine.Runner``; a driver's business, policy never calls it.
        fingerprint: layout of its pool.
        place: where it runs, in words ("cuda:0, 84 SMs").
        profile: key of its step-time model; None for the default one.
        enter: called once by the thread that will run its steps: the context in which it does (stream, cores).
    """

    role: Role

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        runner: Any,
        fingerprint: LayoutFingerprint,
        *,
        place: str = "",
        profile: str | None = None,
        enter: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a worker's name must be a non-empty str, got {name!r}")
        self.name = name
        self.scheduler = scheduler
        self.runner = runner
        self.fingerprint = fingerprint
        self.place = place
        self.profile = profile
        self.enter = enter
        self.alive = True  # False once it failed for good: it gets no more requests
        self.taken = threading.Lock()  # held by the server that runs its steps: no other one may

    @property
    def block_manager(self) -> BlockManager:
        return self.scheduler.block_manager

    def serves(self, role: Role) -> bool:
        """Whether requests that need a worker of this role can come here."""
        return self.role is role

    def shares_pool_with(self, other: Worker) -> bool:
        """Whether a block id means the same memory to both."""
        return self.block_manager is other.block_manager

    def check(self, request: Request) -> None:
        """Raise an InvalidRequestError if the request can never be served here."""
        self.scheduler.validate(request)

    def add(self, request: Request, now: float) -> None:
        """Queue a request here. Raises what ``check`` raises."""
        self.scheduler.add(request, now)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.place or 'nowhere'})"


class CollocatedWorker(Worker):
    """Prefill and decode in one place: the engine of the chapters before."""

    role = Role.COLLOCATED


class PrefillWorker(Worker):
    """Computes prompts, in chunks, batched, with a prefix cache; each request leaves with its first token."""

    role = Role.PREFILL

    def check(self, request: Request) -> None:
        self.scheduler.validate(request, hand_off=True)

    def add(self, request: Request, now: float) -> None:
        """Queue a request. With ``request.table`` set (a shared pool) its KV goes into the blocks reserved there."""
        request.hand_off = True
        super().add(request, now)

    def pin(self, request: Request) -> BlockLease:
        """Hold the request's blocks for a transfer that reads them, whatever becomes of the request."""
        if request.table is None:
            raise UnknownRequestError(f"request {request.request_id!r} holds no blocks on {self.name}")
        return self.block_manager.pin(request.table)

    def give_away(self, request: Request) -> BlockTable:
        """Let a prefilled request go. The table is the caller's: to free, or to pass on within a shared pool."""
        return self.scheduler.detach(request)


class DecodeWorker(Worker):
    """Continuous batching of requests whose prompt was computed elsewhere.

    A reservation is a seat and blocks, taken before the prefill starts, so that whoever has been prefilled can run.

    Args:
        takes_prompts: also computes prompts itself, in chunks beside its decodes, for requests that are routed to be
            collocated. All decodes then share one batch, whichever way they came.
        others: as for `Worker`.
    """

    role = Role.DECODE

    def __init__(self, *args: Any, takes_prompts: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.takes_prompts = takes_prompts
        self.reserved: dict[str, BlockTable | None] = {}  # by request id, a seat each; None: the table was lent

    def serves(self, role: Role) -> bool:
        return role is Role.DECODE or (role is Role.COLLOCATED and self.takes_prompts)

    def check(self, request: Request) -> None:
        self.scheduler.check_attachable(request)

    def reserve(self, request: Request, growth: int) -> BlockTable | None:
        """Blocks for all of the request's tokens and ``growth`` more, cached prefix included, and a seat.

        None if there is no room now, or none besides for the first of those who wait here: it would have to preempt
        the newcomer.
        Raises DuplicateRequestError or PromptTooLongError if the request can never run here.
        """
        self.check(request)
        blocks, waiting = self.block_manager, self.scheduler.waiting
        ahead = blocks.blocks_needed(None, waiting[0].num_tokens) if waiting else 0
        if self.scheduler.num_free_seats < 1 + bool(waiting):
            return None
        table = blocks.match_prefix(request.all_token_ids)
        longest = min(request.token_limit, self.scheduler.config.max_model_len)
        most = min(request.num_tokens + max(growth, 1), longest - 1)  # the last token needs no slot, see `check_length`
        slots = max(most, request.num_tokens) - table.num_tokens
        reserve = ahead if self._is_empty else ahead + blocks.watermark_blocks
        if blocks.blocks_needed(table, slots) + reserve > blocks.num_free_blocks:
            blocks.free(table)
            return None
        blocks.append_slots(table, slots)  # no copy: whole cached blocks only
        self.reserved[request.request_id] = table
        self.scheduler.reserved_seats += 1
        return table

    @property
    def _is_empty(self) -> bool:
        """With nobody here to protect, the watermark would only lock out a large prompt."""
        return self.scheduler.num_free_seats == self.scheduler.config.max_num_seqs

    def lend(self, request: Request) -> None:
        """In a shared pool: let the prefill write to the reserved blocks, as ``request.table``."""
        request.table, self.reserved[request.request_id] = self.reserved[request.request_id], None

    def take_over(self, request: Request, now: float) -> None:
        """Run a request whose KV is in the blocks reserved for it. It is detached from its prefill worker."""
        table = self.forget(request.request_id)
        if table is not None:
            computed = request.num_computed_tokens
            if table.num_committed < computed:
                self.block_manager.commit(table, request.all_token_ids[table.num_committed : computed])
            request.table = table
        self.scheduler.attach(request, now)

    def forget(self, request_id: str) -> BlockTable | None:
        """Give the seat of a reservation back. Its table is the caller's, to free once nothing writes to it any more.

        None: the table was lent, and is the request's. Raises UnknownRequestError if there is no reservation.
        """
        if request_id not in self.reserved:
            raise UnknownRequestError(f"request {request_id!r} has no reservation on {self.name}")
        self.scheduler.reserved_seats -= 1
        return self.reserved.pop(request_id)
