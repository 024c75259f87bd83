"""Host side of the attention kernels, as far as it needs no GPU."""

import itertools

from nanopd.ops.attention import aligned_parts, split_grid


def splits(num_seqs: int, rows: int, most_keys: int, head_dim: int = 128, num_sms: int = 132) -> int:
    return split_grid(8, num_seqs, rows, most_keys, head_dim, num_sms).splits


def test_keys_are_divided_where_tiles_do_not_fill_the_gpu() -> None:
    assert splits(1, 64, 10_000) == 32  # 8 tiles: 33 blocks for each would make two per SM, 32 is the most
    assert splits(1, 80, 10_000) == 16
    assert splits(1, 512, 10_000) == 4
    assert splits(2, 512, 10_000) == 2
    assert splits(2, 1024, 10_000) == 1
    assert splits(100, 5000, 10_000) == 1


def test_keys_are_divided_no_finer_than_pays() -> None:
    assert splits(1, 64, 255) == 1
    assert splits(1, 64, 1024) == 4
    assert splits(1, 64, 1024, head_dim=256) == 8  # tiles of 32 keys instead of 64


def test_blocks_of_a_divided_tile_fit_the_counters() -> None:
    for num_sms in (1, 7, 132, 1000):
        for rows in (1, 64, 65, 3000):
            grid = split_grid(2, 3, rows, 10**6, 64, num_sms)
            assert grid.splits == 1 or grid.all_tiles <= num_sms
            assert grid.splits == 1 or grid.all_tiles * grid.splits <= 2 * num_sms


def test_aligned_parts_end_where_segments_do() -> None:
    """By trying all numbers of parts, from the largest down."""
    for segments, room in itertools.product(range(1, 40), range(1, 60)):
        fewest = -(-segments // room)  # segments to a part that are needed to fit the room; more would be slower
        fitting = (n for n in range(room, 0, -1) if n % segments == 0 or segments == n * fewest)
        assert aligned_parts(segments, room) == next(fitting, 0), (segments, room)
