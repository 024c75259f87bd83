"""ThrottledLink: makes a link as slow as one wants to know about, so that a fast machine can show a slow network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeGuard

from nanopd.errors import ConfigError
from nanopd.transfer.handoff import Handoff
from nanopd.transfer.marks import HostMark, Mark
from nanopd.transfer.pieces import Piece
from nanopd.transfer.queued import Moved, QueuedLink, QueuedTransfer


@dataclass(frozen=True, slots=True)
class Arrival:
    """The later of two ends: of the transfer below, and of the time that the emulated link takes."""

    inner: QueuedTransfer
    due: HostMark

    def done(self) -> bool:
        if not self.inner.done():
            return False
        if self.inner.error is not None:
            raise self.inner.error
        return self.due.done()

    def wait(self, timeout: float | None = None) -> bool:
        begin = perf_counter()
        if not self.inner.wait(timeout):
            return False
        return self.due.wait(None if timeout is None else max(0.0, timeout - (perf_counter() - begin)))

    def seconds_since(self, earlier: HostMark) -> float:
        return self.due.seconds_since(earlier)


class ThrottledLink(QueuedLink):
    """A transfer arrives no earlier than ``latency_s`` + its KV bytes / ``gb_s`` after the link could begin with it.

    Layers pass one after the other, each begun when the one before it has passed and its own KV is computed; transfers
    queue up behind each other. The bytes really move, through ``inner``, which belongs to this link from now on.

    Args:
        inner: the link below. On a shared pool nothing moves, and only the time passes.
        gb_s: emulated bandwidth, 1e9 bytes per second.
        latency_s: seconds added to each transfer; they delay it and do not occupy the link.

    Raises ConfigError for a bandwidth that is not above 0 and finite, or a latency below 0.
    """

    def __init__(self, inner: QueuedLink, gb_s: float, latency_s: float = 0.0) -> None:
        if not _is_finite(gb_s) or gb_s <= 0:
            raise ConfigError(f"the bandwidth of a link must be above 0 GB/s and finite, got {gb_s!r:.80}")
        if not _is_finite(latency_s) or latency_s < 0:
            raise ConfigError(f"the latency of a link must be at least 0 s and finite, got {latency_s!r:.80}")
        self.path = f"throttled({inner.path}, {gb_s:g} GB/s)"
        self.inner, self.gb_s, self.latency_s = inner, gb_s, latency_s
        self._free_at = 0.0  # when the last layer so far has passed
        super().__init__(inner.layout, inner.bytes_per_block, inner.source_blocks, inner.destination_blocks)

    def check(self, handoff: Handoff) -> None:
        self.inner.check(handoff)

    def pieces(self, handoff: Handoff, layers: range) -> Iterator[Piece]:
        return iter([Piece(range(layer, layer + 1), range(handoff.num_blocks)) for layer in layers])

    def ready(self) -> Mark:
        return self.inner.ready()

    def move(self, transfer: QueuedTransfer, piece: Piece, ready: Mark) -> Moved:
        """Runs in this link's own thread, which may wait: for the layer to be computed, then for it to have passed."""
        ready.wait()
        if transfer.state is None:
            transfer.state = self.inner.open(transfer.handoff)
        inner: QueuedTransfer = transfer.state
        begin = HostMark(max(perf_counter(), self._free_at))
        inner.send_layers(piece.layers, ready)
        self._free_at = begin.time + len(piece.layers) * transfer.bytes / self.layout.num_layers / self.gb_s / 1e9
        with self.changed:
            self.changed.wait_for(lambda: transfer.stopped, self._free_at - perf_counter())
        if transfer.stopped:
            inner.cancel()
            self._free_at = min(self._free_at, perf_counter())
        return Moved(piece, begin, Arrival(inner, HostMark(self._free_at + self.latency_s)))

    def on_stop(self, transfer: QueuedTransfer) -> None:
        if transfer.state is not None:
            transfer.state.cancel()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.inner.close()


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
