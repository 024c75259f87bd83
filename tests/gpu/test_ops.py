"""The CUDA kernels between the matrix products, and the block movers, against PyTorch in float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanopd.errors import UnsupportedShapeError
from nanopd.ops import get_ops
from nanopd.ops.alike import AlikeOps, alike
from nanopd.ops.cuda import CudaOps
from nanopd.ops.reference import ReferenceOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = [torch.bfloat16, torch.float16]
ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit in the last place, relative
NAN = float("nan")


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    made = get_ops("cuda")
    assert isinstance(made, CudaOps)
    return made


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def assert_rounded(actual: Tensor, exact: Tensor, slack: float = 1e-5) -> None:
    """``actual`` is ``exact`` (float64) up to one rounding to its dtype, plus float32 noise."""
    assert not actual.isnan().any()
    error = (actual.double() - exact).abs()
    allowed = exact.abs() * (ULP[actual.dtype] * 1.02) + slack * exact.abs().mean() + 1e-7
    worst = (error - allowed).max().item()
    assert worst <= 0, f"off by {worst} beyond one rounding"


def fused_qkv(tokens: int, hq: int, hkv: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkv = randn(tokens, (hq + 2 * hkv) * d, dtype=dtype)
    q, k, v = qkv.split([hq * d, hkv * d, hkv * d], dim=1)
    return qkv, q.view(tokens, hq, d), k.view(tokens, hkv, d), v.view(tokens, hkv, d)


# --- the KV cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 1000])
@pytest.mark.parametrize(("hkv", "d"), [(1, 64), (3, 64), (8, 128), (2, 96), (5, 256)])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_store_kv(ops: CudaOps, dtype: torch.dtype, tokens: int, hkv: int, d: int, block_size: int) -> None:
    _, _, k, v = fused_qkv(tokens, 2 * hkv, hkv, d, dtype)
    num_blocks = tokens // block_size + 5
    k_cache = torch.full((num_blocks, block_size, hkv, d), NAN, dtype=dtype, device="cuda")
    v_cache = k_cache.clone()
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    slots[torch.rand(tokens) < 0.2] = -1
    ops.store_kv(k, v, k_cache, v_cache, slots.cuda())
    for cache, rows in ((k_cache, k), (v_cache, v)):
        expected = torch.full((num_blocks * block_size, hkv, d), NAN, dtype=dtype)
        kept = slots >= 0
        expected[slots[kept]] = rows.cpu()[kept]
        assert torch.equal(bits(cache.cpu().flatten()), bits(expected.flatten()))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


@pytest.mark.parametrize("moved", [1, 3, 37])
@pytest.mark.parametrize(("block_size", "hkv", "d"), [(8, 1, 64), (16, 3, 64), (16, 8, 128), (32, 2, 96), (8, 5, 256)])
def test_block_movers(ops: CudaOps, moved: int, block_size: int, hkv: int, d: int) -> None:
    cache = randn(3, 2, 80, block_size, hkv, d, dtype=torch.bfloat16)
    before = cache.clone()
    ids = torch.randperm(80, device="cuda")[: 2 * moved]
    src, dst = ids[:moved].contiguous(), ids[moved:].contiguous()

    out = torch.full((3, 2, moved, block_size, hkv, d), NAN, dtype=torch.bfloat16, device="cuda")
    assert ops.gather_blocks(cache, src, out) is out
    assert torch.equal(out, before[:, :, src])
    assert torch.equal(ops.gather_blocks(cache, src), out)

    target = torch.full_like(cache, NAN)
    ops.scatter_blocks(out, target, dst)
    expected = torch.full_like(cache, NAN)
    expected[:, :, dst] = before[:, :, src]
    assert torch.equal(bits(target), bits(expected))

    ops.copy_blocks(cache, src, dst)
    before[:, :, dst] = before[:, :, src]
    assert torch.equal(cache, before)


@pytest.mark.parametrize("moved", [1, 3, 37])
@pytest.mark.parametrize(("block_size", "hkv", "d"), [(8, 1, 64), (16, 3, 64), (16, 8, 128), (8, 5, 256)])
def test_transfer_blocks(ops: CudaOps, moved: int, block_size: int, hkv: int, d: int) -> None:
    source = randn(3, 2, 80, block_size, hkv, d, dtype=torch.bfloat16)
    kept = source.clone()
    destination = torch.full((3, 2, 50, block_size, hkv, d), NAN, dtype=torch.bfloat16, device="cuda")
    expected = destination.clone()
    src, dst = torch.randperm(80, device="cuda")[:moved], torch.randperm(50, device="cuda")[:moved]
    ops.transfer_blocks(source, destination, src, dst)
    expected[:, :, dst] = kept[:, :, src]
    assert torch.equal(bits(destination), bits(expected))
    assert torch.equal(source, kept)


def test_copy_one_block_to_many(ops: CudaOps) -> None:
    cache = randn(2, 2, 20, 16, 2, 64, dtype=torch.float16)
    before = cache.clone()
    dst = torch.tensor([3, 19, 0, 7], device="cuda")
    ops.copy_blocks(cache, torch.full_like(dst, 5), dst)
    before[:, :, dst] = before[:, :, [5]]
    assert torch.equal(cache, before)


def test_blocks_far_apart_need_64_bit_offsets(ops: CudaOps) -> None:
    """A cache of more than 2^32 elements (9 GB), written at its far end."""
    shape = (2, 2, 68_000, 16, 8, 128)
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    cache[:, :, -1] = randn(2, 2, 16, 8, 128, dtype=torch.bfloat16)
    ids = torch.tensor([67_999], device="cuda")
    ops.copy_blocks(cache, ids, ids - 2)
    assert torch.equal(cache[:, :, -3], cache[:, :, -1])
    assert torch.equal(ops.gather_blocks(cache, ids - 2)[:, :, 0], cache[:, :, -1])
    k = randn(1, 8, 128, dtype=torch.bfloat16)
    ops.store_kv(k, k, cache[1, 0], cache[1, 1], torch.tensor([67_999 * 16 + 15], device="cuda"))
    assert torch.equal(cache[1, 1, -1, -1], k[0])


# --- between the matrix products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 64, 96, 128, 256, 264, 576, 896, 1536, 4096, 5120, 8192, 20000])
@pytest.mark.parametrize("rows", [1, 5, 129])
def test_rms_norm(ops: CudaOps, dtype: torch.dtype, width: int, rows: int) -> None:
    x, residual = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
    weight = randn(width, dtype=dtype)
    exact = ReferenceOps().rms_norm(x.double(), weight.double(), 1e-6)
    assert_rounded(ops.rms_norm(x, weight, 1e-6), exact)

    kept = x.clone(), residual.clone()
    normed, total = ops.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(total, x + residual)
    assert_rounded(normed, ReferenceOps().rms_norm(total.double(), weight.double(), 1e-6))
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


@pytest.mark.parametrize("d", [64, 128])
def test_rms_norm_of_heads_in_a_fused_row(ops: CudaOps, d: int) -> None:
    _, q, k, _ = fused_qkv(33, 6, 2, d, torch.bfloat16)
    weight = randn(d, dtype=torch.bfloat16)
    for heads in (q, k):
        normed = ops.rms_norm(heads, weight, 1e-6)
        assert normed.is_contiguous()
        assert_rounded(normed, ReferenceOps().rms_norm(heads.double(), weight.double(), 1e-6))


def test_rms_norm_of_large_values_does_not_overflow(ops: CudaOps) -> None:
    x = torch.full((2, 4096), 60000.0, dtype=torch.float16, device="cuda")
    assert_rounded(ops.rms_norm(x, torch.ones_like(x[0]), 1e-6), torch.ones_like(x).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hq", "hkv", "d"), [(9, 3, 64), (32, 8, 128), (4, 1, 96), (5, 5, 256)])
@pytest.mark.parametrize("tokens", [1, 13, 700])
def test_rope(ops: CudaOps, dtype: torch.dtype, hq: int, hkv: int, d: int, tokens: int) -> None:
    qkv, q, k, _ = fused_qkv(tokens, hq, hkv, d, dtype)
    angles = torch.outer(torch.arange(5000.0), 10000 ** (-torch.arange(d // 2) * 2 / d))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).cuda()
    positions = torch.randint(5000, (tokens,), device="cuda")
    before = qkv.clone()
    exact_q, exact_k = q.double(), k.double()
    ReferenceOps().rope(exact_q, exact_k, positions, cos_sin.double())
    ops.rope(q, k, positions, cos_sin)
    assert_rounded(q, exact_q)
    assert_rounded(k, exact_k)
    values = (hq + hkv) * d
    assert torch.equal(qkv[:, values:], before[:, values:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("hq", "hkv", "d"), [(9, 3, 64), (32, 8, 128), (4, 1, 96), (5, 5, 256)])
@pytest.mark.parametrize("tokens", [1, 13, 700])
def test_norm_rope_store(ops: CudaOps, dtype: torch.dtype, norm: bool, hq: int, hkv: int, d: int, tokens: int) -> None:
    _, q, k, v = fused_qkv(tokens, hq, hkv, d, dtype)
    weights = [randn(d, dtype=dtype) if norm else None for _ in range(2)]
    angles = torch.outer(torch.arange(5000.0), 10000 ** (-torch.arange(d // 2) * 2 / d))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).cuda()
    positions = torch.randint(5000, (tokens,), device="cuda")
    num_blocks = tokens // 16 + 5
    k_cache = torch.full((num_blocks, 16, hkv, d), NAN, dtype=dtype, device="cuda")
    v_cache = k_cache.clone()
    slots = torch.randperm(num_blocks * 16, device="cuda")[:tokens]
    slots[torch.rand(tokens, device="cuda") < 0.2] = -1

    exact_q, exact_k, exact_v = (x.double() for x in (q, k, v))
    caches = [torch.full(k_cache.shape, NAN, dtype=torch.float64, device="cuda") for _ in range(2)]
    wide = [None if w is None else w.double() for w in weights]
    rotation = (positions, cos_sin.double())
    exact_q = ReferenceOps().norm_rope_store(exact_q, exact_k, exact_v, *wide, 1e-6, *rotation, *caches, slots)

    got = ops.norm_rope_store(q, k, v, *weights, 1e-6, positions, cos_sin, k_cache, v_cache, slots)
    assert_rounded(got, exact_q)
    written = ~caches[0].isnan()
    assert torch.equal(~k_cache.isnan(), written)
    assert torch.equal(~v_cache.isnan(), written)
    if written.any():
        assert_rounded(k_cache[written], caches[0][written])
        assert torch.equal(v_cache[written].double(), caches[1][written])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows"), [(8, 1), (576, 7), (264, 1000), (4096, 6144), (12288, 4096), (4104, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_of_one_token(ops: CudaOps, dtype: torch.dtype, width: int, rows: int, bias: bool) -> None:
    x, weight = randn(1, width, dtype=dtype), randn(rows, width, dtype=dtype)
    b = randn(rows, dtype=dtype) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert_rounded(ops.linear(x, weight, b), exact, slack=1e-4)
    many = randn(3, width, dtype=dtype)
    assert torch.equal(ops.linear(many, weight, b), torch.nn.functional.linear(many, weight, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "half"), [(8, 1), (576, 1536), (4096, 12288), (264, 333)])
def test_gated_linear_of_one_token(ops: CudaOps, dtype: torch.dtype, width: int, half: int) -> None:
    x, weight = randn(1, width, dtype=dtype), randn(2 * half, width, dtype=dtype) * width**-0.5
    exact = ReferenceOps().silu_mul(x.double() @ weight.double().T)
    assert_rounded(ops.gated_linear(x, weight), exact, slack=1e-4)


WIDTHS = [(8, 6), (576, 14), (264, 1000), (4096, 6144), (4104, 34), (6144, 66), (8192, 66)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows"), WIDTHS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_norm_before_a_linear_layer(ops: CudaOps, dtype: torch.dtype, width: int, rows: int, tokens: int) -> None:
    """The normed input is rounded as by rms_norm. One token's norm adds its squares in another order, which may move
    its scale by a bit, and so tip the rounding of an input or two: hence the slack."""
    x, norm, weight = randn(tokens, width, dtype=dtype) * 3, randn(width, dtype=dtype), randn(rows, width, dtype=dtype)
    weight *= width**-0.5
    normed = ops.rms_norm(x, norm, 1e-6)
    exact = normed.double() @ weight.double().T
    for bias in (None, randn(rows, dtype=dtype)):
        out = torch.full((tokens, rows), NAN, dtype=dtype, device="cuda")
        assert ops.norm_linear(x, norm, 1e-6, weight, bias, out=out) is out
        assert torch.equal(out, ops.norm_linear(x, norm, 1e-6, weight, bias))
        if tokens == 1:
            assert_rounded(out, exact if bias is None else exact + bias.double(), slack=2 * ULP[dtype])
        else:
            assert torch.equal(out, ops.linear(normed, weight, bias))
    if tokens > 1 and rows % 16:
        return  # silu_mul takes rows of multiples of 8
    half = torch.full((tokens, rows // 2), NAN, dtype=dtype, device="cuda")
    assert ops.norm_gated_linear(x, norm, 1e-6, weight, out=half) is half
    if tokens == 1:
        assert_rounded(half, ReferenceOps().silu_mul(exact), slack=2 * ULP[dtype])
    else:
        assert torch.equal(half, ops.gated_linear(normed, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows"), [*WIDTHS, (12288, 4096)])
def test_adding_a_linear_layer(ops: CudaOps, dtype: torch.dtype, width: int, rows: int) -> None:
    x, weight, total = (randn(*s, dtype=dtype) for s in ((1, width), (rows, width), (1, rows)))
    exact = total.double() + x.double() @ weight.double().T
    assert ops.add_linear(total, x, weight) is total
    assert_rounded(total, exact, slack=1e-4)  # one rounding in all
    x, total = randn(3, width, dtype=dtype), randn(3, rows, dtype=dtype)
    want = total + ops.linear(x, weight)
    assert torch.equal(ops.add_linear(total, x, weight), want)


def test_ops_around_a_linear_layer_refuse_other_shapes(ops: CudaOps) -> None:
    x, weight = randn(1, 64, dtype=torch.bfloat16), randn(32, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedShapeError, match="weight must have"):
        ops.norm_linear(x, weight[0, :32], 1e-6, weight)
    with pytest.raises(UnsupportedShapeError, match="bias is"):
        ops.norm_linear(x, weight[0], 1e-6, weight, bias=x[0])
    for total in (x, randn(2, 32, dtype=torch.bfloat16), randn(1, 32, dtype=torch.float16)):
        with pytest.raises(UnsupportedShapeError, match="total is"):
            ops.add_linear(total, x, weight)
    for tokens in (1, 2):
        rows = x.expand(tokens, -1).contiguous()
        with pytest.raises(UnsupportedShapeError, match="gate_up"):
            ops.norm_gated_linear(rows, weight[0], 1e-6, weight[:31])
        with pytest.raises(UnsupportedShapeError, match="weight"):
            ops.norm_linear(rows, weight[0], 1e-6, weight[:, :56])
        with pytest.raises(UnsupportedShapeError, match="bias is"):
            ops.norm_linear(rows, weight[0], 1e-6, weight, bias=weight[0, :1])
        with pytest.raises(UnsupportedShapeError, match="cpu"):
            ops.add_linear(torch.zeros(tokens, 32, dtype=torch.bfloat16), rows, weight)
    with pytest.raises(UnsupportedShapeError, match="cpu"):
        ops.norm_linear(x, weight[0].cpu(), 1e-6, weight)


def assert_replays(chain: Callable[[Tensor], Tensor], start: Tensor, expected: Tensor) -> None:
    """``chain(start)``, captured in a graph, gives the same bits at each of many replays."""
    source, graph = start.clone(), torch.cuda.CUDAGraph()
    chain(source)
    with torch.cuda.graph(graph):
        captured = chain(source)
    for _ in range(50):
        source.copy_(start)
        graph.replay()
        assert torch.equal(captured, expected)


def test_a_step_of_one_token_sees_what_came_before(ops: CudaOps) -> None:
    """As below, for the ops that norm their input and add to their output."""
    width, eps = 1024, 1e-6
    qkv, out, down = (randn(width, width, dtype=torch.bfloat16) * width**-0.5 for _ in range(3))
    gate_up = randn(2 * width, width, dtype=torch.bfloat16) * width**-0.5
    norm, start = torch.ones(width, dtype=torch.bfloat16, device="cuda"), randn(1, width, dtype=torch.bfloat16)

    def chain(total: Tensor, after_each: Callable[[], object] = lambda: None) -> Tensor:
        for _ in range(20):
            x = ops.norm_linear(total, norm, eps, qkv)
            after_each()
            ops.add_linear(total, x, out)
            after_each()
            x = ops.norm_gated_linear(total, norm, eps, gate_up)
            after_each()
            ops.add_linear(total, x, down)
            after_each()
        return ops.norm_linear(total, norm, eps, qkv)

    assert_replays(chain, start, chain(start.clone(), torch.cuda.synchronize))


def test_overlapping_kernels_see_what_came_before(ops: CudaOps) -> None:
    """A chain in which each kernel may start before its predecessor ends, replayed often; any early read would show."""
    width = 1024
    weight = randn(width, width, dtype=torch.bfloat16) * width**-0.5
    gate_up = randn(2 * width, width, dtype=torch.bfloat16) * width**-0.5
    ones = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    start = randn(1, width, dtype=torch.bfloat16)

    def chain(x: Tensor) -> Tensor:
        residual = x
        for _ in range(20):
            x, residual = ops.rms_norm(ops.linear(x, weight), ones, 1e-6, residual)
            x = ops.gated_linear(x, gate_up)
        return x

    x = residual = start
    for _ in range(20):
        x = ops.linear(x, weight)
        torch.cuda.synchronize()
        x, residual = ops.rms_norm(x, ones, 1e-6, residual)
        torch.cuda.synchronize()
        x = ops.gated_linear(x, gate_up)
        torch.cuda.synchronize()
    assert_replays(chain, start, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (3, 1536), (77, 12288), (1, 24), (513, 4864)])
def test_silu_mul(ops: CudaOps, dtype: torch.dtype, tokens: int, width: int) -> None:
    x = randn(tokens, 2 * width, dtype=dtype) * 4
    assert_rounded(ops.silu_mul(x), ReferenceOps().silu_mul(x.double()))


def test_silu_mul_saturates(ops: CudaOps) -> None:
    x = torch.tensor([[-200.0] * 8 + [1.0] * 8, [200.0] * 8 + [1.0] * 8], dtype=torch.bfloat16, device="cuda")
    assert torch.equal(ops.silu_mul(x)[0], torch.zeros_like(x[0, :8]))
    assert torch.equal(ops.silu_mul(x)[1], x[1, :8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_given_outputs_take_the_same_values(ops: CudaOps, dtype: torch.dtype, tokens: int) -> None:
    x, residual, weight = randn(tokens, 576, dtype=dtype), randn(tokens, 576, dtype=dtype), randn(576, dtype=dtype)
    matrix, bias = randn(1536, 576, dtype=dtype), randn(1536, dtype=dtype)
    for b in (None, bias):
        out = torch.full((tokens, 1536), NAN, dtype=dtype, device="cuda")
        assert ops.linear(x, matrix, b, out=out) is out
        assert torch.equal(out, ops.linear(x, matrix, b))
    half = torch.full((tokens, 768), NAN, dtype=dtype, device="cuda")
    assert ops.gated_linear(x, matrix, out=half) is half
    assert torch.equal(half, ops.gated_linear(x, matrix))

    normed = torch.full((tokens, 576), NAN, dtype=dtype, device="cuda")
    assert torch.equal(ops.rms_norm(x, weight, 1e-6, out=normed), ops.rms_norm(x, weight, 1e-6))
    want, total = ops.rms_norm(x, weight, 1e-6, residual)
    assert ops.rms_norm(x, weight, 1e-6, residual, out=normed, total=residual) == (normed, residual)  # in place
    assert torch.equal(normed, want) and torch.equal(residual, total)


class Layer:
    """All ops of one layer, each called once on its own random weights and cache, in the way of the transformer."""

    def __init__(self, tokens: int, decodes: int) -> None:
        hq, hkv, d, width = 4, 2, 64, 256
        bf16, chunk = torch.bfloat16, tokens - decodes
        self.qkv, self.x, self.residual = (randn(tokens, n, dtype=bf16) for n in ((hq + 2 * hkv) * d, width, width))
        self.cache = randn(1, 2, 16, 16, hkv, d, dtype=bf16)[0]
        self.norms, self.matrix = (randn(d, dtype=bf16), randn(d, dtype=bf16)), randn(2 * width, width, dtype=bf16)
        self.weight = randn(width, dtype=bf16)
        self.parts = [p.unflatten(1, (-1, d)) for p in self.qkv.split([hq * d, hkv * d, hkv * d], dim=1)]
        self.place = torch.randperm(16 * 16, device="cuda")[:tokens], torch.arange(tokens, device="cuda")
        self.cos_sin = torch.rand(512, d, device="cuda")
        self.tables = torch.randint(16, (decodes + 1, 4), dtype=torch.int32, device="cuda")
        self.lens = torch.tensor([7] * decodes + [chunk + 3], dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, chunk], dtype=torch.int32, device="cuda")
        self.n, self.chunk, self.attended = decodes, chunk, torch.full((tokens, hq, d), NAN, dtype=bf16, device="cuda")

    def run(self, ops: CudaOps) -> list[Tensor]:
        q, k, v = self.parts
        n, (slots, positions) = self.n, self.place
        normed, gated, y = (torch.full_like(self.x, NAN) for _ in range(3))
        first = ops.rms_norm(self.x, self.weight, 1e-6, out=torch.empty_like(self.x)).clone()
        ops.norm_rope_store(q, k, v, *self.norms, 1e-6, positions, self.cos_sin, *self.cache, slots)
        if n > 0:
            ops.paged_decode_attention(q[:n], *self.cache, self.tables[:n], self.lens[:n], 0.125, self.attended[:n])
        where = (self.tables[n:], self.starts, self.lens[n:], self.chunk, 0.125)
        ops.paged_prefill_attention(q[n:], *self.cache, *where, self.attended[n:])
        ops.rms_norm(self.x, self.weight, 1e-6, self.residual, out=normed, total=self.residual)
        ops.gated_linear(normed, self.matrix, out=gated)
        ops.linear(gated, self.matrix[: gated.shape[1]], out=y)
        return [first, self.qkv, self.cache, self.attended, self.residual, normed, gated, y]


@pytest.mark.parametrize(("tokens", "decodes"), [(1, 0), (40, 0), (57, 7)])
def test_alike_layers_are_checked_once_and_computed_each(ops: CudaOps, tokens: int, decodes: int) -> None:
    layers = [Layer(tokens, decodes) for _ in range(4)]
    before = [[x.clone() for x in (layer.qkv, layer.cache, layer.residual)] for layer in layers]
    want = [[x.clone() for x in layer.run(ops)] for layer in layers]
    for layer, old in zip(layers, before):
        for x, was in zip((layer.qkv, layer.cache, layer.residual), old):
            x.copy_(was)
        layer.attended.fill_(NAN)
    same = alike(ops)
    assert isinstance(same, AlikeOps)
    for layer, expected in zip(layers, want):
        for got, exact in zip(layer.run(same), expected):
            assert torch.equal(got, exact)


@pytest.mark.parametrize("contexts", [[15], [500], [1, 16, 130, 63, 2000]])
def test_decode_attention_overlaps_the_store_before_it(ops: CudaOps, contexts: list[int]) -> None:
    """It reads old tokens while the newest is still computed and stored: step by step as with full stops between."""
    hq, hkv, d, width, num_seqs, steps = 8, 2, 64, 512, len(contexts), 40
    bf16, table_width = torch.bfloat16, -(-(max(contexts) + steps) // 16)
    layers = [
        (randn((hq + 2 * hkv) * d, width, dtype=bf16), randn(width, hq * d, dtype=bf16) / 20, randn(d, dtype=bf16))
        for _ in range(4)
    ]
    tables = torch.randperm(num_seqs * table_width, device="cuda").to(torch.int32).view(num_seqs, table_width)
    start = randn(len(layers), 2, num_seqs * table_width, 16, hkv, d, dtype=bf16)
    cos_sin, first = torch.rand(table_width * 16, d, device="cuda"), randn(num_seqs, width, dtype=bf16)
    cache, x = start.clone(), first.clone()
    qkv, attended = (torch.empty(num_seqs, n * d, dtype=bf16, device="cuda") for n in (hq + 2 * hkv, hq))
    q, k, v = (part.unflatten(1, (-1, d)) for part in qkv.split([hq * d, hkv * d, hkv * d], dim=1))
    lens, positions, slots = (torch.empty(num_seqs, dtype=t, device="cuda") for t in (torch.int32, *[torch.int64] * 2))

    def forward(any_ops: CudaOps, between: Callable[[], None] = lambda: None) -> None:
        x.copy_(first)
        for (w_qkv, w_out, norm), layer in zip(layers, cache):
            any_ops.linear(x, w_qkv, out=qkv)
            any_ops.norm_rope_store(q, k, v, norm, norm, 1e-6, positions, cos_sin, *layer, slots)
            between()
            any_ops.paged_decode_attention(q, *layer, tables, lens, 0.125, attended.view(q.shape))
            between()
            any_ops.linear(attended, w_out, out=x)

    def run(step: Callable[[], None]) -> list[Tensor]:
        cache.copy_(start)
        lens.copy_(torch.tensor(contexts))
        results = []
        for _ in range(steps):
            positions.copy_(lens - 1)
            slots.copy_(tables.gather(1, positions[:, None] // 16)[:, 0] * 16 + positions % 16)
            step()
            results.append(x.clone())
            lens.add_(1)
        return [*results, cache.clone()]

    expected = run(lambda: forward(ops, torch.cuda.synchronize))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(alike(ops))
    for step in (graph.replay, lambda: forward(alike(ops))):
        assert all(torch.equal(got, exact) for got, exact in zip(run(step), expected, strict=True))


def test_the_first_of_alike_calls_is_checked(ops: CudaOps) -> None:
    x = randn(3, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedShapeError, match="out is"):
        alike(ops).silu_mul(x, out=x)
    with pytest.raises(UnsupportedShapeError, match="cpu"):
        alike(ops).rms_norm(x, torch.ones(64).bfloat16(), 1e-6, out=torch.empty_like(x))
    with pytest.raises(UnsupportedShapeError, match="16 bytes"):
        odd = torch.zeros(3 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(3, 64)
        alike(ops).rms_norm(x, x[0], 1e-6, out=odd)


# --- the whole set -------------------------------------------------------------------------------------------------


def test_random_ragged_sizes(ops: CudaOps) -> None:
    rng = random.Random(1)
    for _ in range(20):
        tokens, hkv, d = rng.randint(1, 300), rng.randint(1, 6), rng.choice([64, 96, 128, 256])
        block_size, group = rng.choice([8, 16, 24, 32]), rng.randint(1, 8)
        _, _, k, v = fused_qkv(tokens, hkv * group, hkv, d, torch.bfloat16)
        cache = torch.full((2, 2, 64, block_size, hkv, d), NAN, dtype=torch.bfloat16, device="cuda")
        expected = cache.clone()
        slots = torch.randperm(64 * block_size, device="cuda")[:tokens]
        ops.store_kv(k, v, cache[1, 0], cache[1, 1], slots)
        ReferenceOps().store_kv(k, v, expected[1, 0], expected[1, 1], slots)
        ids = torch.randperm(64, device="cuda")[: rng.randint(1, 64)]
        assert torch.equal(bits(cache), bits(expected))
        assert torch.equal(bits(ops.gather_blocks(cache, ids)), bits(ReferenceOps().gather_blocks(expected, ids)))


def test_no_tokens_is_no_launch(ops: CudaOps) -> None:
    _, q, k, v = fused_qkv(0, 2, 1, 64, torch.bfloat16)
    cache = torch.zeros(1, 2, 4, 8, 1, 64, dtype=torch.bfloat16, device="cuda")
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    ops.store_kv(k, v, cache[0, 0], cache[0, 1], none)
    ops.copy_blocks(cache, none, none)
    ops.transfer_blocks(cache, cache, none, none)
    assert ops.gather_blocks(cache, none).numel() == 0
    ops.rope(q, k, none, torch.zeros(4, 64, device="cuda"))
    assert ops.rms_norm(q, torch.ones(64, dtype=torch.bfloat16, device="cuda"), 1e-6).shape == q.shape
    assert ops.silu_mul(torch.empty(0, 16, dtype=torch.bfloat16, device="cuda")).shape == (0, 8)
    torch.cuda.synchronize()


def test_one_graph_captures_every_op(ops: CudaOps) -> None:
    """Captured once, replayed on new contents, compared with the same calls made eagerly."""
    tokens, hq, hkv, d = 5, 4, 2, 64
    qkv, q, k, v = fused_qkv(tokens, hq, hkv, d, torch.bfloat16)
    cache = torch.zeros(1, 2, 8, 16, hkv, d, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(tokens, device="cuda") + 16
    positions = torch.arange(tokens, device="cuda")
    tables = torch.tensor([[1]] * tokens, dtype=torch.int32, device="cuda")
    lens = torch.arange(1, tokens + 1, dtype=torch.int32, device="cuda")
    cos_sin = torch.rand(64, d, device="cuda")
    weight = randn(hq * d, dtype=torch.bfloat16)
    src, dst = torch.tensor([1], device="cuda"), torch.tensor([3], device="cuda")

    def step() -> list[Tensor]:
        ops.rope(q, k, positions, cos_sin)
        ops.store_kv(k, v, cache[0, 0], cache[0, 1], slots)
        attended = ops.paged_decode_attention(q, cache[0, 0], cache[0, 1], tables, lens, 0.125)
        normed, total = ops.rms_norm(attended.view(tokens, -1), weight, 1e-6, q.reshape(tokens, -1).contiguous())
        ops.copy_blocks(cache, src, dst)
        return [attended, normed, total, ops.silu_mul(normed), ops.gather_blocks(cache, dst)]

    fresh = randn(*qkv.shape, dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles and loads outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    qkv.copy_(fresh)
    graph.replay()
    replayed = [x.clone() for x in captured]
    qkv.copy_(fresh)
    for ours, eager in zip(replayed, step()):
        assert torch.equal(ours, eager)


def test_ops_follow_the_current_stream(ops: CudaOps) -> None:
    """On a side stream, behind a long kernel there: a launch on the wrong stream would read zeros."""
    x = torch.zeros(64, 2 * 1024, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(1.0)
        y = ops.silu_mul(x)
    side.synchronize()
    assert_rounded(y, torch.full_like(y, 1 / (1 + torch.exp(torch.tensor(-1.0)).item())).double(), slack=1e-2)


def test_unsupported_shapes_raise_before_launch(ops: CudaOps) -> None:
    with pytest.raises(UnsupportedShapeError, match="float32"):
        ops.silu_mul(torch.zeros(2, 16, device="cuda"))
    with pytest.raises(UnsupportedShapeError, match="12"):
        ops.silu_mul(torch.zeros(2, 24, dtype=torch.bfloat16, device="cuda"))
    with pytest.raises(UnsupportedShapeError, match="cpu"):
        ops.silu_mul(torch.zeros(2, 16, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedShapeError, match="16 bytes"):
        odd = torch.zeros(2 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(2, 1, 64)
        cache = torch.zeros(4, 8, 1, 64, dtype=torch.bfloat16, device="cuda")
        ops.store_kv(odd, odd, cache, cache, torch.zeros(2, dtype=torch.int64, device="cuda"))
    with pytest.raises(UnsupportedShapeError, match="40"):
        heads = torch.zeros(2, 1, 40, dtype=torch.bfloat16, device="cuda")
        ops.rope(heads, heads, torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(4, 40, device="cuda"))
    torch.cuda.synchronize()  # nothing is left broken


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_while_the_first_is_current() -> None:
    other = get_ops("cuda:1")
    x = torch.randn(4, 64, device="cuda:1").bfloat16()
    assert torch.cuda.current_device() == 0
    assert_rounded(other.silu_mul(x), ReferenceOps().silu_mul(x.double()))
    q, cache = (torch.randn(s, device="cuda:1").bfloat16() for s in ((100, 4, 64), (2, 7, 16, 2, 64)))
    tables = torch.arange(7, dtype=torch.int32, device="cuda:1").unsqueeze(0)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device="cuda:1") for x in ([0, 100], [100]))
    exact = ReferenceOps().paged_prefill_attention(q.double(), *cache.double(), tables, starts, lens, 100, 0.125)
    for kernel in ("tiled", "wgmma") if other.attention.has_wgmma else ("tiled",):
        got = other.attention.prefill(q, *cache, tables, starts, lens, 100, 0.125, kernel=kernel)
        torch.testing.assert_close(got.double(), exact, rtol=2e-2, atol=2e-2)
