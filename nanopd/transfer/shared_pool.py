"""SharedPoolLink: prefill and decode on one device use one pool, so a handoff moves nothing but the right to read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nanopd.errors import TransferError
from nanopd.kv.cache import KVCache
from nanopd.transfer.handoff import Handoff
from nanopd.transfer.marks import Mark
from nanopd.transfer.pieces import Piece
from nanopd.transfer.queued import Moved, QueuedLink, QueuedTransfer
from nanopd.transfer.streams import Stream, mark, refuse_foreign


class SharedPoolLink(QueuedLink):
    """A transfer is done when the source stream has computed what it was given before the last layer was sent.

    Args:
        pool: of both workers.
        source_stream: the stream that computes the KV; None: the one current where a layer is sent.
    """

    path = "shared pool"

    def __init__(self, pool: KVCache, *, source_stream: Stream = None) -> None:
        refuse_foreign("source_stream", source_stream, pool.device)
        self.pool, self.source_stream = pool, source_stream
        super().__init__(pool.fingerprint(), pool.bytes_per_block, pool.num_blocks, pool.num_blocks)

    def check(self, handoff: Handoff) -> None:
        super().check(handoff)
        if handoff.source_blocks != handoff.destination_blocks:
            raise TransferError(f"{handoff}: in a shared pool blocks stay where they are; the two block lists differ")

    def bytes_of(self, handoff: Handoff) -> int:
        return 0

    def pieces(self, handoff: Handoff, layers: range) -> Iterator[Piece]:
        return iter(())

    def move(self, transfer: QueuedTransfer, piece: Piece, ready: Mark) -> Moved:
        raise TransferError("a shared pool has no pieces to move")

    def ready(self) -> Mark:
        if self.pool.device.type != "cuda":
            return mark(None)
        return mark(self.source_stream or torch.cuda.current_stream(self.pool.device))
