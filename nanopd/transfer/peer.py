"""PeerLink: from one GPU straight to another (P2P), scattered blocks packed into contiguous pieces on the way.

Whether two GPUs can do this, and do it right, is for probing to say: a driver may report P2P that corrupts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nanopd.transfer.cache_link import CacheLink, Load, layers_of
from nanopd.transfer.pipeline import Stage
from nanopd.transfer.streams import Stream, enter, new_stream


class PeerLink(CacheLink):
    """Gather on the source's device, copy across, scatter on the destination's. Arguments as for ``CacheLink``."""

    path = "peer copy"

    def stages(self, sending: Stream, receiving: Stream) -> Sequence[Stage[Load]]:
        self._packed = self._buffers(self.source.device)
        self._received = self._buffers(self.destination.device)
        self._arriving = new_stream(self.destination.device)
        return [
            Stage(self._gather, sending),
            Stage(self._copy, new_stream(self.source.device)),
            Stage(self._scatter, receiving),
        ]

    def _gather(self, load: Load, slot: int) -> Callable[[], object]:
        out = self._staged(self._packed[slot], load.piece)
        return partial(self.source_ops.gather_blocks, layers_of(self.source, load.piece), load.source, out)

    def _copy(self, load: Load, slot: int) -> Callable[[], object]:
        # torch orders a copy between devices after what the current stream of either was given. On the destination
        # that must not be the stream of the scatters, or the copies would wait for them.
        copying = self._pipeline.stages[1].stream
        received, packed = self._flat(self._received[slot], load.piece), self._flat(self._packed[slot], load.piece)

        def enqueue() -> None:
            enter(self._arriving)
            enter(copying)
            received.copy_(packed, non_blocking=True)

        return enqueue

    def _scatter(self, load: Load, slot: int) -> Callable[[], object]:
        staged = self._staged(self._received[slot], load.piece)
        target = layers_of(self.destination, load.piece)
        return partial(self.destination_ops.scatter_blocks, staged, target, load.destination)
