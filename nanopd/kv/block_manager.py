"""BlockManager: which block of the KV pool belongs to whom. Bookkeeping only; it touches no tensor.

Paged KV memory follows vLLM (Kwon et al. 2023, arXiv:2309.06180): fixed-size blocks, one table per sequence,
reference counts, copy on write. Invariants, all of which `BlockManager.check_integrity` or the tests hold:

1. A block is *used* (a table, a lease or a pending copy holds it), *cached* (nobody does, but the prefix cache knows
   its content) or *free*. Cached and free blocks are both there for the taking: ``num_free_blocks`` counts both.
2. Only the last block of a table is ever written, only behind its last token, and only while no other table lists it.
   So what a slot holds never changes while its block has the same generation.
3. A block's generation number changes exactly when its content is given up: when the last holder of a block that is
   not cached lets go, and when a cached block is evicted. A pair (block, generation) means one content for ever.
4. A fork shares computed slots only, so the source of a copy is complete before the step that copies it.
5. The copies of one step can run as one parallel kernel: no block is the destination of two, and none is both source
   and destination. Both ends of a copy are held until `copies_done`, so a block freed in the middle of a step is not
   handed out as the destination of another copy of that step.
6. Whatever raises has changed nothing.

One manager belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nanopd.errors import BlockAccountingError, ConfigError, OutOfBlocksError, StaleBlockError
from nanopd.kv import integrity
from nanopd.kv.block_table import BlockInfo, BlockLease, BlockState, BlockTable, PoolSnapshot
from nanopd.kv.prefix_cache import HashFunction, PrefixCache, PrefixNode, chain_hash

__all__ = ["BlockInfo", "BlockLease", "BlockManager", "BlockTable", "PoolSnapshot"]


class BlockManager:
    """Owner of ``num_blocks`` blocks of ``block_size`` token slots each.

    ``watermark`` is the share of the pool that admission leaves free (``can_append(..., keep_watermark=True)``), so
    that requests already running can grow for a while before one of them must be preempted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        hash_function: HashFunction = chain_hash,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an int of at least 1, got {value!r}")
        if not isinstance(watermark, (int, float)) or not 0.0 <= watermark < 1.0:
            raise ConfigError(f"watermark must be in [0, 1), got {watermark!r}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.watermark_blocks = int(watermark * num_blocks)
        self._refs = [0] * num_blocks  # tables that list the block
        self._pins = [0] * num_blocks  # leases and pending copies that hold it
        self._generations = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the next one used
        self._copying: list[int] = []  # sources and destinations of copies handed out and not yet done
        self._cache = PrefixCache(num_blocks, hash_function)

    # --- how much is left ------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had now: free ones, and cached ones that would be evicted."""
        return len(self._free) + self._cache.num_evictable

    def blocks_needed(self, table: BlockTable | None, num_new_tokens: int) -> int:
        """Blocks that ``append_slots`` would take, a copy-on-write block included. None stands for a new table."""
        if num_new_tokens <= 0:
            return 0
        if table is None:
            return -(-num_new_tokens // self.block_size)
        total = -(-(table.num_tokens + num_new_tokens) // self.block_size)
        return total - len(table.block_ids) + self._must_copy(table)

    def can_append(self, table: BlockTable | None, num_new_tokens: int, *, keep_watermark: bool = False) -> bool:
        """Whether ``append_slots`` would succeed, and with ``keep_watermark`` leave the watermark untouched."""
        reserve = self.watermark_blocks if keep_watermark else 0
        return self.blocks_needed(table, num_new_tokens) + reserve <= self.num_free_blocks

    # --- a sequence's life -----------------------------------------------------------------------------------

    def match_prefix(self, token_ids: Sequence[int]) -> BlockTable:
        """A new table that shares the longest cached prefix of ``token_ids``, in whole blocks.

        At most ``len(token_ids) - 1`` tokens: the last one is always computed, for its logits. O(prompt).
        """
        nodes = self._walk(token_ids)
        for node in nodes:
            self._acquire(node.blocks[0])
        num_tokens = len(nodes) * self.block_size
        return BlockTable(
            block_ids=[node.blocks[0] for node in nodes],
            num_tokens=num_tokens,
            num_committed=num_tokens,
            node=nodes[-1] if nodes else None,
        )

    def peek_prefix(self, token_ids: Sequence[int]) -> int:
        """Number of tokens that ``match_prefix`` would find now. Takes nothing and leaves the LRU order alone."""
        return len(self._walk(token_ids)) * self.block_size

    def append_slots(self, table: BlockTable, num_new_tokens: int) -> list[tuple[int, int]]:
        """Reserve slots for ``num_new_tokens`` more tokens. O(new blocks).

        Returns physical copies ``(source block, destination block)`` that must run before the next store: a last
        block that is partly full and shared with another table is replaced by a copy (copy on write). The copies
        of all calls since the last `copies_done` may run in any order or at once.

        Raises OutOfBlocksError, and then nothing has changed.
        """
        self._check_live(table)
        if 0 < num_new_tokens <= -table.num_tokens % self.block_size and self._refs[table.block_ids[-1]] == 1:
            table.num_tokens += num_new_tokens  # the common case of a decode: room in a last block that is not shared
            return []
        if num_new_tokens < 0:
            raise BlockAccountingError(f"cannot append {num_new_tokens} tokens to a table")
        needed = self.blocks_needed(table, num_new_tokens)
        if needed > self.num_free_blocks:
            raise OutOfBlocksError(
                f"{num_new_tokens} more tokens need {needed} blocks, and {self.num_free_blocks} of {self.num_blocks}"
                f" are free (block size {self.block_size})"
            )
        copies: list[tuple[int, int]] = []
        if num_new_tokens and self._must_copy(table):
            source, destination = table.block_ids[-1], self._take()
            for block in (source, destination):
                self._pins[block] += 1
                self._copying.append(block)
            table.block_ids[-1] = destination
            self._refs[source] -= 1  # another table holds it still, or it would not have been copied
            copies.append((source, destination))
            needed -= 1
        for _ in range(needed):
            table.block_ids.append(self._take())
        table.num_tokens += num_new_tokens
        return copies

    def copies_done(self) -> None:
        """The copies handed out so far have been launched (or will never be): let go of both their ends.

        A scheduler calls it when it starts a new step. `commit` implies it, since a step's copies run before its
        forward pass. Do not call either between two ``append_slots`` of the same step.
        """
        held, self._copying = self._copying, []
        for block in held:
            self._unpin_block(block)

    def commit(self, table: BlockTable, token_ids: Sequence[int]) -> None:
        """The KV of the *next* ``len(token_ids)`` reserved slots is computed now, and these are their tokens.

        Call it once per step with that step's tokens only (positions ``num_committed`` and following). Blocks that
        became full enter the prefix cache. If the same content is cached already, this table keeps its own block.
        O(len(token_ids)).
        """
        self._check_live(table)
        if table.num_committed + len(token_ids) > table.num_tokens:
            raise BlockAccountingError(
                f"cannot commit {len(token_ids)} tokens after {table.num_committed}:"
                f" only {table.num_tokens} slots are reserved"
            )
        if self._copying:
            self.copies_done()
        index = table.num_committed // self.block_size
        table.num_committed += len(token_ids)
        if not self.enable_prefix_caching:
            return
        pending = table.pending
        pending.extend(token_ids)
        num_full = len(pending) // self.block_size
        for i in range(num_full):
            tokens = tuple(pending[i * self.block_size : (i + 1) * self.block_size])
            table.node, displaced = self._cache.register(table.node, tokens, table.block_ids[index + i])
            if displaced is not None:
                self._recycle(displaced)
        if num_full:
            del pending[: num_full * self.block_size]

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table with the same content, which shares every block. O(blocks).

        All its slots must be committed: a slot that is yet to be written would be written in one of the two only.
        """
        self._check_live(table)
        if table.num_committed != table.num_tokens:
            raise BlockAccountingError(
                f"cannot fork a table with {table.num_tokens} slots of which {table.num_committed} are committed"
            )
        for block in table.block_ids:
            self._refs[block] += 1
        return BlockTable(
            list(table.block_ids), table.num_tokens, table.num_committed, node=table.node, pending=list(table.pending)
        )

    def free(self, table: BlockTable) -> None:
        """Give all blocks of ``table`` back and empty it. Full committed blocks stay cached until evicted."""
        self._check_live(table)
        if len(set(table.block_ids)) != len(table.block_ids):
            raise BlockAccountingError(f"the table to free lists a block twice: {table.block_ids}")
        for block in table.block_ids:
            if not 0 <= block < self.num_blocks or self._refs[block] < 1:
                raise BlockAccountingError(f"block {block} is in the table to free, but no table holds it")
        for block in reversed(table.block_ids):  # last to first: a child becomes evictable before its parent
            self._refs[block] -= 1
            self._release_if_idle(block)
        table.block_ids = []
        table.num_tokens = table.num_committed = 0
        table.node, table.pending = None, []
        table.freed = True

    def slots(self, table: BlockTable, start: int, stop: int) -> list[int]:
        """Slot ids (block id * block size + offset) of positions ``start`` ... ``stop - 1``."""
        if not 0 <= start <= stop <= table.num_tokens:
            raise BlockAccountingError(f"positions {start} to {stop} are not within the {table.num_tokens} reserved")
        size, ids = self.block_size, table.block_ids
        return [ids[p // size] * size + p % size for p in range(start, stop)]

    # --- leases ----------------------------------------------------------------------------------------------

    def pin(self, table: BlockTable) -> BlockLease:
        """Hold the blocks of ``table`` for a reader, even if the table is freed. `unpin` exactly once."""
        self._check_live(table)
        for block in table.block_ids:
            self._pins[block] += 1
        generations = tuple(self._generations[block] for block in table.block_ids)
        return BlockLease(tuple(table.block_ids), generations, table.num_committed)

    def unpin(self, lease: BlockLease) -> None:
        """The reader is done, or its time is up: see `check` for a reader that comes too late."""
        if lease.released:
            raise BlockAccountingError(f"the lease on blocks {lease.block_ids} was released before")
        lease.released = True
        for block in reversed(lease.block_ids):
            self._unpin_block(block)

    def check(self, lease: BlockLease) -> None:
        """Raise StaleBlockError unless every block still holds what it held when the lease was taken.

        A reader whose lease may have run out checks *after* it read: then what it read is good.
        """
        for block, generation in zip(lease.block_ids, lease.generations, strict=True):
            if self._generations[block] != generation:
                raise StaleBlockError(
                    f"block {block} was leased at generation {generation} and is at {self._generations[block]} now"
                )

    # --- looking inside --------------------------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[BlockTable], leases: Iterable[BlockLease] = ()) -> None:
        """Raise BlockAccountingError unless all counts add up. ``tables`` and ``leases``: *all* live ones. O(pool)."""
        integrity.check_tables(self.snapshot(), list(tables), list(leases), self._copying)
        integrity.check_free_list(self.snapshot(), self._free)
        self._cache.check_integrity()

    def snapshot(self) -> PoolSnapshot:
        """The pool as plain data. O(pool)."""
        return PoolSnapshot(
            block_size=self.block_size,
            num_free_blocks=self.num_free_blocks,
            watermark_blocks=self.watermark_blocks,
            blocks=tuple(self._info(block) for block in range(self.num_blocks)),
        )

    # --- inside ----------------------------------------------------------------------------------------------

    def _walk(self, token_ids: Sequence[int]) -> list[PrefixNode]:
        """Cached contents of the longest prefix in whole blocks that leaves at least one token."""
        nodes: list[PrefixNode] = []
        node = None
        for stop in range(self.block_size, len(token_ids), self.block_size):
            node = self._cache.find(node, tuple(token_ids[stop - self.block_size : stop]))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _must_copy(self, table: BlockTable) -> bool:
        return table.num_tokens % self.block_size != 0 and self._refs[table.block_ids[-1]] > 1

    def _acquire(self, block: int) -> None:
        self._cache.acquire(block)
        self._refs[block] += 1

    def _take(self) -> int:
        """A block for a table. The caller has made sure that there is one."""
        if not self._free:
            self._recycle(self._cache.evict())
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def _unpin_block(self, block: int) -> None:
        self._pins[block] -= 1
        self._release_if_idle(block)

    def _release_if_idle(self, block: int) -> None:
        if not self._refs[block] and not self._pins[block] and not self._cache.release(block):
            self._recycle(block)

    def _recycle(self, block: int) -> None:
        """The content of ``block`` is given up: whoever remembers it must be able to tell."""
        self._generations[block] += 1
        self._free.append(block)

    def _info(self, block: int) -> BlockInfo:
        node = self._cache.node_of(block)
        held = self._refs[block] or self._pins[block]
        state: BlockState = "used" if held else "cached" if self._cache.is_evictable(block) else "free"
        return BlockInfo(
            block_id=block,
            state=state,
            ref_count=self._refs[block],
            pin_count=self._pins[block],
            generation=self._generations[block],
            block_hash=None if node is None else node.block_hash,
            tokens=None if node is None else node.tokens,
        )

    def _check_live(self, table: BlockTable) -> None:
        if table.freed:
            raise BlockAccountingError("this block table was freed before")
