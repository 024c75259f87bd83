"""Where a request is between its arrival and its end, as the central scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from nanopd.engine.request import Request
from nanopd.kv.block_manager import BlockLease, BlockTable
from nanopd.router.decision import Decision, Path
from nanopd.transfer.handoff import Handoff
from nanopd.workers.worker import DecodeWorker, PrefillWorker, Worker


class Stage(Enum):
    BACKLOG = auto()  # disaggregated, waits until a decode worker has room for it
    WORKER = auto()  # in the scheduler of `Entry.worker`
    MOVING = auto()  # prefilled, its KV is on the way to `Entry.reservation.worker`


@dataclass(eq=False, slots=True)
class Reservation:
    """Blocks and a seat on a decode worker, and what has been sent there."""

    worker: DecodeWorker
    table: BlockTable | None  # None: lent to the prefill, in a shared pool
    first_block: int  # blocks before it were cached there, and need no transfer
    sent_blocks: int  # of the sequence, handed to a link so far
    open_moves: int = 0
    complete: bool = False  # the last handoff has arrived
    abandoned: bool = False  # its request is gone: the blocks are freed when nothing writes to them any more


@dataclass(eq=False, slots=True)
class Entry:
    """One sequence."""

    request: Request
    decision: Decision
    path: Path  # the decision's, unless a failure has changed it
    stage: Stage
    worker: Worker | None = None
    reservation: Reservation | None = None
    num_retries: int = 0
    lost: BaseException | None = None  # why its reservation was given up while it was in prefill


@dataclass(eq=False, slots=True)
class Move:
    """A handoff on its way."""

    handoff: Handoff
    entry: Entry
    source: PrefillWorker
    lease: BlockLease  # on the blocks it reads
    reservation: Reservation
    deadline: float
    expired: bool = False


class Backlog:
    """Entries that wait for a reservation, oldest first; any of them can leave in O(1)."""

    def __init__(self) -> None:
        self._entries: dict[Entry, None] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> Entry | None:
        return next(iter(self._entries), None)

    def append(self, entry: Entry) -> None:
        self._entries[entry] = None
        self.num_tokens += entry.request.num_tokens

    def remove(self, entry: Entry) -> None:
        del self._entries[entry]
        self.num_tokens -= entry.request.num_tokens

    def discard(self, entry: Entry) -> None:
        if entry in self._entries:
            self.remove(entry)

    def clear(self) -> list[Entry]:
        """Take all out, in order."""
        entries, self._entries, self.num_tokens = list(self._entries), {}, 0
        return entries
