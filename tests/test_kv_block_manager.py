"""The block manager, one failure per test. Random sequences of operations are in test_kv_state_machine.py."""

from __future__ import annotations

import pytest

from nanopd.errors import BlockAccountingError, ConfigError, OutOfBlocksError, StaleBlockError
from nanopd.kv.block_manager import BlockManager, BlockTable


def grown(manager: BlockManager, num_tokens: int, first: int = 0) -> BlockTable:
    """A table of ``num_tokens`` computed tokens first, first + 1, ..., with no prefix matched."""
    table = BlockTable()
    manager.append_slots(table, num_tokens)
    manager.commit(table, range(first, first + num_tokens))
    return table


# --- growing and running out --------------------------------------------------------------------------------------


def test_append_takes_a_block_only_when_the_last_one_is_full() -> None:
    manager = BlockManager(8, 4)
    table = BlockTable()
    sizes = []
    for _ in range(9):
        assert manager.append_slots(table, 1) == []
        sizes.append(len(table.block_ids))
    assert sizes == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert manager.num_free_blocks == 5


def test_slots_are_distinct_and_follow_the_table() -> None:
    manager = BlockManager(8, 4)
    other, table = grown(manager, 3), BlockTable()
    manager.append_slots(table, 10)
    slots = manager.slots(table, 0, 10)
    assert slots == [table.block_ids[p // 4] * 4 + p % 4 for p in range(10)]
    assert not set(slots) & set(manager.slots(other, 0, 3))
    assert manager.slots(table, 3, 6) == slots[3:6]
    for start, stop in [(0, 11), (-1, 2), (5, 4)]:
        with pytest.raises(BlockAccountingError, match="not within the 10"):
            manager.slots(table, start, stop)


@pytest.mark.parametrize("chunks", [[32], [16, 16], [5, 11, 16], [1] * 32])
def test_a_prompt_can_fill_the_pool_exactly(chunks: list[int]) -> None:
    manager = BlockManager(8, 4, watermark=0.2)
    table = BlockTable()
    for n in chunks:
        assert manager.can_append(table, n)
        manager.append_slots(table, n)
        manager.commit(table, range(table.num_tokens - n, table.num_tokens))
    assert manager.num_free_blocks == 0 and sorted(table.block_ids) == list(range(8))
    with pytest.raises(OutOfBlocksError, match="1 more tokens need 1 blocks, and 0 of 8 are free"):
        manager.append_slots(table, 1)
    manager.check_integrity([table])
    manager.free(table)
    assert manager.num_free_blocks == 8


def test_out_of_blocks_changes_nothing() -> None:
    manager = BlockManager(4, 4)
    table = grown(manager, 6)
    before = manager.snapshot(), list(table.block_ids), table.num_tokens
    with pytest.raises(OutOfBlocksError):
        manager.append_slots(table, 11)
    assert before == (manager.snapshot(), table.block_ids, table.num_tokens)
    manager.append_slots(table, 10)  # exactly what is left


def test_out_of_blocks_counts_the_copy() -> None:
    manager = BlockManager(3, 4)
    first = grown(manager, 6)
    second = manager.fork(first)
    third = grown(manager, 1, first=50)
    assert manager.blocks_needed(second, 1) == 1 and not manager.can_append(second, 1)
    with pytest.raises(OutOfBlocksError):
        manager.append_slots(second, 1)
    manager.check_integrity([first, second, third])
    assert second.block_ids == first.block_ids


def test_watermark_is_kept_for_admission_only() -> None:
    manager = BlockManager(10, 4, watermark=0.2)
    assert manager.watermark_blocks == 2
    assert manager.can_append(None, 32, keep_watermark=True)
    assert not manager.can_append(None, 33, keep_watermark=True)
    assert manager.can_append(None, 40) and not manager.can_append(None, 41)
    manager.append_slots(BlockTable(), 40)


def test_zero_tokens_need_nothing_and_negative_ones_are_refused() -> None:
    manager = BlockManager(2, 4)
    table = BlockTable()
    assert manager.append_slots(table, 0) == [] and table.block_ids == []
    assert manager.blocks_needed(None, 0) == 0
    with pytest.raises(BlockAccountingError, match="-1"):
        manager.append_slots(table, -1)


@pytest.mark.parametrize(
    "arguments",
    [(0, 4, 0.0), (4, 0, 0.0), (4, 4, 1.0), (4, 4, -0.1), (2.0, 4, 0.0), (4, "4", 0.0), (True, 4, 0.0), (4, 4, "x")],
)
def test_bad_sizes_are_refused(arguments: tuple[int, int, float]) -> None:
    num_blocks, block_size, watermark = arguments
    with pytest.raises(ConfigError):
        BlockManager(num_blocks, block_size, watermark=watermark)


# --- fork and copy on write -----------------------------------------------------------------------------------------


def test_fork_shares_until_somebody_writes() -> None:
    manager = BlockManager(8, 4)
    first = grown(manager, 6)
    second = manager.fork(first)
    assert second.block_ids == first.block_ids and manager.num_free_blocks == 6
    [(source, destination)] = manager.append_slots(second, 1)
    assert source == first.block_ids[1] and destination == second.block_ids[1] != source
    assert second.block_ids[0] == first.block_ids[0]
    assert manager.append_slots(first, 1) == []  # the only holder left writes in place
    manager.check_integrity([first, second])


def test_a_full_last_block_is_shared_for_ever() -> None:
    manager = BlockManager(8, 4)
    first = grown(manager, 8)
    second = manager.fork(first)
    assert manager.blocks_needed(second, 1) == 1
    assert manager.append_slots(second, 1) == []
    assert second.block_ids[:2] == first.block_ids


def test_siblings_that_write_in_one_step_make_one_copy_less_than_there_are_siblings() -> None:
    manager = BlockManager(16, 4)
    tables = [grown(manager, 5)]
    tables += [manager.fork(tables[0]) for _ in range(3)]
    copies = [copy for table in tables for copy in manager.append_slots(table, 1)]
    assert len(copies) == 3
    assert len({table.block_ids[1] for table in tables}) == 4
    assert {source for source, _ in copies} == {tables[3].block_ids[1]}
    manager.check_integrity(tables)


@pytest.mark.parametrize("victim", ["source", "destination"])
def test_the_ends_of_a_copy_are_not_reused_before_it_is_done(victim: str) -> None:
    """Preemption in the middle of a step must not make one block the end of two copies."""
    manager = BlockManager(8, 4)
    first, third = grown(manager, 2), grown(manager, 3, first=50)
    second, fourth = manager.fork(first), manager.fork(third)
    [copy] = manager.append_slots(second, 1)
    preempted = {"source": first, "destination": second}[victim]
    manager.free(preempted)
    [other] = manager.append_slots(fourth, 1)  # would take the block freed last
    assert other[1] not in copy
    alive = [table for table in (first, second, third, fourth) if table is not preempted]
    manager.check_integrity(alive)
    free = manager.num_free_blocks
    manager.copies_done()
    assert manager.num_free_blocks == free + 1
    manager.check_integrity(alive)


def test_commit_ends_the_hold_on_copies() -> None:
    manager = BlockManager(8, 4)
    first = grown(manager, 2)
    second = manager.fork(first)
    manager.append_slots(second, 1)
    assert sum(block.pin_count for block in manager.snapshot().blocks) == 2
    manager.commit(second, [9])
    assert sum(block.pin_count for block in manager.snapshot().blocks) == 0


def test_fork_of_slots_that_are_not_computed_is_refused() -> None:
    """The copy would run before the original's store, and the fork would read a slot that nobody writes."""
    manager = BlockManager(8, 4)
    table = grown(manager, 2)
    manager.append_slots(table, 1)
    with pytest.raises(BlockAccountingError, match="3 slots of which 2"):
        manager.fork(table)


# --- giving back ----------------------------------------------------------------------------------------------------


def test_double_free_is_an_error_and_leaves_others_alone() -> None:
    manager = BlockManager(8, 4)
    first = grown(manager, 6)
    second = manager.fork(first)
    manager.free(first)
    assert first.block_ids == [] and first.num_tokens == 0
    with pytest.raises(BlockAccountingError, match="freed before"):
        manager.free(first)
    manager.check_integrity([second])


def test_a_freed_table_is_dead() -> None:
    manager = BlockManager(8, 4)
    table = grown(manager, 6)
    manager.free(table)
    for call in (
        lambda: manager.append_slots(table, 1),
        lambda: manager.commit(table, []),
        lambda: manager.fork(table),
        lambda: manager.pin(table),
    ):
        with pytest.raises(BlockAccountingError, match="freed before"):
            call()


def test_a_table_that_was_copied_cannot_be_freed_twice() -> None:
    manager = BlockManager(8, 4)
    table = grown(manager, 6)
    duplicate = BlockTable(list(table.block_ids), table.num_tokens, table.num_committed)
    manager.free(table)
    before = manager.snapshot()
    with pytest.raises(BlockAccountingError, match="no table holds it"):
        manager.free(duplicate)
    assert manager.snapshot() == before


def test_a_table_that_lists_a_block_twice_is_refused_whole() -> None:
    manager = BlockManager(4, 4)
    table = grown(manager, 8)
    forged = BlockTable(block_ids=[table.block_ids[0]] * 2, num_tokens=8)
    with pytest.raises(BlockAccountingError, match="twice"):
        manager.free(forged)
    manager.check_integrity([table])


def test_an_unused_table_can_be_freed() -> None:
    manager = BlockManager(2, 4)
    manager.free(BlockTable())
    manager.free(manager.match_prefix([1, 2, 3]))
    manager.check_integrity([])


def test_commit_beyond_the_reserved_slots_is_refused() -> None:
    manager = BlockManager(2, 4)
    table = BlockTable()
    manager.append_slots(table, 3)
    manager.commit(table, [1, 2])
    with pytest.raises(BlockAccountingError, match="2 tokens after 2: only 3 slots"):
        manager.commit(table, [3, 4])
    manager.commit(table, [3])


# --- generations and leases -----------------------------------------------------------------------------------------


def generations(manager: BlockManager) -> list[int]:
    return [block.generation for block in manager.snapshot().blocks]


def test_generation_changes_exactly_when_content_is_given_up() -> None:
    manager = BlockManager(2, 4)
    table = grown(manager, 6)
    full, partial = table.block_ids
    manager.free(table)
    after_free = generations(manager)
    assert after_free[partial] == 1 and after_free[full] == 0  # the full block is still cached
    again = manager.match_prefix([0, 1, 2, 3, 9])
    assert again.block_ids == [full] and generations(manager) == after_free
    manager.free(again)
    grown(manager, 8, first=100)  # takes both blocks, which evicts the cached one
    assert generations(manager)[full] == 1


def test_a_pinned_block_is_not_reused() -> None:
    manager = BlockManager(2, 4, enable_prefix_caching=False)
    table = grown(manager, 6)
    lease = manager.pin(table)
    assert lease.block_ids == tuple(table.block_ids) and lease.num_tokens == 6
    manager.free(table)
    assert manager.num_free_blocks == 0
    with pytest.raises(OutOfBlocksError):
        manager.append_slots(BlockTable(), 1)
    manager.check(lease)
    manager.check_integrity([], [lease])
    manager.unpin(lease)
    assert manager.num_free_blocks == 2


def test_a_reader_that_comes_too_late_gets_an_error() -> None:
    manager = BlockManager(2, 4)
    table = grown(manager, 6)
    lease = manager.pin(table)
    manager.free(table)
    manager.unpin(lease)
    with pytest.raises(StaleBlockError, match="leased at generation 0 and is at 1"):
        manager.check(lease)


def test_a_released_lease_is_good_as_long_as_the_data_is() -> None:
    manager = BlockManager(2, 4)
    table = grown(manager, 8)
    lease = manager.pin(table)
    manager.unpin(lease)
    manager.check(lease)
    manager.free(table)
    manager.check(lease)  # both blocks are cached, so the data is there
    grown(manager, 1, first=100)
    with pytest.raises(StaleBlockError):
        manager.check(lease)


def test_two_leases_are_two_holds_and_each_is_released_once() -> None:
    manager = BlockManager(2, 4)
    table = grown(manager, 3)
    one, two = manager.pin(table), manager.pin(table)
    manager.free(table)
    manager.unpin(one)
    with pytest.raises(BlockAccountingError, match="released before"):
        manager.unpin(one)
    manager.check(two)
    assert manager.num_free_blocks == 1
    manager.unpin(two)
    assert manager.num_free_blocks == 2


def test_a_pinned_table_still_grows_in_place() -> None:
    """Behind the reader's tokens: a transfer in flight costs the writer no copy and no block."""
    manager = BlockManager(1, 4)
    table = grown(manager, 2)
    lease = manager.pin(table)
    assert manager.append_slots(table, 2) == []
    manager.check(lease)
    assert lease.num_tokens == 2


# --- integrity check ------------------------------------------------------------------------------------------------


def test_integrity_check_finds_a_leak() -> None:
    manager = BlockManager(8, 4)
    kept, lost = grown(manager, 6), grown(manager, 2, first=50)
    manager.check_integrity([kept, lost])
    with pytest.raises(BlockAccountingError, match=f"block {lost.block_ids[0]}: 0 tables"):
        manager.check_integrity([kept])
    lease = manager.pin(kept)
    with pytest.raises(BlockAccountingError, match="the manager counts 1 and 1"):
        manager.check_integrity([kept, lost])
    manager.check_integrity([kept, lost], [lease])


def test_integrity_check_finds_corrupted_counts_lists_and_tables() -> None:
    def check(corrupt, message: str) -> None:  # type: ignore[no-untyped-def]
        manager = BlockManager(8, 4)
        tables = [grown(manager, 9), grown(manager, 6, first=50)]
        manager.free(grown(manager, 8, first=80))
        manager.check_integrity(tables)
        corrupt(manager, tables)
        with pytest.raises(BlockAccountingError, match=message):
            manager.check_integrity(tables)

    check(lambda m, t: m._refs.__setitem__(0, 2), "block 0: 1 tables")
    check(lambda m, t: m._free.append(m._free[0]), "free list")
    check(lambda m, t: m._free.pop(), "free list")
    check(lambda m, t: m._free.append(t[0].block_ids[0]), "free list")
    check(lambda m, t: t[0].block_ids.pop(), "9 tokens has 2 blocks")
    check(lambda m, t: setattr(t[0], "num_committed", 10), "10 committed")
    check(lambda m, t: t[0].block_ids.__setitem__(2, t[0].block_ids[0]), "twice")
    check(lambda m, t: t[0].block_ids.__setitem__(2, 99), "do not exist")
    check(lambda m, t: m._cache._lru.popitem(), "free list|disagree")
    check(lambda m, t: m._cache._lru.move_to_end(next(iter(m._cache._lru))), "evicted before its child")
    check(lambda m, t: m._cache._node_of.__setitem__(t[0].block_ids[0], None), "disagree")


# --- cost -----------------------------------------------------------------------------------------------------------


def test_the_chain_is_hashed_once_per_block_however_the_tokens_arrive() -> None:
    calls = []

    def counting_hash(parent: int, tokens: tuple[int, ...]) -> int:
        calls.append(tokens)
        return hash((parent, tokens))

    manager = BlockManager(100, 4, hash_function=counting_hash)
    table = BlockTable()
    for n in [21, 1, 1, 1, 30, 7]:
        manager.append_slots(table, n)
        manager.commit(table, range(table.num_committed, table.num_committed + n))
    assert calls == [tuple(range(i, i + 4)) for i in range(0, 60, 4)]


def test_snapshot_is_a_picture_and_not_a_view() -> None:
    manager = BlockManager(4, 4)
    table = grown(manager, 6)
    before = manager.snapshot()
    assert [block.state for block in before.blocks] == ["used", "used", "free", "free"]
    assert before.blocks[0].tokens == (0, 1, 2, 3) and before.blocks[1].tokens is None
    manager.free(table)
    assert before.blocks[0].state == "used" and manager.snapshot().blocks[0].state == "cached"
    assert before.num_free_blocks == 2 and before.block_size == 4
