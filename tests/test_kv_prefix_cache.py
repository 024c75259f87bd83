"""The prefix cache: what is found, what is evicted, and what a hash collision can do."""

from __future__ import annotations

import pytest

from nanopd.kv.block_manager import BlockManager, BlockTable
from nanopd.kv.prefix_cache import HashFunction, chain_hash


def start(manager: BlockManager, tokens: list[int]) -> BlockTable:
    """Match, reserve and compute ``tokens``, as an engine does with a new request."""
    table = manager.match_prefix(tokens)
    manager.append_slots(table, len(tokens) - table.num_tokens)
    manager.commit(table, tokens[table.num_committed :])
    return table


def finish(manager: BlockManager, tokens: list[int]) -> list[int]:
    """Run ``tokens`` and free them; the blocks they had."""
    table = start(manager, tokens)
    blocks = list(table.block_ids)
    manager.free(table)
    return blocks


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (50, 12)])
def test_whole_blocks_are_found_and_the_last_token_is_left_to_compute(length: int, found: int) -> None:
    manager = BlockManager(32, 4)
    blocks = finish(manager, list(range(14)))  # three full blocks and a partial one
    tokens = list(range(50))[:length]
    assert manager.peek_prefix(tokens) == found
    table = manager.match_prefix(tokens)
    assert table.num_tokens == table.num_committed == found
    assert table.block_ids == blocks[: found // 4]
    manager.check_integrity([table])


def test_an_empty_prompt_matches_nothing() -> None:
    assert BlockManager(4, 4).match_prefix([]).block_ids == []


def test_a_match_ends_at_the_first_difference() -> None:
    manager = BlockManager(32, 4)
    finish(manager, list(range(16)))
    tokens = list(range(16))
    tokens[5] = 99
    assert manager.peek_prefix(tokens) == 4


def test_only_computed_blocks_match() -> None:
    manager = BlockManager(32, 4)
    table = BlockTable()
    manager.append_slots(table, 12)
    assert manager.peek_prefix(list(range(20))) == 0
    manager.commit(table, range(7))  # one full block and three tokens
    assert manager.peek_prefix(list(range(20))) == 4
    manager.commit(table, [7])
    assert manager.peek_prefix(list(range(20))) == 8


def test_a_running_request_shares_its_blocks() -> None:
    manager = BlockManager(4, 4)
    first = start(manager, list(range(9)))
    second = start(manager, list(range(10)))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert manager.num_free_blocks == 0
    manager.check_integrity([first, second])
    manager.free(first)
    assert manager.match_prefix(list(range(9))).block_ids == second.block_ids[:2]


def test_cached_blocks_count_as_free_and_make_room() -> None:
    manager = BlockManager(4, 4)
    finish(manager, list(range(16)))
    assert manager.num_free_blocks == 4 and manager.can_append(None, 16)
    table = start(manager, list(range(100, 116)))
    assert manager.num_free_blocks == 0 and manager.peek_prefix(list(range(17))) == 0
    manager.check_integrity([table])


def test_taking_a_prefix_uses_up_free_blocks() -> None:
    """What is matched is held, so it is no room for the rest of the prompt any more."""
    manager = BlockManager(4, 4)
    finish(manager, list(range(16)))
    table = manager.match_prefix(list(range(17)))
    assert table.num_tokens == 16 and manager.num_free_blocks == 0
    assert not manager.can_append(table, 1)


def test_eviction_takes_the_least_recently_used() -> None:
    manager = BlockManager(3, 4)
    for first in (0, 10, 20):
        finish(manager, list(range(first, first + 4)))
    manager.free(manager.match_prefix([0, 1, 2, 3, 0]))  # used again: 10 ... is the oldest now
    start(manager, [99])
    found = [manager.peek_prefix([*range(first, first + 4), 0]) for first in (0, 10, 20)]
    assert found == [4, 0, 4]


def test_eviction_takes_leaves_first() -> None:
    manager = BlockManager(4, 4)
    finish(manager, list(range(16)))
    kept = []
    for _ in range(4):
        kept.append(manager.peek_prefix(list(range(17))))
        manager.append_slots(BlockTable(), 1)
    assert kept == [16, 12, 8, 4]


def test_a_lease_gives_back_leaves_first_too() -> None:
    manager = BlockManager(3, 4)
    table = start(manager, list(range(12)))
    lease = manager.pin(table)
    manager.free(table)
    manager.unpin(lease)
    manager.append_slots(BlockTable(), 1)
    assert manager.peek_prefix(list(range(13))) == 8


def test_a_shared_parent_outlives_its_children() -> None:
    manager = BlockManager(4, 4)
    common = [1, 2, 3, 4]
    finish(manager, [*common, 5, 5, 5, 5])
    finish(manager, [*common, 6, 6, 6, 6])  # releases the parent once more
    start(manager, [90, 91, 92, 93, 94, 95, 96, 97])  # one free block and one eviction
    assert manager.peek_prefix([*common, 5, 5, 5, 5, 0]) == 4
    assert manager.peek_prefix([*common, 6, 6, 6, 6, 0]) == 8


def test_identical_prompts_in_flight_keep_their_own_blocks() -> None:
    manager = BlockManager(8, 4)
    first, second = BlockTable(), BlockTable()
    for table in (first, second):
        manager.append_slots(table, 9)
    for table in (first, second):
        manager.commit(table, range(9))
    assert not set(first.block_ids) & set(second.block_ids)
    manager.check_integrity([first, second])
    manager.free(first)  # the other one has the same content, so nothing of it stays cached
    assert [block.state for block in manager.snapshot().blocks].count("cached") == 0
    assert manager.match_prefix(list(range(9))).block_ids == second.block_ids[:2]


def test_what_follows_a_duplicate_is_found_too() -> None:
    """The child's own parent block is not the one that was cached first, and that one is gone."""
    manager = BlockManager(8, 4)
    first, second = BlockTable(), BlockTable()
    for table in (first, second):
        manager.append_slots(table, 5)
        manager.commit(table, range(5))
    manager.free(first)
    manager.append_slots(second, 4)
    manager.commit(second, range(5, 9))
    manager.check_integrity([second])
    assert manager.match_prefix(list(range(9))).block_ids == second.block_ids[:2]
    manager.free(second)
    assert manager.peek_prefix(list(range(9))) == 8


def test_a_repeated_prompt_of_whole_blocks_replaces_its_last_cached_block() -> None:
    """The last token is computed again, hence the last block too: the pool must not fill with copies of it."""
    manager = BlockManager(8, 4)
    for _ in range(5):
        table = start(manager, list(range(8)))
        manager.check_integrity([table])
        manager.free(table)
        states = [block.state for block in manager.snapshot().blocks]
        assert states.count("cached") == 2 and manager.num_free_blocks == 8
    manager.check_integrity([])


def test_peek_leaves_the_order_of_eviction_alone() -> None:
    manager = BlockManager(2, 4)
    finish(manager, [1, 1, 1, 1])
    finish(manager, [2, 2, 2, 2])
    assert manager.peek_prefix([1, 1, 1, 1, 0]) == 4
    start(manager, [9])
    assert manager.peek_prefix([1, 1, 1, 1, 0]) == 0


def test_output_tokens_are_cached_for_the_next_turn() -> None:
    manager = BlockManager(8, 4)
    table = start(manager, [1, 2, 3])
    for token in (4, 5, 6, 7, 8):
        manager.append_slots(table, 1)
        manager.commit(table, [token])
    manager.free(table)
    assert manager.peek_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_a_fork_continues_the_chain_on_both_sides() -> None:
    manager = BlockManager(8, 4)
    one = start(manager, [1, 2, 3, 4, 5, 6])
    two = manager.fork(one)
    for table in (one, two):
        manager.append_slots(table, 2)
    for table, tokens in ((one, [7, 8]), (two, [70, 80])):
        manager.commit(table, tokens)
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 0]).block_ids == one.block_ids
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 70, 80, 0]).block_ids == two.block_ids


def test_caching_can_be_switched_off() -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=False)
    finish(manager, list(range(8)))
    assert manager.peek_prefix(list(range(9))) == 0
    assert {block.state for block in manager.snapshot().blocks} == {"free"}


def constant(parent: int, tokens: tuple[int, ...]) -> int:
    return 7


def parent_blind(parent: int, tokens: tuple[int, ...]) -> int:
    return hash(tokens)


@pytest.mark.parametrize("hash_function", [constant, parent_blind, chain_hash])
def test_a_collision_never_serves_a_wrong_block(hash_function: HashFunction) -> None:
    manager = BlockManager(32, 2, hash_function=hash_function)
    same_end = [[1, 1, 5, 5], [2, 2, 5, 5], [1, 2, 5, 5], [5, 5, 5, 5]]  # equal second blocks, different prefixes
    blocks = [finish(manager, tokens) for tokens in same_end]
    for tokens, expected in zip(same_end, blocks, strict=True):
        table = manager.match_prefix([*tokens, 0])
        assert table.block_ids == expected
        manager.free(table)
    assert manager.peek_prefix([3, 3, 5, 5, 0]) == 0
    assert manager.peek_prefix([1, 1, 1, 1, 0]) == 2
    manager.check_integrity([])


def test_the_hash_depends_on_parent_tokens_and_order() -> None:
    assert len({chain_hash(0, (1, 2)), chain_hash(1, (1, 2)), chain_hash(0, (2, 1)), chain_hash(0, (1, 2, 0))}) == 4
