"""SameDeviceLink: two pools on one device. One kernel reads blocks of the one and writes blocks of the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanopd.errors import ConfigError
from nanopd.kv.cache import KVCache
from nanopd.ops.interface import Ops
from nanopd.transfer.cache_link import CacheLink, Load, layers_of
from nanopd.transfer.pipeline import Stage
from nanopd.transfer.streams import Stream

# Nothing is staged, so pieces need only be small enough to be stopped between two of them. Between two pieces the card
# waits for a launch, some 50 µs, so there are no more than that takes.
COPY_BYTES = 1 << 30


class SameDeviceLink(CacheLink):
    """See above. Arguments as for ``CacheLink``; raises ConfigError if the pools lie on two devices."""

    path = "same-device copy"

    def __init__(
        self, source: KVCache, destination: KVCache, source_ops: Ops, destination_ops: Ops, **options: Any
    ) -> None:
        if source.device != destination.device:
            raise ConfigError(f"a same-device copy cannot go from {source.device} to {destination.device}")
        super().__init__(source, destination, source_ops, destination_ops, **{"piece_bytes": COPY_BYTES, **options})

    def stages(self, sending: Stream, receiving: Stream) -> Sequence[Stage[Load]]:
        return [Stage(self._copy, sending)]

    def _copy(self, load: Load, slot: int) -> Callable[[], object]:
        source, destination = layers_of(self.source, load.piece), layers_of(self.destination, load.piece)
        return self.source_ops.prepare_transfer_blocks(source, destination, load.source, load.destination)
