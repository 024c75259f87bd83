"""CacheLink: a link between two KV caches, as a pipeline of stages. Subclasses name the stages."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from nanopd.errors import ConfigError
from nanopd.kv.cache import KVCache
from nanopd.ops.interface import Ops
from nanopd.transfer.handoff import Handoff
from nanopd.transfer.link import refuse_differences
from nanopd.transfer.marks import Mark
from nanopd.transfer.pieces import Piece, cut
from nanopd.transfer.pipeline import Pipeline, Stage
from nanopd.transfer.queued import Moved, QueuedLink, QueuedTransfer
from nanopd.transfer.streams import Stream, enter, mark, new_stream, refuse_foreign

PIECE_BYTES = 16 << 20  # at 50 GB/s it moves for longer than the host takes to enqueue a piece on four stages
LEAST_BYTES = 2 << 20  # on the CPU, where to enqueue a piece is to move it; layers of short prompts leave together
DEPTH = 4  # buffers of that size between two stages
WINDOW = 32  # pieces enqueued ahead: enough to keep a GPU busy, few enough to cancel and to leave its queues room


@dataclass(slots=True)
class BlockIds:
    """A handoff's block lists, [num_blocks] int64, where the kernels that read them run."""

    source: Tensor
    destination: Tensor


@dataclass(frozen=True, slots=True)
class Load:
    """A piece with the ids of its blocks."""

    piece: Piece
    ids: BlockIds

    @property
    def source(self) -> Tensor:
        return self.ids.source[self.piece.blocks.start : self.piece.blocks.stop]

    @property
    def destination(self) -> Tensor:
        return self.ids.destination[self.piece.blocks.start : self.piece.blocks.stop]


class CacheLink(QueuedLink):
    """Base of the links that copy.

    Args:
        source, destination: the pools.
        source_ops, destination_ops: kernels of their devices.
        source_stream: the stream that computes the source's KV; None: the one current where a layer is sent.
        transfer_stream, receive_stream: where the kernels of this link run on the source's and the destination's
            device, such as streams of an SM partition; None: streams of its own.
        piece_bytes: size of a staging buffer. Every pair of neighbouring stages has ``depth`` of them.
        least_bytes: layers that are sent one by one leave once they are so many bytes. None: on a GPU 16 MB, or a piece
            if that is less, since a smaller piece takes as much of the host's time; on the CPU 2 MB.

    Raises LayoutMismatchError if the pools differ in layout, ConfigError for a size or stream that does not fit.
    """

    piece_bytes: int

    def __init__(
        self,
        source: KVCache,
        destination: KVCache,
        source_ops: Ops,
        destination_ops: Ops,
        *,
        source_stream: Stream = None,
        transfer_stream: Stream = None,
        receive_stream: Stream = None,
        piece_bytes: int = PIECE_BYTES,
        depth: int = DEPTH,
        least_bytes: int | None = None,
    ) -> None:
        refuse_differences(source.fingerprint(), destination.fingerprint(), self.path)
        if source.device.type != destination.device.type:
            raise ConfigError(f"a {self.path} cannot go from {source.device} to {destination.device}")
        if least_bytes is None:
            least_bytes = min(piece_bytes, PIECE_BYTES) if source.device.type == "cuda" else LEAST_BYTES
        for name, value, least in (
            ("piece_bytes", piece_bytes, 1),
            ("depth", depth, 1),
            ("least_bytes", least_bytes, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an int >= {least}, got {value!r}")
        refuse_foreign("source_stream", source_stream, source.device)
        refuse_foreign("transfer_stream", transfer_stream, source.device)
        refuse_foreign("receive_stream", receive_stream, destination.device)
        self.source, self.destination = source, destination
        self.source_ops, self.destination_ops = source_ops, destination_ops
        self.source_stream = source_stream
        self.piece_bytes, self.depth, self.least_bytes = piece_bytes, depth, least_bytes
        self._block_bytes = source.bytes_per_block // source.num_layers
        self._in_flight: deque[Mark] = deque()
        sending = transfer_stream or new_stream(source.device, urgent=True)
        receiving = receive_stream or new_stream(destination.device, urgent=True)
        self._pipeline = Pipeline(self.stages(sending, receiving), depth)
        for stage in self._pipeline.stages:
            if stage.stream is not None:
                # Staging memory may have belonged to somebody whose last kernels still run on the current stream.
                for device in {source.device, destination.device}:
                    stage.stream.wait_stream(torch.cuda.current_stream(device))
        super().__init__(source.fingerprint(), source.bytes_per_block, source.num_blocks, destination.num_blocks)

    @abstractmethod
    def stages(self, sending: Stream, receiving: Stream) -> Sequence[Stage[Load]]:
        """The way of a piece. Stages that launch kernels run on these two; the first one is on the source's device."""

    # --- what QueuedLink asks ----------------------------------------------------------------------------------

    def pieces(self, handoff: Handoff, layers: range) -> Iterator[Piece]:
        return cut(layers, handoff.num_blocks, self._block_bytes, self.piece_bytes)

    def ready(self) -> Mark:
        if self.source.device.type != "cuda":
            return mark(None)
        return mark(self.source_stream or torch.cuda.current_stream(self.source.device))

    def inside(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def move(self, transfer: QueuedTransfer, piece: Piece, ready: Mark) -> Moved:
        while len(self._in_flight) >= WINDOW:
            self._in_flight.popleft().wait()
        try:
            if transfer.state is None:
                transfer.state = self._block_ids(transfer.handoff)
            begin, end = self._pipeline.push(Load(piece, transfer.state), ready)
        except Exception:
            transfer.last = self._pipeline.fence()  # its first stages may still be reading
            raise
        self._in_flight.append(end)
        return Moved(piece, begin, end)

    def close(self) -> None:
        super().close()
        with suppress(RuntimeError):  # a device that failed has nothing to wait for
            while self._in_flight:  # or staging buffers would be freed while a copy reads them
                self._in_flight.popleft().wait()
        self._pipeline.stages.clear()  # they call this link's methods: a cycle, which would keep both pools

    # --- inside ------------------------------------------------------------------------------------------------

    def _block_ids(self, handoff: Handoff) -> BlockIds:
        first, last = self._pipeline.stages[0].stream, self._pipeline.stages[-1].stream
        if first is last:  # one upload instead of two
            count = handoff.num_blocks
            ids = _on_stream((*handoff.source_blocks, *handoff.destination_blocks), self.source.device, first)
            return BlockIds(ids[:count], ids[count:])
        return BlockIds(
            _on_stream(handoff.source_blocks, self.source.device, first),
            _on_stream(handoff.destination_blocks, self.destination.device, last),
        )

    def _buffers(self, device: torch.device, *, pinned: bool = False) -> list[Tensor]:
        """``depth`` buffers of ``piece_bytes`` (one block in one layer, if that is more), flat, in the KV's dtype."""
        dtype = self.source.dtype
        size = max(self.piece_bytes, self._block_bytes) // dtype.itemsize
        return [torch.empty(size, dtype=dtype, device=device, pin_memory=pinned) for _ in range(self.depth)]

    def _flat(self, buffer: Tensor, piece: Piece) -> Tensor:
        """The part of a buffer that ``piece`` fills, [elements]."""
        return buffer[: len(piece.layers) * len(piece.blocks) * self._block_bytes // self.source.dtype.itemsize]

    def _staged(self, buffer: Tensor, piece: Piece) -> Tensor:
        """The same as blocks, [layers, 2, blocks, block_size, num_kv_heads, head_dim]."""
        shape = (len(piece.layers), 2, len(piece.blocks), *self.source.tensor.shape[3:])
        return self._flat(buffer, piece).view(shape)


def layers_of(cache: KVCache, piece: Piece) -> Tensor:
    """The part of a pool that a piece's kernels get: its layers, all blocks."""
    return cache.tensor[piece.layers.start : piece.layers.stop]


def _on_stream(ids: Sequence[int], device: torch.device, stream: Stream) -> Tensor:
    """int64 ids on ``device``, copied and later freed in the order of ``stream``."""
    enter(stream)
    host = torch.tensor(ids, dtype=torch.int64)
    if stream is None:
        return host
    return host.pin_memory().to(device, non_blocking=True)
