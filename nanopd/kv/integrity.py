"""Integrity check: do the block manager's counts follow from the tables and leases that exist?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nanopd.errors import BlockAccountingError
from nanopd.kv.block_table import BlockLease, BlockTable, PoolSnapshot


def check_tables(
    pool: PoolSnapshot, tables: Sequence[BlockTable], leases: Sequence[BlockLease], copying: Sequence[int]
) -> None:
    """Raise BlockAccountingError unless each count equals the number of its holders."""
    refs = Counter(block for table in tables for block in table.block_ids)
    pins = Counter(copying)
    pins.update(block for lease in leases if not lease.released for block in lease.block_ids)
    for table in tables:
        _check_table(pool, table)
    for block in pool.blocks:
        found = (refs[block.block_id], pins[block.block_id])
        if found != (block.ref_count, block.pin_count):
            raise BlockAccountingError(
                f"block {block.block_id}: {found[0]} tables and {found[1]} pins hold it,"
                f" the manager counts {block.ref_count} and {block.pin_count}"
            )
    for lease in leases:
        _check_lease(pool, lease)
    _check_sharing(pool, tables)


def check_free_list(pool: PoolSnapshot, free: Sequence[int]) -> None:
    """Raise BlockAccountingError unless ``free`` lists every free block once, and free blocks are all it lists."""
    if sorted(free) != [block.block_id for block in pool.blocks if block.state == "free"]:
        raise BlockAccountingError(f"the free list {sorted(free)} is not the set of blocks that nobody holds or caches")
    num_cached = sum(block.state == "cached" for block in pool.blocks)
    if pool.num_free_blocks != len(free) + num_cached:
        raise BlockAccountingError(
            f"{pool.num_free_blocks} blocks are counted as free, but {len(free)} are free and {num_cached} are cached"
        )
    for block in pool.blocks:
        if block.state == "free" and block.tokens is not None:
            raise BlockAccountingError(f"free block {block.block_id} is still in the prefix cache")


def _check_table(pool: PoolSnapshot, table: BlockTable) -> None:
    if len(table.block_ids) != -(-table.num_tokens // pool.block_size):
        raise BlockAccountingError(f"a table of {table.num_tokens} tokens has {len(table.block_ids)} blocks")
    if len(set(table.block_ids)) != len(table.block_ids):
        raise BlockAccountingError(f"a table lists a block twice: {table.block_ids}")
    if any(not 0 <= block < len(pool.blocks) for block in table.block_ids):
        raise BlockAccountingError(f"a table lists blocks that do not exist: {table.block_ids}")
    if not 0 <= table.num_committed <= table.num_tokens:
        raise BlockAccountingError(f"a table of {table.num_tokens} slots has {table.num_committed} committed")


def _check_lease(pool: PoolSnapshot, lease: BlockLease) -> None:
    if lease.released:
        return
    for block, generation in zip(lease.block_ids, lease.generations, strict=True):
        if pool.blocks[block].generation != generation:
            raise BlockAccountingError(f"block {block} was reused while a lease held it")


def _check_sharing(pool: PoolSnapshot, tables: Sequence[BlockTable]) -> None:
    """Tables that share a block hold it at the same position, and have all they reserved in it computed."""
    index_of: dict[int, int] = {}
    for table in tables:
        for index, block in enumerate(table.block_ids):
            if index_of.setdefault(block, index) != index:
                raise BlockAccountingError(f"block {block} stands at two different positions of tables that share it")
            end = min((index + 1) * pool.block_size, table.num_tokens)
            if pool.blocks[block].ref_count > 1 and table.num_committed < end:
                raise BlockAccountingError(
                    f"block {block} is shared, and {end - table.num_committed} slots are unwritten"
                )
