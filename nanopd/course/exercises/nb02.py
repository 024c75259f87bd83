"""Exercises of notebook 02: tiled prefill attention. Online softmax, the causal mask of a chunk, tiles to load."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_close

if TYPE_CHECKING:
    from torch import Tensor

# --- one tile of an online softmax -----------------------------------------------------------------------------


def online_update_stub(
    scores: Tensor, v: Tensor, largest: Tensor, total: Tensor, acc: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one more tile of t keys into account. Returns the new (largest, total, acc).

    scores [H, n, t]: q·k of this tile, scaled; -inf where a query may not look.   v [H, t, D]: the tile's values.
    largest [H, n, 1]: the greatest score so far, -inf before the first tile.
    total [H, n, 1]: the sum of exp(score - largest) so far.   acc [H, n, D]: the same sum, of exp(...) times v.
    """
    raise NotImplementedError


def online_update_solution(
    scores: Tensor, v: Tensor, largest: Tensor, total: Tensor, acc: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one more tile of t keys into account. Returns the new (largest, total, acc)."""
    new_largest = largest.maximum(scores.amax(dim=-1, keepdim=True))
    keep = (largest - new_largest).exp()  # turns exp(score - largest) into exp(score - new_largest)
    p = (scores - new_largest).exp()
    return new_largest, total * keep + p.sum(dim=-1, keepdim=True), acc * keep + p @ v


def _does_not_rescale_acc(scores: Any, v: Any, largest: Any, total: Any, acc: Any) -> Any:
    new_largest, new_total, _ = online_update_solution(scores, v, largest, total, acc)
    return new_largest, new_total, acc + (scores - new_largest).exp() @ v


def _does_not_rescale_total(scores: Any, v: Any, largest: Any, total: Any, acc: Any) -> Any:
    new_largest, _, new_acc = online_update_solution(scores, v, largest, total, acc)
    return new_largest, total + (scores - new_largest).exp().sum(dim=-1, keepdim=True), new_acc


def _rescales_the_wrong_way(scores: Any, v: Any, largest: Any, total: Any, acc: Any) -> Any:
    new_largest = largest.maximum(scores.amax(dim=-1, keepdim=True))
    keep, p = (new_largest - largest).exp(), (scores - new_largest).exp()
    keep = keep.nan_to_num(posinf=0.0)  # before the first tile
    return new_largest, total * keep + p.sum(dim=-1, keepdim=True), acc * keep + p @ v


def _forgets_earlier_tiles(scores: Any, v: Any, largest: Any, total: Any, acc: Any) -> Any:
    return online_update_solution(scores, v, scores.amax(dim=-1, keepdim=True), total, acc)


def _subtracts_nothing(scores: Any, v: Any, largest: Any, total: Any, acc: Any) -> Any:
    new_largest = largest.maximum(scores.amax(dim=-1, keepdim=True))
    return new_largest, total + scores.exp().sum(dim=-1, keepdim=True), acc + scores.exp() @ v


def _normalises_each_tile(scores: Any, v: Any, largest: Any, total: Any, acc: Any) -> Any:
    new_largest, new_total, _ = online_update_solution(scores, v, largest, total, acc)
    return new_largest, new_total, acc + scores.softmax(dim=-1) @ v


def _test_online_update(answer: Any, rng: random.Random) -> None:
    import torch  # not at the top: the course itself works without torch

    seed = torch.Generator().manual_seed(rng.randrange(2**31))
    heads, queries, dim = rng.choice([1, 2, 3]), rng.choice([1, 5, 8]), rng.choice([2, 7, 16])
    widths = [rng.randint(1, 9) for _ in range(rng.randint(2, 5))]  # ragged tiles
    size = rng.choice([1.0, 3.0, 300.0])  # exp(300) is too large for float32, and so is exp(3000) for float64
    scores = size * torch.randn(heads, queries, sum(widths), generator=seed, dtype=torch.float64)
    values = torch.randn(heads, sum(widths), dim, generator=seed, dtype=torch.float64)
    first = widths[0]
    hidden = torch.rand(queries, sum(widths) - first, generator=seed) < rng.choice([0.0, 0.3, 0.9])
    scores[:, :, first:] = scores[:, :, first:].masked_fill(hidden, -torch.inf)  # the first tile is seen by all
    largest = torch.full((heads, queries, 1), -torch.inf, dtype=torch.float64)
    total, acc = torch.zeros_like(largest), torch.zeros(heads, queries, dim, dtype=torch.float64)
    start = 0
    for number, width in enumerate(widths, 1):
        stop = start + width
        state = (largest.clone(), total.clone(), acc.clone())
        got = answer(scores[:, :, start:stop].clone(), values[:, start:stop].clone(), *state)
        where = f"tile {number} of {len(widths)} ({width} keys, scores up to {float(scores.max()):.0f})"
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise Wrong(f"{where}: expected the three tensors (largest, total, acc), got {describe(got)}")
        largest = scores[:, :, :stop].amax(dim=-1, keepdim=True)
        p = (scores[:, :, :stop] - largest).exp()
        total, acc = p.sum(dim=-1, keepdim=True), p @ values[:, :stop]
        for name, found, want in zip(("largest", "total", "acc"), got, (largest, total, acc), strict=True):
            expect_close(found, want, f"after {where}, {name}", atol=1e-9, rtol=1e-6)
        start = stop


online_update = Exercise(
    notebook="02",
    name="online_update",
    title="Online softmax: take one more tile of keys into account",
    test=_test_online_update,
    stub=online_update_stub,
    solution=online_update_solution,
    hints=(
        "`total` and `acc` are sums of exp(score - largest), relative to the greatest score *so far*. "
        "If this tile brings a greater one, both have to be made relative to the new one before you add to them.",
        "The new greatest score is `largest.maximum(scores.amax(dim=-1, keepdim=True))`. "
        "A term exp(s - old) becomes exp(s - new) when it is multiplied by exp(old - new): "
        "one factor per query, the same for `total` and for `acc`. "
        "Before the first tile it is exp(-inf) = 0, and takes care of itself.",
        "`keep = (largest - new_largest).exp()`, `p = (scores - new_largest).exp()`, then "
        "`total * keep + p.sum(dim=-1, keepdim=True)` and `acc * keep + p @ v`. Nothing is divided here: "
        "acc / total comes once, at the very end.",
    ),
    mistakes=(
        Mistake(_does_not_rescale_acc, says="acc"),
        Mistake(_does_not_rescale_total, says="total"),
        Mistake(_rescales_the_wrong_way, says="total"),
        Mistake(_forgets_earlier_tiles, says="largest"),
        Mistake(_subtracts_nothing, says="total"),
        Mistake(_normalises_each_tile, says="acc"),
    ),
)

# --- the causal mask of a chunk --------------------------------------------------------------------------------


def may_attend_stub(rows: Tensor, keys: Tensor, q_len: int, context_len: int) -> Tensor:
    """Which keys each query of a chunk may attend to: bool [n, m], True where it may.

    rows [n]: which queries of the chunk, counted 0 ... q_len - 1.   keys [m]: positions of keys in the sequence.
    The chunk's q_len queries are the last ones of context_len positions; its own keys are among the context.
    """
    raise NotImplementedError


def may_attend_solution(rows: Tensor, keys: Tensor, q_len: int, context_len: int) -> Tensor:
    """Which keys each query of a chunk may attend to: bool [n, m], True where it may."""
    positions = context_len - q_len + rows  # where each query stands in the sequence
    return keys[None, :] <= positions[:, None]


def _counts_from_the_chunk(rows: Any, keys: Any, q_len: int, context_len: int) -> Any:
    return keys[None, :] <= rows[:, None]


def _own_chunk_only(rows: Any, keys: Any, q_len: int, context_len: int) -> Any:
    return may_attend_solution(rows, keys, q_len, context_len) & (keys[None, :] >= context_len - q_len)


def _not_itself(rows: Any, keys: Any, q_len: int, context_len: int) -> Any:
    return keys[None, :] < (context_len - q_len + rows)[:, None]


def _everything(rows: Any, keys: Any, q_len: int, context_len: int) -> Any:
    return (keys[None, :] < context_len) & (rows[:, None] >= 0)


def _transposed(rows: Any, keys: Any, q_len: int, context_len: int) -> Any:
    return may_attend_solution(rows, keys, q_len, context_len).T


def _hidden_instead(rows: Any, keys: Any, q_len: int, context_len: int) -> Any:
    return ~may_attend_solution(rows, keys, q_len, context_len)


def _test_may_attend(answer: Any, rng: random.Random) -> None:
    chunk, prefix = rng.randint(2, 9), rng.randint(1, 20)
    _ask_mask(answer, range(chunk), range(prefix + chunk), chunk, prefix + chunk, "a chunk with a prefix")
    _ask_mask(answer, range(chunk), range(chunk), chunk, chunk, "a whole prompt")
    _ask_mask(answer, range(1), range(prefix + 1), 1, prefix + 1, "a single query with a prefix, as in decode")
    row, key = rng.randrange(chunk), rng.randrange(prefix + chunk)
    tile = f"a tile of it: rows from {row}, keys from {key}"
    _ask_mask(answer, range(row, chunk), range(key, prefix + chunk), chunk, prefix + chunk, tile)


def _ask_mask(answer: Any, rows: range, keys: range, q_len: int, context_len: int, what: str) -> None:
    import torch

    got = answer(torch.tensor(rows), torch.tensor(keys), q_len, context_len)
    where = f"{what} ({q_len} queries, context {context_len})"
    if not isinstance(got, torch.Tensor) or got.dtype != torch.bool:
        kind = got.dtype if isinstance(got, torch.Tensor) else describe(got)
        raise Wrong(f"{where}: expected a bool tensor, got {kind}")
    if got.shape != (len(rows), len(keys)):
        raise Wrong(f"{where}: expected shape ({len(rows)}, {len(keys)}), one row per query, got {tuple(got.shape)}")
    prefix = context_len - q_len
    for i, row in enumerate(rows):
        position = prefix + row
        for j, key in enumerate(keys):
            if bool(got[i, j]) == (key <= position):
                continue
            kind = "is itself" if key == position else "is in its future" if key > position else "stands before it"
            kind += ", in the prefix" if key < prefix else ""
            verdict = "must be visible, is hidden" if key <= position else "must be hidden, is visible"
            raise Wrong(f"{where}: query {row} stands at position {position}; key {key} {kind}: it {verdict}")


may_attend = Exercise(
    notebook="02",
    name="may_attend",
    title="The causal mask of a chunk that follows a prefix",
    test=_test_may_attend,
    stub=may_attend_stub,
    solution=may_attend_solution,
    hints=(
        "A query may look at itself and at everything before it. Compare *positions in the sequence*, not indices in "
        "the chunk.",
        "The chunk's last query (row q_len - 1) stands at position context_len - 1. So row 0 stands at "
        "context_len - q_len, which is the length of the prefix.",
        "`keys[None, :] <= (context_len - q_len + rows)[:, None]` compares every query with every key.",
    ),
    mistakes=(
        Mistake(_counts_from_the_chunk, says="must be visible, is hidden"),
        Mistake(_own_chunk_only, says="in the prefix"),
        Mistake(_not_itself, says="is itself"),
        Mistake(_everything, says="is in its future"),
        Mistake(_transposed, says="one row per query"),
        Mistake(_hidden_instead, says="must be visible, is hidden"),
    ),
)

# --- tiles to load ---------------------------------------------------------------------------------------------


def key_tiles_stub(q_len: int, context_len: int, tile_q: int, tile_k: int) -> list[int]:
    """How many tiles of keys each tile of queries has to load; first tile of queries first.

    The q_len queries of a chunk are the last ones of context_len positions. They are cut into tiles of tile_q, keys
    0 ... context_len - 1 into tiles of tile_k; the last tile of either may be partly filled.
    A tile of keys that no query of the tile may attend to is skipped.
    """
    raise NotImplementedError


def key_tiles_solution(q_len: int, context_len: int, tile_q: int, tile_k: int) -> list[int]:
    """How many tiles of keys each tile of queries has to load; first tile of queries first."""
    prefix, counts = context_len - q_len, []
    for first in range(0, q_len, tile_q):
        last = min(first + tile_q, q_len) - 1  # the tile's last query sees the most
        counts.append((prefix + last) // tile_k + 1)
    return counts


def _forgets_the_prefix(q_len: int, context_len: int, tile_q: int, tile_k: int) -> list[int]:
    return key_tiles_solution(q_len, q_len, tile_q, tile_k)


def _looks_at_the_first_query(q_len: int, context_len: int, tile_q: int, tile_k: int) -> list[int]:
    return [(context_len - q_len + first) // tile_k + 1 for first in range(0, q_len, tile_q)]


def _skips_nothing(q_len: int, context_len: int, tile_q: int, tile_k: int) -> list[int]:
    return [-(-context_len // tile_k) for _ in range(0, q_len, tile_q)]


def _runs_past_the_context(q_len: int, context_len: int, tile_q: int, tile_k: int) -> list[int]:
    return [(context_len - q_len + first + tile_q - 1) // tile_k + 1 for first in range(0, q_len, tile_q)]


def _drops_the_diagonal(q_len: int, context_len: int, tile_q: int, tile_k: int) -> list[int]:
    return [count - 1 for count in key_tiles_solution(q_len, context_len, tile_q, tile_k)]


def _returns_the_sum(q_len: int, context_len: int, tile_q: int, tile_k: int) -> int:
    return sum(key_tiles_solution(q_len, context_len, tile_q, tile_k))


def _test_key_tiles(answer: Any, rng: random.Random) -> None:
    tile_q, tile_k = rng.choice([2, 4, 6]), rng.choice([2, 3, 4, 8])
    whole = tile_q * rng.randint(2, 5)
    _ask_tiles(answer, whole, whole, tile_q, tile_k)
    _ask_tiles(answer, whole + 1, whole + 1 + rng.randint(1, 40), tile_q, tile_k)  # a last tile of one query
    _ask_tiles(answer, rng.randint(1, 30), 30 + rng.randint(1, 40), tile_q, tile_k)
    _ask_tiles(answer, 1, rng.randint(2, 60), tile_q, tile_k)


def _ask_tiles(answer: Any, q_len: int, context_len: int, tile_q: int, tile_k: int) -> None:
    prefix = context_len - q_len
    got = answer(q_len, context_len, tile_q, tile_k)
    where = f"{q_len} queries after a prefix of {prefix}, tiles of {tile_q} queries and {tile_k} keys"
    firsts = range(0, q_len, tile_q)
    if not isinstance(got, list):
        raise Wrong(f"{where}: expected a list of {len(firsts)} counts, got {describe(got)}")
    if len(got) != len(firsts):
        raise Wrong(f"{where}: expected {len(firsts)} counts, one per tile of queries, got {len(got)}")
    for number, first in enumerate(firsts):
        stop = min(first + tile_q, q_len)
        # Pair by pair, so that the formula is not checked by itself.
        needed = {key // tile_k for row in range(first, stop) for key in range(context_len) if key <= prefix + row}
        if got[number] != len(needed):
            span = f"rows {first} to {stop - 1}, at positions {prefix + first} to {prefix + stop - 1}"
            count = f"{len(needed)} {'tile' if len(needed) == 1 else 'tiles'} of keys"
            raise Wrong(f"{where}: query tile {number} ({span}): expected {count}, got {got[number]!r}")


key_tiles = Exercise(
    notebook="02",
    name="key_tiles",
    title="Which tiles of keys does a tile of queries have to load?",
    test=_test_key_tiles,
    stub=key_tiles_stub,
    solution=key_tiles_solution,
    hints=(
        "Keys are seen from the left up to the diagonal, so it is enough to know the *last* key that any query of the "
        "tile sees.",
        "The tile's last query sees the most. Its row in the chunk is min(first + tile_q, q_len) - 1, and it stands "
        "context_len - q_len further to the right in the sequence.",
        "A key at position p lies in tile p // tile_k, so p // tile_k + 1 tiles have to be loaded.",
    ),
    mistakes=(
        Mistake(_forgets_the_prefix, says="after a prefix"),
        Mistake(_looks_at_the_first_query, says="of keys, got"),
        Mistake(_skips_nothing, says="of keys, got"),
        Mistake(_runs_past_the_context, says="of keys, got"),
        Mistake(_drops_the_diagonal, says="expected"),
        Mistake(_returns_the_sum, says="expected a list"),
    ),
)
