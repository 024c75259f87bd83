"""What attention kernels compute, against float64, where there is no GPU: see cuda_on_cpu.py for what that can show."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import COMPILER, CpuKernel
from torch import Tensor

from nanopd.ops.attention import STAGES, Ring, head_tiles, tilings
from nanopd.ops.reference import ReferenceOps

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs Linux and g++")
BF16 = torch.bfloat16
HEADS = [(8, 2), (9, 3), (4, 4), (34, 2)]  # 17 query heads share a key: more than are handled together


@dataclass
class Problem:
    """Sequences in a paged cache. Slots that hold no token are NaN; table entries past a context lie far outside."""

    q: Tensor  # [T, Hq, D]
    k_cache: Tensor  # [num_blocks, block_size, Hkv, D]
    v_cache: Tensor
    tables: Tensor  # [S, max_blocks]
    starts: Tensor  # [S + 1]
    lens: Tensor  # [S]
    scale: float

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    def expected(self, decode: bool) -> Tensor:
        """float64"""
        q, k, v = (x.double() for x in (self.q, self.k_cache, self.v_cache))
        tables, out = self.tables.clamp(0, k.shape[0] - 1), torch.zeros_like(q)
        if decode:
            return ReferenceOps().paged_decode_attention(q, k, v, tables, self.lens, self.scale, out)
        longest = int(self.starts.diff().max())
        return ReferenceOps().paged_prefill_attention(q, k, v, tables, self.starts, self.lens, longest, self.scale, out)


def problem(
    contexts: list[int],
    queries: list[int] | None = None,
    *,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 64,
    block_size: int = 16,
    sharpness: float = 1.0,
) -> Problem:
    draw = torch.Generator().manual_seed(sum(contexts) + head_dim + heads[0])
    queries = queries or [1] * len(contexts)
    needs = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(needs) + 2, generator=draw)[: sum(needs)].to(torch.int32).split(needs)
    cache = torch.full((2, sum(needs) + 2, block_size, heads[1], head_dim), math.nan, dtype=BF16)
    tables = torch.full((len(contexts), max(1, *needs)), 2**30, dtype=torch.int32)
    for seq, (context, blocks) in enumerate(zip(contexts, order)):
        tables[seq, : len(blocks)] = blocks
        slots = (blocks.unsqueeze(1) * block_size + torch.arange(block_size)).flatten()[:context].long()
        tokens = torch.randn(2, context, heads[1], head_dim, generator=draw)
        cache.view(2, -1, heads[1], head_dim)[:, slots] = tokens.to(BF16)
    q = (sharpness * torch.randn(sum(queries), heads[0], head_dim, generator=draw)).to(BF16)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
    lens = torch.tensor(contexts, dtype=torch.int32)
    return Problem(q, cache[0], cache[1], tables, starts, lens, head_dim**-0.5)


def assert_close(out: Tensor, p: Problem, decode: bool) -> None:
    expected = p.expected(decode)
    assert not out.isnan().any()
    assert (out.double() - expected).norm() <= 6e-3 * expected.norm()  # bf16 probabilities and results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def decode_split(kernel: CpuKernel, p: Problem, parts: int) -> tuple[Tensor, int]:
    """The result, and how many pieces of cut segments it was merged from."""
    num_seqs, num_heads, head_dim = p.q.shape
    out, counters = torch.full_like(p.q, math.nan), torch.zeros(parts, dtype=torch.int32)
    rows = 8 * head_tiles(num_heads // p.k_cache.shape[2])
    pieces = torch.full((2 * parts, rows, head_dim), math.nan), torch.full((2 * parts, rows), math.nan)
    sizes = (num_heads * head_dim, p.tables.shape[1], num_seqs, num_heads, p.k_cache.shape[2])
    inputs = (p.q, p.k_cache, p.v_cache, p.tables, p.lens)
    kernel((parts,), 128 if head_dim <= 128 else 64, out, *pieces, counters, *inputs, p.scale, *sizes)
    assert not counters.any(), "the next launch finds zeros"
    return out, int((~pieces[1].isnan()).any(dim=1).sum())


def split_kernel(folder: Path, *, head_dim: int, block_size: int = 16, stages: int = 3, tiles: int = 1) -> CpuKernel:
    macros = Ring(stages, tiles)._asdict()
    return CpuKernel("attention_decode_split", folder, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, **macros)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (64, 24), (96, 8), (128, 16), (128, 40), (256, 8)])
def test_split_decode(folder: Path, head_dim: int, block_size: int, stages: int) -> None:
    sizes = {"head_dim": head_dim, "block_size": block_size}
    kernels = {tiles: split_kernel(folder, **sizes, stages=stages, tiles=tiles) for tiles in (1, 2)}
    draw = random.Random(head_dim)
    for heads in [*HEADS, (8, 1), (9, 1)]:  # a full tile of heads, and one head more
        for contexts in ([1], [300], [17, 0, 64, 1, 33], [96] * 4, [0, 0]):
            p = problem(contexts, heads=heads, sharpness=draw.choice([1.0, 8.0]), **sizes)
            kernel = kernels[head_tiles(heads[0] // heads[1])]
            assert_close(decode_split(kernel, p, draw.randint(1, 14))[0], p, decode=True)


def test_split_decode_cut_anywhere(folder: Path) -> None:
    kernel = split_kernel(folder, head_dim=64)
    p = problem([160, 0, 96, 33], heads=(6, 3))
    for parts in range(1, 30):
        assert_close(decode_split(kernel, p, parts)[0], p, decode=True)


def test_equal_contexts_are_cut_at_their_ends_where_that_pays(folder: Path) -> None:
    kernel = split_kernel(folder, head_dim=64)
    few, many = 10 * 32, 60 * 32  # tokens: 10 and 60 units
    for contexts, parts, pieces in (
        ([few] * 4, 15, 0),  # 8 parts of 10 units, not 15 of 5 or 6 with a border in most of them
        ([few] * 4, 17, 16),  # two to a segment
        ([few] * 3 + [few - 32], 15, 20),  # not equal
        ([few] * 4, 5, 0),  # 4 parts, each of two segments
        ([few] * 3, 5, 0),
        ([few] * 7, 6, 8),  # 14 segments, at least 3 to a part, do not come out even
        ([many] * 4, 15, 22),  # parts of 60 units instead of 32 would cost more than a border
        ([many] * 4, 9, 0),
        ([many, 0, many, many, 0, many], 9, 0),
    ):
        p = problem(contexts, heads=(8, 2))
        out, found = decode_split(kernel, p, parts)
        assert_close(out, p, decode=True)
        assert found == pieces, (contexts, parts)


@pytest.mark.parametrize(("name", "threads"), [("naive", 64), ("warp", 256)])
def test_earlier_decode_versions(folder: Path, name: str, threads: int) -> None:
    kernel = CpuKernel(f"attention_decode_{name}", folder, HEAD_DIM=64, BLOCK_SIZE=16)
    for heads in HEADS[:3]:
        p = problem([1, 0, 75, 16], heads=heads)
        out = torch.full_like(p.q, math.nan)
        sizes = (heads[0] * 64, p.tables.shape[1], heads[1])
        kernel((heads[0], 4), threads, out, p.q, p.k_cache, p.v_cache, p.tables, p.lens, p.scale, *sizes)
        assert_close(out, p, decode=True)


CHUNKS = [([1], [1]), ([70], [70]), ([200, 0, 33, 90], [37, 1, 33, 1])]  # contexts, and the queries at their ends


@pytest.mark.parametrize(("head_dim", "which"), [(64, 0), (64, 1), (128, 1), (128, 3), (256, 0)])
def test_tiled_prefill(folder: Path, head_dim: int, which: int) -> None:
    tiling = tilings(head_dim)[which]
    kernel = CpuKernel("attention_prefill_tiled", folder, HEAD_DIM=head_dim, BLOCK_SIZE=16, **tiling._asdict())
    for contexts, queries in CHUNKS:
        p = problem(contexts, queries, heads=(4, 2), head_dim=head_dim, sharpness=3.0)
        out = torch.full_like(p.q, math.nan)
        grid = (4, len(contexts), -(-max(queries) // tiling.queries))
        inputs = (p.q, p.k_cache, p.v_cache, p.tables, p.starts, p.lens)
        kernel(grid, tiling.WARPS * 32, out, *inputs, p.scale, 4 * head_dim, p.tables.shape[1], 2)
        assert_close(out, p, decode=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_split_prefill(folder: Path, head_dim: int) -> None:
    kernel = CpuKernel("attention_prefill_split", folder, HEAD_DIM=head_dim, BLOCK_SIZE=16)
    for heads in ((8, 2), (9, 3)):
        for (contexts, queries), splits in zip([*CHUNKS, ([1100, 600], [3, 20])], (1, 2, 3, 4)):
            p = problem(contexts, queries, heads=heads, head_dim=head_dim)
            tiles = -(-max(queries) * heads[0] // heads[1] // 64)
            out, rows = torch.full_like(p.q, math.nan), heads[1] * len(contexts) * tiles * splits * 64
            counters = torch.zeros(heads[1] * len(contexts) * tiles, dtype=torch.int32)
            pieces = torch.full((rows, head_dim), math.nan), torch.full((rows,), math.nan)
            inputs = (p.q, p.k_cache, p.v_cache, p.tables, p.starts, p.lens)
            sizes = (heads[0] * head_dim, p.tables.shape[1], heads[0], splits)
            kernel((heads[1], len(contexts), tiles * splits), 128, out, *pieces, counters, *inputs, p.scale, *sizes)
            assert_close(out, p, decode=False)
            assert not counters.any()
