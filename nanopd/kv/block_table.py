"""Plain records of the KV layer: a sequence's block table, a lease on blocks, and a picture of the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nanopd.kv.prefix_cache import PrefixNode

BlockState = Literal["free", "cached", "used"]


@dataclass(eq=False, slots=True)
class BlockTable:
    """Where one sequence's KV lives: position ``p`` is slot ``p % block_size`` of ``block_ids[p // block_size]``.

    Only a `BlockManager` changes a table. Slots are *reserved* first (``num_tokens``, by ``append_slots``) and
    *computed* later (``num_committed``, by ``commit``): between the two a forward pass writes them.

    A table is dead once freed: it is empty, and every call but reading it raises ``BlockAccountingError``.
    """

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0  # slots reserved
    num_committed: int = 0  # slots whose KV is computed: a prefix of the reserved ones
    freed: bool = False
    # State of the hash chain, so that commit costs O(new tokens) and never hashes the prompt again.
    node: PrefixNode | None = field(default=None, repr=False)  # content of the last full committed block
    pending: list[int] = field(default_factory=list, repr=False)  # committed tokens of the block not yet full


@dataclass(eq=False, slots=True)
class BlockLease:
    """Blocks held for a reader that is no sequence, such as a transfer.

    While the lease is pinned, its blocks are neither reused nor evicted, whoever frees the table. After ``unpin``
    the generations still tell whether the blocks hold the same data: ``BlockManager.check`` compares them.
    """

    block_ids: tuple[int, ...]
    generations: tuple[int, ...]  # of each block, when it was pinned
    num_tokens: int  # tokens computed when it was pinned; the reader may read these and no more
    released: bool = False


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What the manager knows of one block."""

    block_id: int
    state: BlockState  # used: somebody holds it; cached: nobody does, content kept for a hit; free: no content
    ref_count: int  # tables that list it
    pin_count: int  # leases and pending copies that hold it
    generation: int
    block_hash: int | None  # chained hash if the prefix cache knows its content
    tokens: tuple[int, ...] | None  # the token ids it holds, if the prefix cache knows them


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The whole pool at one moment, for drawing and printing. Plain data: later changes do not reach it."""

    block_size: int
    num_free_blocks: int  # free and cached
    watermark_blocks: int
    blocks: tuple[BlockInfo, ...]
