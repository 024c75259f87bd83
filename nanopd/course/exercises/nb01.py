"""Exercises of notebook 01: paged attention. Slots, a paged decode with grouped queries, merging parts of a softmax."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_close

if TYPE_CHECKING:
    import torch

# --- slots -----------------------------------------------------------------------------------------------------


def slots_of_stub(block_table: list[int], start: int, stop: int, block_size: int) -> list[int]:
    """Slots of the positions start, start + 1, ..., stop - 1 of a sequence.

    block_table[i] is the physical block of the sequence's i-th block. The slots of block b are
    b * block_size, ..., b * block_size + block_size - 1.
    """
    raise NotImplementedError


def slots_of_solution(block_table: list[int], start: int, stop: int, block_size: int) -> list[int]:
    """Slots of the positions start, start + 1, ..., stop - 1 of a sequence."""
    return [block_table[p // block_size] * block_size + p % block_size for p in range(start, stop)]


def _ignores_the_table(block_table: list[int], start: int, stop: int, block_size: int) -> list[int]:
    return list(range(start, stop))


def _starts_in_the_first_block(block_table: list[int], start: int, stop: int, block_size: int) -> list[int]:
    return slots_of_solution(block_table, 0, stop - start, block_size)


def _forgets_the_block_size(block_table: list[int], start: int, stop: int, block_size: int) -> list[int]:
    return [block_table[p // block_size] + p % block_size for p in range(start, stop)]


def _takes_the_stop_too(block_table: list[int], start: int, stop: int, block_size: int) -> list[int]:
    return slots_of_solution(block_table, start, stop + 1, block_size)


def _test_slots_of(answer: Any, rng: random.Random) -> None:
    block_size = rng.choice([4, 8, 16, 24])
    num_tokens = rng.randint(2 * block_size + 1, 5 * block_size)
    table = rng.sample(range(1, 200), num_tokens // block_size + 2)  # the last block is reserved and still empty
    middle = rng.randint(1, num_tokens - 1)
    cases = {
        "a whole prompt": (0, num_tokens),
        "the second chunk of a prompt": (middle, num_tokens),
        "one new token": (num_tokens - 1, num_tokens),
        "a token that starts a new block": (2 * block_size, 2 * block_size + 1),
        "no token at all": (num_tokens, num_tokens),
    }
    for name, (start, stop) in cases.items():
        where = f"{name}, positions {start} to {stop - 1} in blocks {table} of {block_size}"
        want, got = slots_of_solution(table, start, stop, block_size), answer(list(table), start, stop, block_size)
        if hasattr(got, "tolist"):  # a tensor or an array is as good as a list
            got = got.tolist()
        if not isinstance(got, list):
            raise Wrong(f"{where}: expected a list of {len(want)} slots, got {describe(got)}")
        if len(got) != len(want):
            raise Wrong(f"{where}: expected {len(want)} slots, got {len(got)}")
        for p, found, expected in zip(range(start, stop), got, want):
            if found != expected:
                entry, offset = p // block_size, p % block_size
                raise Wrong(
                    f"{where}: position {p} is at offset {offset} of the sequence's block number {entry}, which is"
                    f" physical block {table[entry]}. That is slot {expected}, got {found}"
                )


slots_of = Exercise(
    notebook="01",
    name="slots_of",
    title="From positions to slots",
    test=_test_slots_of,
    stub=slots_of_stub,
    solution=slots_of_solution,
    hints=(
        "Take one position `p` by itself. How many whole blocks of the sequence lie before it, and how many tokens of "
        "its own block?",
        "`p // block_size` counts blocks, `p % block_size` tokens in the block. The first of the two is an index into "
        "`block_table`, not into memory.",
        "`block_table[p // block_size] * block_size + p % block_size`, for every `p` in `range(start, stop)`.",
    ),
    mistakes=(
        Mistake(_ignores_the_table, says="which is physical block"),
        Mistake(_starts_in_the_first_block, says="the second chunk of a prompt"),
        Mistake(_forgets_the_block_size, says="That is slot"),
        Mistake(_takes_the_stop_too, says="slots, got"),
    ),
)

# --- paged decode attention with grouped queries ---------------------------------------------------------------


def paged_decode_stub(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one query per sequence over a paged cache.

    q: [B, Hq, D].   k_cache, v_cache: [num_blocks, block_size, Hkv, D].
    block_tables: [B, max_blocks].   context_lens: [B], each at least 1. What lies past a context is none of ours.
    Query heads 0 ... Hq / Hkv - 1 share key/value head 0, the next as many share head 1, and so on.
    Returns [B, Hq, D].
    """
    raise NotImplementedError


def paged_decode_solution(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one query per sequence over a paged cache."""
    num_seqs, num_heads, _ = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    out = q.new_zeros(q.shape)
    for seq in range(num_seqs):
        n = int(context_lens[seq])
        blocks = block_tables[seq, : -(-n // block_size)].long()  # rounded up: the last one may be partly filled
        k = k_cache[blocks].flatten(0, 1)[:n]  # [n, Hkv, D], in the order of the sequence
        v = v_cache[blocks].flatten(0, 1)[:n]
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            weights = (k[:, kv_head] @ q[seq, head] * scale).softmax(0)
            out[seq, head] = weights @ v[:, kv_head]
    return out


def _decode_with(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, scale: float, **changed: Any
) -> Any:
    """The solution with one thing done differently. The check compares with these to name the mistake."""
    size, num_kv_heads = k_cache.shape[1:3]
    out = q.new_zeros(q.shape)
    for s in range(q.shape[0]):
        n = int(context_lens[s])
        blocks = block_tables[s, : -(-n // size)].long()
        stop = len(blocks) * size if changed.get("whole_blocks") else n - changed.get("drop", 0)
        k, v = (cache[blocks].flatten(0, 1)[:stop] for cache in (k_cache, v_cache))
        for h in range(q.shape[1]):
            g = h % num_kv_heads if changed.get("interleave") else h // (q.shape[1] // num_kv_heads)
            scores = k[:, g] @ q[s, h] * (1.0 if changed.get("no_scale") else scale)
            out[s, h] = (scores.exp() if changed.get("no_softmax") else scores.softmax(0)) @ v[:, g]
    return out


def _reads_whole_blocks(*args: Any) -> Any:
    return _decode_with(*args, whole_blocks=True)


def _interleaves_the_heads(*args: Any) -> Any:
    return _decode_with(*args, interleave=True)


def _reads_on_from_the_first_block(q: Any, k_cache: Any, v_cache: Any, block_tables: Any, *rest: Any) -> Any:
    """As if the sequence lay in one piece, from its first block on."""
    tables = (block_tables[:, :1] + block_tables.new_tensor(range(block_tables.shape[1]))) % len(k_cache)
    return paged_decode_solution(q, k_cache, v_cache, tables, *rest)


def _forgets_the_scale(*args: Any) -> Any:
    return _decode_with(*args, no_scale=True)


def _forgets_to_normalise(*args: Any) -> Any:
    return _decode_with(*args, no_softmax=True)


def _masks_after_the_fact(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, scale: float
) -> Any:
    """Scores of unused slots become -inf, so their weight is 0. But 0 * NaN is NaN."""
    group, out = q.shape[1] // k_cache.shape[2], q.new_zeros(q.shape)
    for s in range(q.shape[0]):
        k, v = (cache[block_tables[s].long()].flatten(0, 1) for cache in (k_cache, v_cache))
        for h in range(q.shape[1]):
            scores = k[:, h // group] @ q[s, h] * scale
            scores[int(context_lens[s]) :] = -float("inf")
            out[s, h] = scores.softmax(0) @ v[:, h // group]
    return out


def _test_paged_decode(answer: Any, rng: random.Random) -> None:
    import torch

    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    block_size, num_kv_heads = rng.choice([8, 16]), rng.choice([2, 3])
    num_heads, head_dim = num_kv_heads * rng.choice([2, 3, 4]), rng.choice([16, 32])
    lens = [rng.randint(2 * block_size + 1, 4 * block_size - 1), 1, 2 * block_size, rng.randint(2, 3 * block_size)]
    lens = lens[: rng.choice([1, 3, 4])]
    needs = [-(-n // block_size) for n in lens]
    ids = rng.sample(range(1, 3 * sum(needs)), sum(needs))  # block 0 is nobody's: padding points to it
    shape = (2, 3 * sum(needs), block_size, num_kv_heads, head_dim)
    cache = torch.full(shape, float("nan"), dtype=torch.float64)
    tables = torch.zeros(len(lens), max(needs) + 1, dtype=torch.int32)
    for s, (n, need) in enumerate(zip(lens, needs)):
        blocks, ids = ids[:need], ids[need:]
        tables[s, :need] = torch.tensor(blocks, dtype=torch.int32)
        for p in range(n):
            row = torch.randn(2, num_kv_heads, head_dim, generator=generator, dtype=torch.float64)
            cache[:, blocks[p // block_size], p % block_size] = row
    q = torch.randn(len(lens), num_heads, head_dim, generator=generator, dtype=torch.float64)
    args = (q, cache[0], cache[1], tables, torch.tensor(lens, dtype=torch.int32), 2 * head_dim**-0.5)
    where = f"contexts {lens}, {num_heads} query heads on {num_kv_heads} key/value heads, blocks of {block_size}"
    _judge_decode(answer(*(x.clone() if hasattr(x, "clone") else x for x in args)), args, where)


_MEANINGS = MappingProxyType(
    {
        "interleave": "it looks as if query head h read key/value head h % Hkv; neighbouring query heads share one",
        "no_scale": "it looks as if the scores were not multiplied by scale",
        "no_softmax": "the weights of a query do not add up to 1",
        "drop": "it looks as if the last token of the context was left out",
    }
)


def _judge_decode(got: Any, args: tuple[Any, ...], where: str) -> None:
    import torch

    want = paged_decode_solution(*args)
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:
        raise Wrong(f"{where}: expected a tensor of shape {tuple(want.shape)}, got {describe(got)}")
    for s, (found, expected) in enumerate(zip(got.double(), want)):
        if torch.allclose(found, expected, atol=1e-5, rtol=1e-4):
            continue
        if found.isnan().any():
            n, size = int(args[4][s]), args[1].shape[1]
            raise Wrong(
                f"{where}: sequence {s} gives NaN. Slots that no sequence uses hold NaN here, so something other than"
                f" its {n} tokens was read (its last block has {(n - 1) % size + 1} of {size} slots filled, and"
                " 0 * NaN is NaN)"
            )
        for change, meaning in _MEANINGS.items():
            if torch.allclose(found, _decode_with(*args, **{change: 1})[s], atol=1e-5, rtol=1e-4):
                raise Wrong(f"{where}: sequence {s} is wrong; {meaning}")
        for h in range(want.shape[1]):
            expect_close(found[h], expected[h], f"{where}: sequence {s}, query head {h}")


paged_decode = Exercise(
    notebook="01",
    name="paged_decode",
    title="A batch, several heads: paged decode attention in PyTorch",
    test=_test_paged_decode,
    stub=paged_decode_stub,
    solution=paged_decode_solution,
    hints=(
        "Two loops, over sequences and over query heads, and in them what you know: scores, softmax, weighted sum. "
        "It need not be fast, and it need not be an online softmax.",
        "`k_cache[blocks]` with a tensor of block ids gathers whole blocks: [blocks, block_size, Hkv, D]. "
        "`.flatten(0, 1)` lays them end to end, and `[:n]` cuts off what is not this sequence's. Cut *before* you "
        "multiply: a weight of 0 does not remove a NaN.",
        "Query head `h` reads key/value head `h // (Hq // Hkv)`. So: "
        "`weights = (k[:, kv_head] @ q[seq, head] * scale).softmax(0)`, then `weights @ v[:, kv_head]`.",
    ),
    mistakes=(
        Mistake(_reads_whole_blocks, says="gives NaN"),
        Mistake(_masks_after_the_fact, says="0 * NaN is NaN"),
        Mistake(_interleaves_the_heads, says="neighbouring query heads share one"),
        Mistake(_reads_on_from_the_first_block, says="sequence 0"),
        Mistake(_forgets_the_scale, says="not multiplied by scale"),
        Mistake(_forgets_to_normalise, says="do not add up to 1"),
    ),
)

# --- merging parts of a softmax --------------------------------------------------------------------------------


def merge_parts_stub(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a whole context from attention over its parts.

    outputs: [P, D], the finished output of each part: its own softmax-weighted average of values.
    lses: [P], the natural logarithm of the sum of exp(score) over the tokens of each part.
    A part without tokens has output 0 and lse -inf; if all parts are empty, so is the whole.
    Returns (output [D], lse []) over the tokens of all parts together.
    """
    raise NotImplementedError


def merge_parts_solution(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a whole context from attention over its parts."""
    largest = lses.max()
    if largest == -float("inf"):  # no part has a token: -inf - -inf would be NaN
        return outputs[0], largest
    weights = (lses - largest).exp()  # the parts' sums of exponentials, none larger than 1
    total = weights.sum()
    return weights @ outputs / total, largest + total.log()


def _averages_the_parts(outputs: Any, lses: Any) -> Any:
    return outputs.mean(0), merge_parts_solution(outputs, lses)[1]


def _overflows(outputs: Any, lses: Any) -> Any:
    weights = lses.exp()
    return weights @ outputs / weights.sum(), weights.sum().log()


def _forgets_empty_parts(outputs: Any, lses: Any) -> Any:
    weights = (lses - lses.max()).exp()
    return weights @ outputs / weights.sum(), lses.max() + weights.sum().log()


def _adds_the_lses(outputs: Any, lses: Any) -> Any:
    return merge_parts_solution(outputs, lses)[0], lses.sum()


def _forgets_the_maximum(outputs: Any, lses: Any) -> Any:
    largest = lses.max()
    return merge_parts_solution(outputs, lses)[0], (lses - largest).exp().sum().log()


def _test_merge_parts(answer: Any, rng: random.Random) -> None:
    import torch

    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    dim = rng.choice([4, 16])
    for name, sizes, height in (
        ("two parts of different length", [rng.randint(2, 9), rng.randint(10, 40)], 0),
        ("many parts, some of a single token", [rng.choice([1, 1, 3, 8]) for _ in range(rng.randint(3, 9))], 0),
        ("scores so large that exp(score) overflows", [3, 5, 2], 1000),
        ("scores so small that exp(score) is 0", [4, 2], -1000),
        ("a part without tokens", [5, 0, 3], 0),
        ("a single part", [6], 0),
        ("nothing but empty parts", [0, 0], 0),
    ):
        # Each part has a level of its own, as different stretches of a text do: no average of parts is right by luck.
        parts = [
            torch.randn(n, generator=generator, dtype=torch.float64) + height + 2 * torch.randn(1, generator=generator)
            for n in sizes
        ]
        values = [torch.randn(n, dim, generator=generator, dtype=torch.float64) for n in sizes]
        outputs = torch.stack([scores.softmax(0) @ v for scores, v in zip(parts, values)])
        lses = torch.stack([scores.logsumexp(0) for scores in parts])
        scores = torch.cat(parts)
        got = answer(outputs.clone(), lses.clone())
        where = f"{name} ({', '.join(map(str, sizes))} tokens)"
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise Wrong(f"{where}: expected a pair (output, lse), got {describe(got)}")
        expect_close(got[0], scores.softmax(0) @ torch.cat(values), f"{where}, output")
        expect_close(got[1], scores.logsumexp(0), f"{where}, lse")


merge_parts = Exercise(
    notebook="01",
    name="merge_parts",
    title="Split-KV: put the parts of a context together",
    test=_test_merge_parts,
    stub=merge_parts_stub,
    solution=merge_parts_solution,
    hints=(
        "A part's output is (sum of exp(score) * value) / (sum of exp(score)), and `exp(lse)` is the denominator. "
        "So `exp(lse) * output` is the numerator. Numerators and denominators of all parts may be added.",
        "The output is therefore an average of `outputs` with weights `exp(lses)`. exp(1000) is infinite, though: "
        "subtract the largest lse first. It cancels in the average, and has to be added again to the new lse.",
        "`weights = (lses - lses.max()).exp()`, then `weights @ outputs / weights.sum()` and "
        "`lses.max() + weights.sum().log()`. If the largest lse is -inf there is nothing to merge: return it before.",
    ),
    mistakes=(
        Mistake(_averages_the_parts, says="two parts of different length"),
        Mistake(_overflows, says="exp(score) overflows"),
        Mistake(_forgets_empty_parts, says="nothing but empty parts"),
        Mistake(_adds_the_lses, says="lse: expected"),
        Mistake(_forgets_the_maximum, says="lse: expected"),
    ),
)
