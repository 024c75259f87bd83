"""Pools, handoffs and faulty links for the tests of the transfer layer, on the CPU and on a GPU."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from nanopd.kv.cache import KVCache
from nanopd.ops import get_ops
from nanopd.transfer.handoff import Handoff
from nanopd.transfer.marks import Mark
from nanopd.transfer.peer import PeerLink
from nanopd.transfer.pieces import Piece
from nanopd.transfer.pinned_relay import PinnedRelayLink
from nanopd.transfer.queued import Moved, QueuedLink, QueuedTransfer
from nanopd.transfer.same_device import SameDeviceLink

COPYING = [SameDeviceLink, PeerLink, PinnedRelayLink]
LAYERS, BLOCK_SIZE, HEADS, HEAD_DIM = 5, 8, 2, 64
BLOCK_BYTES = 2 * BLOCK_SIZE * HEADS * HEAD_DIM * 2  # of one block in one layer


def pool(
    num_blocks: int, seed: int, device: str = "cpu", model: str = "test", dtype: torch.dtype = torch.bfloat16
) -> KVCache:
    """A pool of random bits, NaN patterns included."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.empty(LAYERS, 2, num_blocks, BLOCK_SIZE, HEADS, HEAD_DIM, dtype=dtype)
    content.view(torch.uint8).random_(0, 256, generator=generator)
    return KVCache(content.to(device), model)


def bits(cache: KVCache) -> torch.Tensor:
    """A copy on the host that compares by bits."""
    return cache.tensor.cpu().clone().view(torch.uint8)


def handoff(
    source: KVCache, blocks: list[int], targets: list[int], num_tokens: int | None = None, number: int = 0
) -> Handoff:
    tokens = len(blocks) * BLOCK_SIZE if num_tokens is None else num_tokens
    return Handoff(
        number, f"r{number}", "prefill", "decode", tuple(blocks), tuple(targets), tokens, True, source.fingerprint()
    )


def random_handoff(source: KVCache, destination: KVCache, size: int, seed: int) -> Handoff:
    """``size`` random blocks to random places; the last one is partly filled."""
    rng = random.Random(seed)
    blocks = rng.sample(range(source.num_blocks), size)
    targets = rng.sample(range(destination.num_blocks), size)
    tokens = max(0, size * BLOCK_SIZE - rng.randrange(BLOCK_SIZE))
    return handoff(source, blocks, targets, tokens, seed)


def expected(before: torch.Tensor, sent: torch.Tensor, *handoffs: Handoff) -> torch.Tensor:
    """What the destination's bits must be, by plain indexing."""
    result = before.clone()
    for h in handoffs:
        result[:, :, list(h.destination_blocks)] = sent[:, :, list(h.source_blocks)]
    return result


def link_of(kind: Callable[..., QueuedLink], source: KVCache, destination: KVCache, **options: Any) -> Any:
    options = {"least_bytes": 1, **options}  # a layer leaves when it is sent, however small
    return kind(source, destination, get_ops(source.device), get_ops(destination.device), **options)


class Faulty:
    """Mixed into a link: raises before, or stalls at, the given pieces (counted over all transfers)."""

    raise_at: tuple[int, ...] = ()
    stall_at: tuple[int, ...] = ()
    count = 0

    def move(self, transfer: QueuedTransfer, piece: Piece, ready: Mark) -> Moved:
        number, self.count = self.count, self.count + 1
        self.reached().set()
        if number in self.raise_at:
            raise RuntimeError("injected fault")
        if number in self.stall_at:
            with self.changed:  # type: ignore[attr-defined]
                self.changed.wait_for(lambda: transfer.stopped or self.released().is_set())  # type: ignore[attr-defined]
        return super().move(transfer, piece, ready)  # type: ignore[misc]

    def reached(self) -> threading.Event:
        """Set once the link's thread is at a piece."""
        return self.__dict__.setdefault("_reached", threading.Event())

    def released(self) -> threading.Event:
        return self.__dict__.setdefault("_released", threading.Event())

    def release(self) -> None:
        self.released().set()
        with self.changed:  # type: ignore[attr-defined]
            self.changed.notify_all()


class FaultyRelay(Faulty, PinnedRelayLink):
    pass


class FaultyPeer(Faulty, PeerLink):
    pass


class CorruptPeer(PeerLink):
    """Arrives with a flipped bit, once in a while: what some boards with P2P "available" do."""

    def _copy(self, load: Any, slot: int) -> Callable[[], object]:
        copy = super()._copy(load, slot)

        def enqueue() -> None:
            copy()
            if len(load.piece.blocks) > 1:
                self._received[slot].view(torch.uint8)[3] ^= 4

        return enqueue
