"""Attention kernels against a float64 reference that is computed here, sequence by sequence, from the block table.

Everything a kernel must not read or must write is poisoned with NaN: cache slots past a context, the block that padding
entries of the block table point to, and the output. One leaked value makes the result NaN.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanopd.errors import UnsupportedShapeError
from nanopd.ops import attention, checks
from nanopd.ops.attention import PagedAttention
from nanopd.ops.compiler import KernelLibrary, csrc_dir

DECODE_KERNELS = ("naive", "warp", "split")
PREFILL_KERNELS = ("naive", "tiled", "split", "wgmma")
BF16, FP16 = torch.bfloat16, torch.float16

# (dtype, head dim, block size): every head dim in both types, every block size with several head dims.
FORMATS = [(BF16, 64, 8), (BF16, 64, 32), (BF16, 96, 16), (BF16, 96, 8), (BF16, 128, 16), (BF16, 128, 32)]
FORMATS += [(BF16, 256, 16), (BF16, 256, 8), (FP16, 64, 16), (FP16, 96, 32), (FP16, 128, 8), (FP16, 256, 32)]
FORMATS += [(BF16, 128, 40)]  # not a power of two
# (query heads, key/value heads): ratios 1 to 8, then 16, and 24, which takes two groups.
HEADS = [(4, 4), (8, 4), (9, 3), (32, 8), (10, 2), (12, 2), (7, 1), (16, 2), (16, 1), (24, 1)]


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return KernelLibrary(torch.device("cuda"))


@pytest.fixture(scope="module")
def kernels(library: KernelLibrary) -> PagedAttention:
    return PagedAttention(library)


@dataclass
class Problem:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    q_lens: list[int]
    contexts: list[int]
    scale: float

    @property
    def decode_arguments(self) -> tuple[object, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens, self.scale

    @property
    def prefill_arguments(self) -> tuple[object, ...]:
        caches = (self.q, self.k_cache, self.v_cache, self.block_tables)
        return *caches, self.cu_seqlens_q, self.context_lens, max(self.q_lens), self.scale


def make_problem(
    contexts: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    heads: tuple[int, int] = (32, 8),
    dtype: torch.dtype = BF16,
    head_dim: int = 128,
    block_size: int = 16,
    fused: bool = False,
    extra_blocks: int = 3,
    device: str | torch.device = "cuda",
    seed: int = 0,
) -> Problem:
    """Random queries, keys and values. ``fused``: q is a view into a [T, (Hq + 2 Hkv) * D] matrix."""
    q_lens = [1] * len(contexts) if q_lens is None else list(q_lens)
    num_heads, num_kv_heads = heads
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    used = [-(-context // block_size) for context in contexts]
    num_blocks = sum(used) + extra_blocks
    ids = list(range(1, num_blocks))  # block 0 stays poisoned: padding entries of the table name it
    random.Random(seed).shuffle(ids)
    tables = torch.zeros((len(contexts), max([*used, 1]) + 2), dtype=torch.int32)
    caches = [torch.full((num_blocks, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device)]
    caches.append(caches[0].clone())
    for seq, (context, count) in enumerate(zip(contexts, used, strict=True)):
        own = [ids.pop() for _ in range(count)]
        tables[seq, :count] = torch.tensor(own, dtype=torch.int32)
        slots = torch.tensor(own, dtype=torch.int64)[:, None] * block_size + torch.arange(block_size)
        slots = slots.flatten()[:context].to(device)
        for cache in caches:
            cache.view(-1, num_kv_heads, head_dim)[slots] = randn(context, num_kv_heads, head_dim)

    total = sum(q_lens)
    if fused:
        q = randn(total, (num_heads + 2 * num_kv_heads) * head_dim)[:, : num_heads * head_dim]
        q = q.unflatten(1, (num_heads, head_dim))
    else:
        q = randn(total, num_heads, head_dim)
    starts = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    return Problem(
        q,
        caches[0],
        caches[1],
        tables.to(device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(list(contexts), dtype=torch.int32, device=device),
        q_lens,
        list(contexts),
        head_dim**-0.5 * 1.5,  # not the usual value, so that a forgotten scale shows; a little sharper than usual
    )


def reference(problem: Problem) -> tuple[Tensor, Tensor]:
    """Result in float64, and sum of |p v|: how large the terms are that cancel in it. Both [T, Hq, D]."""
    num_kv_heads, head_dim = problem.k_cache.shape[2:]
    num_heads = problem.q.shape[1]
    block_size = problem.k_cache.shape[1]
    result = torch.zeros(problem.q.shape, dtype=torch.float64, device=problem.q.device)
    magnitude = torch.zeros_like(result)
    start = 0
    for seq, (q_len, context) in enumerate(zip(problem.q_lens, problem.contexts, strict=True)):
        rows = slice(start, start + q_len)
        start += q_len
        if context == 0:
            continue
        positions = torch.arange(context, device=problem.q.device)
        slots = problem.block_tables[seq].long()[positions // block_size] * block_size + positions % block_size
        k, v = (c.view(-1, num_kv_heads, head_dim)[slots].double() for c in (problem.k_cache, problem.v_cache))
        q = problem.q[rows].double().unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
        scores = torch.einsum("qhrd,khd->hrqk", q, k) * problem.scale
        own = torch.arange(context - q_len, context, device=problem.q.device)
        p = scores.masked_fill(positions > own[:, None], -torch.inf).softmax(-1)
        result[rows] = torch.einsum("hrqk,khd->qhrd", p, v).flatten(1, 2)
        magnitude[rows] = torch.einsum("hrqk,khd->qhrd", p, v.abs()).flatten(1, 2)
    return result, magnitude


def assert_close(out: Tensor, problem: Problem) -> None:
    expected, magnitude = reference(problem)
    assert not out.isnan().any(), f"NaN in rows {out.isnan().flatten(1).any(1).nonzero().flatten().tolist()[:20]}"
    error = (out.double() - expected).abs()
    limit = 1e-2 if out.dtype is BF16 else 2e-3
    relative = (error.norm() / expected.norm().clamp(min=1e-12)).item()
    assert relative < limit, f"relative error {relative:.2e}"
    # Rounding each probability and the result to 16 bits is off by eps / 2 of its size at most, twice.
    bound = 1.1 * torch.finfo(out.dtype).eps * magnitude + 1e-4
    worst = (error / bound).amax().item()
    assert worst < 1, f"an element is off by {worst:.2f} times its bound"
    for row in [i for i, context in enumerate(problem.contexts) if context == 0 and max(problem.q_lens) == 1]:
        assert not out[row].any(), f"sequence {row} has no context but its output is not zero"


def run_decode(kernels: PagedAttention, problem: Problem, kernel: str) -> Tensor:
    out = torch.full(problem.q.shape, torch.nan, dtype=problem.q.dtype, device=problem.q.device)
    result = kernels.decode(*problem.decode_arguments, out=out, kernel=kernel)
    assert result is out
    return out


def run_prefill(kernels: PagedAttention, problem: Problem, kernel: str) -> Tensor:
    if kernel == "wgmma" and not kernels.has_wgmma:
        pytest.skip("needs a Hopper GPU")
    out = torch.full(problem.q.shape, torch.nan, dtype=problem.q.dtype, device=problem.q.device)
    result = kernels.prefill(*problem.prefill_arguments, out=out, kernel=kernel)
    assert result is out
    return out


def ragged(count: int, longest: int, seed: int) -> list[int]:
    """Lengths around the sizes of tiles and blocks, empty ones, and random ones."""
    edges = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
    rng = random.Random(seed)
    return [rng.choice(edges) if rng.random() < 0.6 else rng.randint(1, longest) for _ in range(count)]


# --- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", DECODE_KERNELS)
@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), FORMATS)
def test_decode_ragged(
    kernels: PagedAttention, kernel: str, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    shape = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size}
    for seed, heads in enumerate(HEADS):
        problem = make_problem(ragged(11, 600, seed), heads=heads, seed=seed, fused=seed % 2 == 1, **shape)
        assert_close(run_decode(kernels, problem, kernel), problem)


@pytest.mark.parametrize("kernel", DECODE_KERNELS)
def test_decode_one_token_up_to_a_few_tiles(kernels: PagedAttention, kernel: str) -> None:
    for context in (1, 2, 15, 16, 17, 64, 65, 300):
        problem = make_problem([context], seed=context)
        assert_close(run_decode(kernels, problem, kernel), problem)


@pytest.mark.parametrize("kernel", DECODE_KERNELS)
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((9, 3), 64)])
def test_decode_long_context(kernels: PagedAttention, kernel: str, heads: tuple[int, int], head_dim: int) -> None:
    problem = make_problem([40_000, 1, 0, 12_345], heads=heads, head_dim=head_dim)
    assert_close(run_decode(kernels, problem, kernel), problem)


@pytest.mark.parametrize("kernel", DECODE_KERNELS)
def test_decode_large_batch(kernels: PagedAttention, kernel: str) -> None:
    problem = make_problem(ragged(300, 900, 1), heads=(8, 2), head_dim=64)
    assert_close(run_decode(kernels, problem, kernel), problem)
    empty = make_problem([0] * 40 + [5] + [0] * 70, heads=(8, 2), head_dim=64)
    assert_close(run_decode(kernels, empty, kernel), empty)
    all_empty = make_problem([0, 0, 0], heads=(8, 2), head_dim=64)
    assert_close(run_decode(kernels, all_empty, kernel), all_empty)


@pytest.mark.parametrize("stages", attention.STAGES)
@pytest.mark.parametrize("num_sms", [1, 2, 5, 23, 400])
def test_decode_split_for_any_number_of_parts(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch, num_sms: int, stages: int
) -> None:
    monkeypatch.setattr(attention, "STAGES", (stages, stages))
    kernels = PagedAttention(library, num_sms=num_sms)
    for seed, contexts in enumerate(([3000], [1, 2500, 0, 16, 700], [512] * 30, ragged(70, 400, 5))):
        problem = make_problem(contexts, heads=(12, 3), head_dim=64, seed=seed)
        assert_close(run_decode(kernels, problem, "split"), problem)


def test_decode_split_may_cut_a_segment_anywhere(library: KernelLibrary) -> None:
    """Among these some cuts leave a piece of a single unit at a segment's start or end."""
    for parts in range(1, 14):
        kernels = PagedAttention(library, num_sms=parts)
        kernels._blocks_per_sm = lambda *_: 1
        problem = make_problem([80, 0, 48], heads=(9, 9), head_dim=64, seed=parts)
        assert_close(run_decode(kernels, problem, "split"), problem)


def test_decode_split_takes_the_ring_that_suits(library: KernelLibrary) -> None:
    """Three slots where contexts are cut at their ends: of 264 blocks 256 and 264, but 192 for 96 segments. In a
    partition, two."""
    total = torch.cuda.get_device_properties(0).multi_processor_count
    for num_sms, heads, count, stages in (
        (total, (32, 8), 32, 3),
        (total, (9, 3), 32, 2),
        (total, (9, 3), 1, 3),
        (total // 2, (32, 8), 32, 2),
    ):
        kernels = PagedAttention(library, num_sms=num_sms)
        problem = make_problem([200] * count, heads=heads, head_dim=64)
        assert_close(kernels.decode(*problem.decode_arguments), problem)
        shared = kernels._decode_ring(problem.q.dtype, problem.k_cache, count * heads[1], 1)[2]
        if total == 132:
            assert shared == attention.split_shape(64, stages)[1]
        compiled = {key[-1] for key in kernels._kernels if key[0] == "decode_split"}
        assert compiled == {attention.Ring(one, 1) for one in attention.STAGES}, (
            "the other one, too, before some batch needs it"
        )


def test_decode_split_repeats_bit_for_bit(kernels: PagedAttention) -> None:
    problem = make_problem(ragged(20, 3000, 7))
    first = run_decode(kernels, problem, "split")
    assert all(torch.equal(first, run_decode(kernels, problem, "split")) for _ in range(5))


def test_decode_overlapping_calls_do_not_touch_each_other(kernels: PagedAttention) -> None:
    """Each call starts before the one in front of it has ended; they share the counters, and the memory for pieces."""
    lengths = [[3000, 1, 0, 16, 17], [64], [4096] * 3, [0, 5, 700], [20_000], [0]] * 3
    problems = [make_problem(contexts, seed=seed) for seed, contexts in enumerate(lengths)]
    expected = [run_decode(kernels, problem, "split") for problem in problems]
    outs = [torch.empty_like(out) for out in expected]

    def run() -> None:
        for problem, out in zip(problems, outs, strict=True):
            kernels.decode(*problem.decode_arguments, out=out, overlap=True)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    for repeat in (run, *[graph.replay] * 10):
        for out in outs:
            out.fill_(torch.nan)
        repeat()
        assert all(torch.equal(out, exact) for out, exact in zip(outs, expected, strict=True))


@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((9, 3), 64), ((8, 8), 256)])
def test_decode_equal_contexts(kernels: PagedAttention, heads: tuple[int, int], head_dim: int) -> None:
    """Parts then begin where segments do; one and several segments to a part, and several parts to a segment."""
    for count in (1, 2, 33, 66, 96):
        problem = make_problem([515] * count, heads=heads, head_dim=head_dim, seed=count)
        assert_close(run_decode(kernels, problem, "split"), problem)


def test_decode_sharp_and_shifted_scores(kernels: PagedAttention) -> None:
    """Scores in the hundreds overflow exp without the running maximum, and make one token take all."""
    problem = make_problem([500, 33, 1])
    problem.q.mul_(100)
    for kernel in DECODE_KERNELS:
        out = run_decode(kernels, problem, kernel)
        expected, _ = reference(problem)
        assert (out.double() - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("kernel", DECODE_KERNELS)
def test_decode_replays_in_a_graph_with_other_lengths(kernels: PagedAttention, kernel: str) -> None:
    before = make_problem([5, 64, 0, 700], heads=(16, 4), extra_blocks=200, seed=1)
    after = make_problem([900, 0, 33, 1], heads=(16, 4), extra_blocks=200, seed=2)
    width = max(before.block_tables.shape[1], after.block_tables.shape[1])
    blocks = max(before.k_cache.shape[0], after.k_cache.shape[0])
    _replay(
        before,
        after,
        width,
        blocks,
        lambda p, out: kernels.decode(*p.decode_arguments, out=out, kernel=kernel),
    )


def _replay(
    before: Problem, after: Problem, width: int, blocks: int, call: Callable[[Problem, Tensor], object]
) -> None:
    """Capture with one problem's contents, replay with the other's and then with the first's again."""

    def padded(problem: Problem) -> Problem:
        for name in ("k_cache", "v_cache"):
            cache = getattr(problem, name)
            room = torch.full((blocks - cache.shape[0], *cache.shape[1:]), torch.nan, dtype=cache.dtype, device="cuda")
            setattr(problem, name, torch.cat([cache, room]))
        table = problem.block_tables
        room = table[:, -1:].expand(-1, width - table.shape[1])
        problem.block_tables = torch.cat([table, room], dim=1).contiguous()
        return problem

    before, after = padded(before), padded(after)
    static = Problem(**{name: getattr(before, name) for name in before.__dataclass_fields__})
    names = ("q", "k_cache", "v_cache", "block_tables", "cu_seqlens_q", "context_lens")
    for name in names:
        setattr(static, name, getattr(before, name).clone())
    out = torch.full_like(static.q, torch.nan)
    call(static, out)  # compiles and loads, which a capture would not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(static, out)
    for problem in (after, before):
        for name in names:
            getattr(static, name).copy_(getattr(problem, name))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, problem)


# --- prefill ---------------------------------------------------------------------------------------------------------

# (query lengths, context lengths): whole prompts, chunks after a prefix, single tokens, padding sequences.
PREFILLS = [
    ([1], [1]),
    ([64], [64]),
    ([65], [65]),
    ([130, 1, 7], [130, 1, 7]),
    ([33, 1, 128, 1, 16], [50, 300, 128, 0, 217]),
    ([100, 5, 1, 1], [421, 5, 0, 77]),
]


@pytest.mark.parametrize("kernel", PREFILL_KERNELS)
@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), FORMATS)
def test_prefill_ragged(
    library: KernelLibrary, kernel: str, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    # Few SMs make the tiled kernel choose large query tiles, many make it choose small ones, and split divide the keys.
    few, many = PagedAttention(library, num_sms=1), PagedAttention(library, num_sms=10**6)
    shape = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size}
    for seed, (q_lens, contexts) in enumerate(PREFILLS):
        problem = make_problem(contexts, q_lens, heads=HEADS[seed], seed=seed, fused=seed % 2 == 1, **shape)
        for kernels in (few, many) if kernel in ("tiled", "split") else (few,):
            assert_close(run_prefill(kernels, problem, kernel), problem)


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_head_ratios(kernels: PagedAttention, heads: tuple[int, int]) -> None:
    problem = make_problem([90, 200], [90, 70], heads=heads, head_dim=64)
    for kernel in PREFILL_KERNELS:
        assert_close(run_prefill(kernels, problem, kernel), problem)


@pytest.mark.parametrize("kernel", PREFILL_KERNELS[1:])
def test_prefill_random_chunks(kernels: PagedAttention, kernel: str) -> None:
    rng = random.Random(0)
    for seed in range(12):
        q_lens = [rng.choice([1, 2, 63, 64, 65, rng.randint(1, 400)]) for _ in range(rng.randint(1, 7))]
        contexts = [n + rng.choice([0, 0, 1, 15, 16, 64, rng.randint(1, 1500)]) for n in q_lens]
        problem = make_problem(contexts, q_lens, heads=rng.choice(HEADS), block_size=rng.choice([8, 16, 32]), seed=seed)
        assert_close(run_prefill(kernels, problem, kernel), problem)


@pytest.mark.parametrize("kernel", PREFILL_KERNELS[1:])
@pytest.mark.parametrize(("q_lens", "contexts"), [([2048], [2048]), ([512], [16_000]), ([40, 1000], [40_000, 3000])])
def test_prefill_long(kernels: PagedAttention, q_lens: list[int], contexts: list[int], kernel: str) -> None:
    problem = make_problem(contexts, q_lens, heads=(8, 2))
    assert_close(run_prefill(kernels, problem, kernel), problem)


@pytest.mark.parametrize("kernel", PREFILL_KERNELS[1:])
def test_prefill_in_chunks_equals_prefill_at_once(kernels: PagedAttention, kernel: str) -> None:
    whole = make_problem([1000], [1000], heads=(8, 2))
    expected = run_prefill(kernels, whole, kernel)
    caches = (whole.k_cache, whole.v_cache, whole.block_tables)
    for start in range(0, 1000, 300):
        stop = min(start + 300, 1000)
        cu_seqlens = torch.tensor([0, stop - start], dtype=torch.int32, device="cuda")
        context = torch.tensor([stop], dtype=torch.int32, device="cuda")
        arguments = (whole.q[start:stop], *caches, cu_seqlens, context, stop - start, whole.scale)
        out = kernels.prefill(*arguments, kernel=kernel)
        torch.testing.assert_close(out, expected[start:stop], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), FORMATS)
def test_prefill_split_for_short_chunks_behind_long_prefixes(
    kernels: PagedAttention, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    shape = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size}
    for seed, heads in enumerate(HEADS):
        q_lens, contexts = ([20], [4999 + seed]) if seed % 2 else ([3, 1, 37, 1], [2500, 0, 300 + seed, 1])
        problem = make_problem(contexts, q_lens, heads=heads, seed=seed, fused=seed % 3 == 1, **shape)
        assert_close(run_prefill(kernels, problem, "split"), problem)


def test_prefill_split_for_any_number_of_sms(library: KernelLibrary) -> None:
    problem = make_problem([3000, 5000], [17, 5], heads=(8, 2))
    for num_sms in (1, 2, 5, 16, 33, 1000):
        kernels = PagedAttention(library, num_sms=num_sms)
        first = run_prefill(kernels, problem, "split")
        assert_close(first, problem)
        assert all(torch.equal(first, run_prefill(kernels, problem, "split")) for _ in range(3))


def test_prefill_split_with_sharp_scores(kernels: PagedAttention) -> None:
    problem = make_problem([4000], [20])
    problem.q.mul_(100)
    out, (expected, _) = run_prefill(kernels, problem, "split"), reference(problem)
    assert (out.double() - expected).norm() / expected.norm() < 2e-2


def test_prefill_divides_keys_where_queries_do_not_fill_the_gpu(library: KernelLibrary) -> None:
    for q_len, context, used in ((20, 5000, True), (20, 200, False), (4000, 5000, False)):
        kernels = PagedAttention(library)
        problem = make_problem([context], [q_len])
        assert_close(kernels.prefill(*problem.prefill_arguments), problem)
        assert any(key[0] == "prefill_split" for key in kernels._kernels) is used


@pytest.mark.parametrize("kernel", PREFILL_KERNELS[1:])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_many_sequences_again_and_again(kernels: PagedAttention, head_dim: int, kernel: str) -> None:
    """More sequences than lanes in a warp, some without context; and each launch leaves its counter as it was."""
    contexts = ragged(70, 300, 5)
    q_lens = [max(1, context // 2) for context in contexts]
    problem = make_problem(contexts, q_lens, heads=(8, 2), head_dim=head_dim)
    for _ in range(3):
        assert_close(run_prefill(kernels, problem, kernel), problem)


@pytest.mark.parametrize("num_sms", [1, 3, 1000])
def test_prefill_wgmma_on_any_number_of_blocks(library: KernelLibrary, num_sms: int) -> None:
    kernels = PagedAttention(library, num_sms=num_sms)
    problem = make_problem([700, 0, 130], [500, 1, 130], heads=(4, 2))
    assert_close(run_prefill(kernels, problem, "wgmma"), problem)


def test_prefill_wgmma_launches_on_other_caches(kernels: PagedAttention) -> None:
    """A prepared launch takes tensors that are alike, such as another layer's caches."""
    first, second = (make_problem([300, 33], [200, 33], seed=seed) for seed in range(2))
    if not kernels.has_wgmma:
        pytest.skip("needs a Hopper GPU")
    arguments = first.prefill_arguments
    launch = kernels.prepare_prefill(torch.empty_like(first.q), *arguments, kernel="wgmma")
    for problem in (first, second, first):
        out = torch.full_like(problem.q, torch.nan)
        launch(out, *problem.prefill_arguments[:6])
        assert_close(out, problem)


def test_prefill_leaves_rows_past_the_last_sequence_alone(kernels: PagedAttention) -> None:
    problem = make_problem([20, 70], [20, 5])
    q = torch.cat([problem.q, problem.q[:9]])
    for kernel in PREFILL_KERNELS if kernels.has_wgmma else PREFILL_KERNELS[:3]:
        out = torch.full_like(q, torch.nan)
        arguments = (problem.k_cache, problem.v_cache, problem.block_tables, problem.cu_seqlens_q)
        # A longest chunk larger than the real one only adds blocks that exit at once.
        kernels.prefill(q, *arguments, problem.context_lens, 500, problem.scale, out=out, kernel=kernel)
        assert_close(out[:25], problem)
        assert out[25:].isnan().all()


@pytest.mark.parametrize("kernel", PREFILL_KERNELS)
def test_prefill_replays_in_a_graph_with_other_lengths(kernels: PagedAttention, kernel: str) -> None:
    if kernel == "wgmma" and not kernels.has_wgmma:
        pytest.skip("needs a Hopper GPU")
    before = make_problem([70, 5, 200], [70, 5, 25], heads=(8, 2), extra_blocks=50, seed=1)
    after = make_problem([10, 0, 400], [10, 1, 89], heads=(8, 2), extra_blocks=50, seed=2)
    width = max(before.block_tables.shape[1], after.block_tables.shape[1])
    blocks = max(before.k_cache.shape[0], after.k_cache.shape[0])

    def call(problem: Problem, out: Tensor) -> None:
        arguments = (*problem.prefill_arguments[:6], 100, problem.scale)
        kernels.prefill(*arguments, out=out, kernel=kernel)

    _replay(before, after, width, blocks, call)


# --- what is refused -------------------------------------------------------------------------------------------------


def _refused(kernels: PagedAttention, **changes: object) -> None:
    """Both phases must refuse the problem after ``changes``, and launch nothing."""
    problem = make_problem([20, 3], heads=(8, 2), head_dim=64)
    for name, value in changes.items():
        setattr(problem, name, value(problem) if callable(value) else value)
    launches: list[object] = []
    watched = PagedAttention(kernels._library)
    watched._kernel = lambda *a, **k: launches.append(a)
    for kernel in DECODE_KERNELS:
        with pytest.raises(UnsupportedShapeError):
            watched.decode(*problem.decode_arguments, kernel=kernel)
    for kernel in PREFILL_KERNELS:
        with pytest.raises(UnsupportedShapeError):
            watched.prefill(*problem.prefill_arguments, kernel=kernel)
    assert not launches


def test_unsupported_arguments_raise_before_a_launch(kernels: PagedAttention) -> None:
    def cache(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    _refused(kernels, q=cache(2, 8, 80), k_cache=cache(4, 16, 2, 80), v_cache=cache(4, 16, 2, 80))  # head dim
    _refused(kernels, k_cache=cache(4, 12, 2, 64), v_cache=cache(4, 12, 2, 64))  # block size
    _refused(kernels, q=cache(2, 7, 64))  # heads not a multiple
    float32 = torch.float32
    floats = {name: cache(4, 16, 2, 64, dtype=float32) for name in ("k_cache", "v_cache")}
    _refused(kernels, q=cache(2, 8, 64, dtype=float32), **floats)
    _refused(kernels, q=lambda p: p.q.half())  # dtypes differ
    _refused(kernels, q=lambda p: p.q.transpose(1, 2).contiguous().transpose(1, 2))  # strides
    _refused(kernels, q=lambda p: cache(2 * 8 * 64 + 1)[1:].view(2, 8, 64))  # alignment
    _refused(kernels, q=lambda p: cache(2, 8 * 64 + 4)[:, : 8 * 64].unflatten(1, (8, 64)))  # alignment of rows
    _refused(kernels, k_cache=lambda p: p.k_cache.transpose(0, 1))
    _refused(kernels, block_tables=lambda p: p.block_tables.long())
    _refused(kernels, block_tables=lambda p: p.block_tables[:1])
    _refused(kernels, context_lens=lambda p: p.context_lens.cpu())
    _refused(kernels, context_lens=lambda p: p.context_lens.long())
    _refused(kernels, scale=0.0)
    _refused(kernels, scale=float("nan"))


def test_empty_batches_launch_nothing(kernels: PagedAttention) -> None:
    problem = make_problem([20])
    nothing = (problem.q[:0], problem.k_cache, problem.v_cache, problem.block_tables[:0])
    assert kernels.decode(*nothing, problem.context_lens[:0], 1.0).shape == (0, 32, 128)
    out = kernels.prefill(*nothing, problem.cu_seqlens_q[:1], problem.context_lens[:0], 0, 1.0)
    assert out.shape == (0, 32, 128)


# --- no GPU needed ---------------------------------------------------------------------------------------------------


def test_host_constants_agree_with_the_sources() -> None:
    def constant(file: str, name: str) -> str:
        found = re.search(rf"constexpr int {name} = ([^;]+);", (csrc_dir() / file).read_text())
        assert found, f"{name} is not in {file}"
        return found.group(1)

    assert constant("attention_plan.cuh", "UNIT") == "HEAD_DIM <= 64 ? 32 : 16"
    assert constant("attention_plan.cuh", "MIN_UNITS") == str(attention._MIN_UNITS)
    assert constant("attention_plan.cuh", "MAX_GROUP") == "8 * HEAD_TILES"
    assert constant("attention_decode_split.cu", "WARPS") == "HEAD_DIM <= 128 ? 4 : 2"
    assert constant("attention_decode_warp.cu", "WARPS") == str(attention._WARP_KERNEL_THREADS // 32)
    assert constant("attention_prefill_split.cu", "WARPS") == str(attention._SPLIT_THREADS // 32)
    assert constant("attention_prefill_split.cu", "TILE_ROWS") == "WARPS * 16"
    assert attention._SPLIT_THREADS // 32 * 16 == attention._SPLIT_ROWS
    assert constant("attention_prefill_split.cu", "TILE_K") == "HEAD_DIM <= 128 ? 64 : 32"
    assert constant("attention_prefill_split.cu", "MAX_SPLITS") == str(attention._MAX_SPLITS)
    assert constant("attention_prefill_split.cu", "MIN_TILES") == str(attention._MIN_TILES)
    wgmma = "attention_wgmma_rings.cuh"
    assert constant(wgmma, "CONSUMERS") == "HEAD_DIM <= 64 ? 3 : 2"
    assert constant(wgmma, "TILE_Q") == "CONSUMERS * 64"
    assert constant(wgmma, "THREADS") == "(CONSUMERS + 1) * GROUP"
    assert constant(wgmma, "TILE_K") == "HEAD_DIM <= 128 ? 128 : 64"
    assert constant(wgmma, "SLOTS") == "HEAD_DIM <= 128 ? 2 : 1"
    assert constant(wgmma, "STAGES") == str(attention._WGMMA_STAGES)
    for head_dim in checks.HEAD_DIMS:
        groups = 3 if head_dim <= 64 else 2
        shape = attention.wgmma_shape(head_dim)
        assert (shape.queries, shape.threads) == (groups * 64, (groups + 1) * 128)
        assert shape.keys == (128 if head_dim <= 128 else 64)


def test_shared_memory_fits_the_smallest_gpus() -> None:
    limit = 99 * 1024  # sm_86 and sm_89, static shared memory included
    for head_dim in checks.HEAD_DIMS:
        assert all(attention.split_shape(head_dim, stages)[1] + 1024 <= limit for stages in attention.STAGES)
        for tiling in attention.tilings(head_dim)[:2]:
            assert attention.tiled_shape(head_dim, *tiling)[1] + 512 <= limit
        assert attention.wgmma_shape(head_dim).shared_bytes + 1024 <= 227 * 1024  # sm_90
