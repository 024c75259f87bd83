"""Moves: reservations on decode workers, handoffs on their way, and the leases that keep both ends' blocks alive.

Invariants:

1. Blocks that a move reads are pinned until it ends or its lease runs out; after that its data counts as lost.
2. Blocks that a move writes are freed only when it has ended, however late: a stalled link may still write to them.
3. The moves of one reservation end in the order in which they were made (links are first in, first out).
"""

from __future__ import annotations

from collections.abc import Iterator

from nanopd.errors import StaleBlockError
from nanopd.router.entry import Entry, Move, Reservation
from nanopd.transfer.handoff import Handoff
from nanopd.workers.worker import DecodeWorker, PrefillWorker


class Moves:
    """The books of everything between the two sides. Not thread-safe."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.num_tokens = 0  # on links now
        self._moves: dict[int, Move] = {}  # in the order of their deadlines
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Move]:
        return iter(self._moves.values())

    def reserve(self, entry: Entry, prefill: PrefillWorker, decode: DecodeWorker, growth: int) -> bool:
        """Take blocks and a seat for ``entry`` on ``decode``; False if it has no room now."""
        request = entry.request
        table = decode.reserve(request, growth)
        if table is None:
            return False
        first = table.num_committed // decode.block_manager.block_size
        entry.reservation = Reservation(decode, table, first, first)
        if prefill.shares_pool_with(decode):
            decode.lend(request)
            entry.reservation.table = None
        return True

    def make(self, entry: Entry, source: PrefillWorker, num_computed: int, is_last: bool, now: float) -> Handoff | None:
        """A handoff of what is (or, once the step in flight ends, will be) computed and was not handed over before.

        Whole blocks only, unless it is the last. None if there are none.
        """
        reservation, request = entry.reservation, entry.request
        if reservation is None or reservation.table is None or request.table is None:
            return None
        size = source.block_manager.block_size
        first, stop = reservation.sent_blocks, -(-num_computed // size) if is_last else num_computed // size
        if stop <= first:
            return None
        handoff = Handoff(
            transfer_id=self._num_made,
            request_id=request.request_id,
            source=source.name,
            destination=reservation.worker.name,
            source_blocks=tuple(request.table.block_ids[first:stop]),
            destination_blocks=tuple(reservation.table.block_ids[first:stop]),
            num_tokens=min(num_computed, stop * size) - first * size,
            is_last=is_last,
            fingerprint=source.fingerprint,
        )
        # The whole table and not only what moves: cached blocks may not outlive those before them.
        move = Move(handoff, entry, source, source.pin(request), reservation, now + self.lease_s)
        self._moves[handoff.transfer_id] = move
        self._num_made += 1
        self.num_tokens += handoff.num_tokens
        reservation.sent_blocks = stop
        reservation.open_moves += 1
        return handoff

    def end(self, transfer_id: int, ok: bool) -> tuple[Move, BaseException | None] | None:
        """A move has ended: nothing reads or writes for it any more. Returns it, and what is wrong with its data.

        None for a move that is not known (any more).
        """
        move = self._moves.pop(transfer_id, None)
        if move is None:
            return None
        self.num_tokens -= move.handoff.num_tokens
        reservation, error = move.reservation, None
        reservation.open_moves -= 1
        if not move.expired:
            try:
                move.source.block_manager.check(move.lease)
            except StaleBlockError as stale:
                error = stale
            move.source.block_manager.unpin(move.lease)
        if ok and error is None and not reservation.abandoned and move.handoff.is_last:
            reservation.complete = True
        self._free_if_idle(reservation)
        return move, error

    def overdue(self, now: float) -> list[Move]:
        """Moves whose lease has run out just now. What they read is given back."""
        late = []
        for move in self._moves.values():
            if move.deadline > now:
                break
            if not move.expired:
                move.expired = True
                move.source.block_manager.unpin(move.lease)
                late.append(move)
        return late

    @property
    def next_deadline(self) -> float | None:
        return next((move.deadline for move in self._moves.values() if not move.expired), None)

    def abandon(self, entry: Entry) -> None:
        """Give the entry's reservation back: the seat at once, the blocks when nothing writes to them any more."""
        reservation, entry.reservation = entry.reservation, None
        if reservation is None:
            return
        reservation.abandoned = True
        reservation.worker.forget(entry.request.request_id)
        self._free_if_idle(reservation)

    def _free_if_idle(self, reservation: Reservation) -> None:
        if reservation.abandoned and reservation.open_moves == 0 and reservation.table is not None:
            reservation.worker.block_manager.free(reservation.table)
            reservation.table = None
