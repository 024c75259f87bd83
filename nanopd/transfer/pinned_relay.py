"""PinnedRelayLink: over the host's memory, the way that exists between any two GPUs.

gather kernel -> staging -> pinned host buffer -> staging -> scatter kernel, four stages on four streams. The copies to
and from the host are large, contiguous and on two copy engines, so that both directions of PCIe are busy at once.
Works within one device too: slower than the copy there, but the same code that runs between two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from nanopd.transfer.cache_link import CacheLink, Load, layers_of
from nanopd.transfer.pipeline import Stage
from nanopd.transfer.streams import Stream, new_stream


class PinnedRelayLink(CacheLink):
    """See above. Arguments as for ``CacheLink``. On the CPU the pinned buffer is a plain one."""

    path = "pinned relay"

    def stages(self, sending: Stream, receiving: Stream) -> Sequence[Stage[Load]]:
        source, destination = self.source.device, self.destination.device
        self._packed = self._buffers(source)
        self._host = self._buffers(torch.device("cpu"), pinned="cuda" in (source.type, destination.type))
        self._received = self._buffers(destination)
        return [
            Stage(self._gather, sending),
            Stage(self._to_host, new_stream(source)),
            Stage(self._from_host, new_stream(destination)),
            Stage(self._scatter, receiving),
        ]

    def _gather(self, load: Load, slot: int) -> Callable[[], object]:
        out = self._staged(self._packed[slot], load.piece)
        return partial(self.source_ops.gather_blocks, layers_of(self.source, load.piece), load.source, out)

    def _to_host(self, load: Load, slot: int) -> Callable[[], object]:
        host, packed = self._flat(self._host[slot], load.piece), self._flat(self._packed[slot], load.piece)
        return partial(host.copy_, packed, non_blocking=True)

    def _from_host(self, load: Load, slot: int) -> Callable[[], object]:
        received, host = self._flat(self._received[slot], load.piece), self._flat(self._host[slot], load.piece)
        return partial(received.copy_, host, non_blocking=True)

    def _scatter(self, load: Load, slot: int) -> Callable[[], object]:
        staged = self._staged(self._received[slot], load.piece)
        target = layers_of(self.destination, load.piece)
        return partial(self.destination_ops.scatter_blocks, staged, target, load.destination)
