"""Cutting a handoff into pieces that fit a staging buffer: whole layers where they are small, part of one where not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers ``layers``, and of the handoff's block lists the entries ``blocks``."""

    layers: range
    blocks: range


def cut(layers: range, num_blocks: int, block_bytes: int, most_bytes: int) -> Iterator[Piece]:
    """Pieces of at most ``most_bytes`` bytes, or of one block in one layer if that alone is larger. In order.

    Args:
        num_blocks: of the handoff.
        block_bytes: of one block in one layer, keys and values.
    """
    if num_blocks == 0:
        return
    at_once = most_bytes // (num_blocks * block_bytes)  # layers
    if at_once >= 1:
        for first in range(layers.start, layers.stop, at_once):
            yield Piece(range(first, min(first + at_once, layers.stop)), range(num_blocks))
        return
    blocks = max(1, most_bytes // block_bytes)
    for layer in layers:
        for first in range(0, num_blocks, blocks):
            yield Piece(range(layer, layer + 1), range(first, min(first + blocks, num_blocks)))
