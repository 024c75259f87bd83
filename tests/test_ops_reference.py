"""ReferenceOps against an independent oracle: dense float64 attention, positions looked up one by one."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanopd.errors import CudaUnavailableError, UnsupportedShapeError
from nanopd.ops import get_ops
from nanopd.ops.alike import alike
from nanopd.ops.reference import ReferenceOps, _decode_groups

OPS = ReferenceOps()
F64 = torch.float64  # the oracle's dtype


class PagedBatch:
    """Random ragged sequences in a paged cache whose every unused slot holds NaN.

    ``keys[s]``, ``values[s]`` are the dense [context, Hkv, D] originals that the oracle reads.
    """

    def __init__(self, contexts: list[int], chunks: list[int], hkv: int, group: int, head_dim: int, block_size: int):
        rng = random.Random(f"{contexts}{chunks}{hkv}{group}{head_dim}{block_size}")
        gen = torch.Generator().manual_seed(rng.randrange(2**31))
        self.contexts, self.chunks = contexts, chunks
        blocks = [math.ceil(c / block_size) for c in contexts]
        pool = list(range(sum(blocks) + 3))
        rng.shuffle(pool)
        shape = (len(pool), block_size, hkv, head_dim)
        self.k_cache = torch.full(shape, float("nan"), dtype=F64)
        self.v_cache = torch.full(shape, float("nan"), dtype=F64)
        self.block_tables = torch.zeros(len(contexts), max([1, *blocks]), dtype=torch.int32)
        self.keys, self.values = [], []
        for s, context in enumerate(contexts):
            mine = [pool.pop() for _ in range(blocks[s])]
            self.block_tables[s, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            key = torch.randn(context, hkv, head_dim, dtype=F64, generator=gen)
            value = torch.randn(context, hkv, head_dim, dtype=F64, generator=gen)
            for position in range(context):
                block, offset = mine[position // block_size], position % block_size
                self.k_cache[block, offset] = key[position]
                self.v_cache[block, offset] = value[position]
            self.keys.append(key)
            self.values.append(value)
        self.q = torch.randn(sum(chunks), hkv * group, head_dim, dtype=F64, generator=gen)
        self.context_lens = torch.tensor(contexts, dtype=torch.int32)
        self.cu_seqlens_q = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)

    def oracle(self, scale: float) -> Tensor:
        """Row by row, head by head."""
        out = torch.zeros_like(self.q)
        row = 0
        for s, (context, chunk) in enumerate(zip(self.contexts, self.chunks)):
            for i in range(chunk):
                visible = context - chunk + i + 1
                for head in range(self.q.shape[1]):
                    if visible > 0:
                        kv_head = head * self.keys[s].shape[1] // self.q.shape[1]
                        scores = self.keys[s][:visible, kv_head] @ self.q[row, head] * scale
                        weights = torch.exp(scores - scores.max())
                        out[row, head] = (weights / weights.sum()) @ self.values[s][:visible, kv_head]
                row += 1
        return out


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([64, 96]), st.sampled_from([8, 16, 32]))


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.lists(st.integers(0, 70), min_size=1, max_size=6))
def test_decode_matches_dense_attention(shape: tuple[int, int, int, int], contexts: list[int]) -> None:
    batch = PagedBatch(contexts, [1] * len(contexts), *shape)
    out = torch.full_like(batch.q, float("nan"))
    result = OPS.paged_decode_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, 0.2, out
    )
    assert result.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, batch.oracle(0.2), rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=4))
def test_prefill_matches_dense_attention(shape: tuple[int, int, int, int], parts: list[tuple[int, int]]) -> None:
    chunks = [chunk for chunk, _ in parts]
    batch = PagedBatch([chunk + prefix for chunk, prefix in parts], chunks, *shape)
    out = torch.full_like(batch.q, float("nan"))
    OPS.paged_prefill_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.cu_seqlens_q, batch.context_lens,
        max(chunks), 0.2, out,
    )  # fmt: skip
    torch.testing.assert_close(out, batch.oracle(0.2), rtol=1e-10, atol=1e-10)


def test_prefill_of_many_query_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanopd.ops.reference._QUERY_TILE", 7)
    batch = PagedBatch([45, 40], [30, 40], 1, 2, 64, 8)
    result = OPS.paged_prefill_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, 40, 0.2
    )
    torch.testing.assert_close(result, batch.oracle(0.2), rtol=1e-10, atol=1e-10)


def test_prefill_of_empty_context_gives_zeros() -> None:
    batch = PagedBatch([0, 5], [2, 5], 1, 1, 64, 8)
    result = OPS.paged_prefill_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, 5, 0.2
    )
    assert (result[:2] == 0).all()
    assert not result.isnan().any()


@given(st.lists(st.integers(0, 20_000), max_size=30))
def test_decode_groups_cover_the_batch_in_order(lens: list[int]) -> None:
    groups = list(_decode_groups(lens))
    assert [b for start, stop, _ in groups for b in range(start, stop)] == list(range(len(lens)))
    for start, stop, longest in groups:
        assert longest == max(lens[start:stop])
        assert longest == 0 or min(lens[start:stop]) > 0
        assert stop - start == 1 or (stop - start) * longest <= 2 * sum(lens[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_stays_close_to_float64(dtype: torch.dtype) -> None:
    batch = PagedBatch([33, 7, 64], [1, 1, 1], 3, 3, 64, 16)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    args = [x.to(dtype) for x in (batch.q, batch.k_cache, batch.v_cache)]
    result = OPS.paged_decode_attention(*args, batch.block_tables, batch.context_lens, 0.125)
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), batch.oracle(0.125), rtol=tolerance, atol=tolerance)


def test_attention_reads_strided_query_rows() -> None:
    batch = PagedBatch([20, 3], [1, 1], 2, 2, 64, 8)
    fused = torch.full((2, 8 * 64), float("nan"), dtype=F64)
    q = fused[:, : 4 * 64].view(2, 4, 64)
    q.copy_(batch.q)
    result = OPS.paged_decode_attention(q, batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, 0.2)
    assert result.is_contiguous()
    torch.testing.assert_close(result, batch.oracle(0.2), rtol=1e-10, atol=1e-10)


def test_store_kv_writes_its_slots_and_nothing_else() -> None:
    fused = torch.randn(5, 6 * 64, dtype=F64)
    k, v = fused[:, 128:256].view(5, 2, 64), fused[:, 256:].view(5, 2, 64)
    k_cache = torch.full((4, 8, 2, 64), float("nan"), dtype=F64)
    v_cache = k_cache.clone()
    slots = [17, -1, 3, 31, -1]
    OPS.store_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        flat = cache.view(32, 2, 64)
        for token, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(flat[slot], rows[token])
        untouched = [slot for slot in range(32) if slot not in slots]
        assert flat[untouched].isnan().all()


def test_block_copies() -> None:
    cache = torch.randn(3, 2, 10, 8, 2, 64)
    before = cache.clone()
    ids = torch.tensor([7, 2, 9])
    staging = OPS.gather_blocks(cache, ids)
    for i, block in enumerate([7, 2, 9]):
        assert torch.equal(staging[:, :, i], before[:, :, block])
    out = torch.full_like(staging, float("nan"))
    assert OPS.gather_blocks(cache, ids, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, staging)
    target = torch.zeros_like(cache)
    OPS.scatter_blocks(staging, target, ids)
    assert torch.equal(target[:, :, ids], before[:, :, ids])
    assert (target[:, :, [0, 1, 3, 4, 5, 6, 8]] == 0).all()
    OPS.copy_blocks(cache, torch.tensor([1, 1]), torch.tensor([0, 5]))
    assert torch.equal(cache[:, :, 0], before[:, :, 1]) and torch.equal(cache[:, :, 5], before[:, :, 1])
    assert torch.equal(cache[:, :, [1, 2, 3, 4, 6, 7, 8, 9]], before[:, :, [1, 2, 3, 4, 6, 7, 8, 9]])


def test_transfer_between_pools_of_different_sizes() -> None:
    source, destination = torch.randn(3, 2, 10, 8, 2, 64), torch.randn(3, 2, 4, 8, 2, 64)
    before = destination.clone()
    kept = source.clone()
    OPS.transfer_blocks(source, destination, torch.tensor([9, 0]), torch.tensor([0, 3]))
    assert torch.equal(source, kept)
    for block, expected in enumerate((kept[:, :, 9], before[:, :, 1], before[:, :, 2], kept[:, :, 0])):
        assert torch.equal(destination[:, :, block], expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 2, 4, 8, 1, 64), torch.float32, r"\(3, 2, 10, 8, 2, 64\).*\(3, 2, 4, 8, 1, 64\).*num_blocks"),
        ((2, 2, 4, 8, 2, 64), torch.float32, "num_blocks"),
        ((3, 2, 4, 8, 2, 64), torch.bfloat16, "float32.*bfloat16"),
        ((3, 1, 4, 8, 2, 64), torch.float32, "destination has shape"),
    ],
)
def test_transfer_between_unlike_pools_is_refused(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    source, ids = torch.zeros(3, 2, 10, 8, 2, 64), torch.tensor([1])
    with pytest.raises(UnsupportedShapeError, match=message):
        OPS.transfer_blocks(source, torch.zeros(shape, dtype=dtype), ids, ids)
    with pytest.raises(UnsupportedShapeError, match=r"destination_blocks.*\[1\]"):
        OPS.transfer_blocks(source, source.clone(), ids, torch.tensor([1, 2]))


def test_a_prepared_transfer_is_refused_at_once_and_moves_only_when_it_is_called() -> None:
    source, destination, ids = torch.randn(3, 2, 5, 8, 2, 64), torch.zeros(3, 2, 4, 8, 2, 64), torch.tensor([1])
    enqueue = OPS.prepare_transfer_blocks(source, destination, ids, ids)
    assert not destination.any()
    enqueue()
    assert torch.equal(destination[:, :, 1], source[:, :, 1])
    with pytest.raises(UnsupportedShapeError, match=r"destination_blocks.*\[1\]"):
        OPS.prepare_transfer_blocks(source, destination, ids, torch.tensor([1, 2]))


def test_rms_norm_by_hand() -> None:
    x, weight, residual = torch.randn(4, 96, dtype=F64), torch.randn(96, dtype=F64), torch.randn(4, 96, dtype=F64)

    def expected(rows: Tensor) -> Tensor:
        return torch.stack([r / math.sqrt(sum(float(v) ** 2 for v in r) / 96 + 1e-5) * weight for r in rows])

    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), expected(x), rtol=1e-12, atol=1e-12)
    before = x.clone()
    normed, total = OPS.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, before + residual) and torch.equal(x, before)
    torch.testing.assert_close(normed, expected(before + residual), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_outputs_take_the_same_values(dtype: torch.dtype) -> None:
    x, residual, weight, gate_up = (torch.randn(*s).to(dtype) for s in ((4, 96), (4, 96), (96,), (64, 96)))
    bias, nan = torch.randn(64).to(dtype), float("nan")
    for b in (None, bias):
        out = torch.full((4, 64), nan, dtype=dtype)
        assert OPS.linear(x, gate_up, b, out=out) is out
        assert torch.equal(out, OPS.linear(x, gate_up, b))
    half = torch.full((4, 32), nan, dtype=dtype)
    assert OPS.gated_linear(x, gate_up, out=half) is half
    assert torch.equal(half, OPS.gated_linear(x, gate_up))
    assert torch.equal(OPS.silu_mul(out, out=half), OPS.silu_mul(out))

    normed = torch.full((4, 96), nan, dtype=dtype)
    assert OPS.rms_norm(x, weight, 1e-6, out=normed) is normed
    assert torch.equal(normed, OPS.rms_norm(x, weight, 1e-6))
    want, total = OPS.rms_norm(x, weight, 1e-6, residual)
    assert OPS.rms_norm(x, weight, 1e-6, residual, out=normed, total=residual)[1] is residual  # in place
    assert torch.equal(normed, want) and torch.equal(residual, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_ops_around_a_linear_layer_are_their_parts(dtype: torch.dtype, tokens: int) -> None:
    x, total = torch.randn(tokens, 96).to(dtype), torch.randn(tokens, 64).to(dtype)
    norm, weight, bias = (torch.randn(*s).to(dtype) for s in ((96,), (64, 96), (64,)))
    normed = OPS.rms_norm(x, norm, 1e-5)
    out, half = (torch.full((tokens, n), float("nan"), dtype=dtype) for n in (64, 32))
    for b in (None, bias):
        assert OPS.norm_linear(x, norm, 1e-5, weight, b, out=out) is out
        assert torch.equal(out, OPS.linear(normed, weight, b))
        assert torch.equal(out, OPS.norm_linear(x, norm, 1e-5, weight, b))
    assert OPS.norm_gated_linear(x, norm, 1e-5, weight, out=half) is half
    assert torch.equal(half, OPS.gated_linear(normed, weight))
    want = total + OPS.linear(x, weight)
    assert OPS.add_linear(total, x, weight) is total
    assert torch.equal(total, want)
    for wrong in (total[:, :32], torch.zeros(tokens + 1, 64, dtype=dtype), torch.zeros(tokens, 64).double()):
        with pytest.raises(UnsupportedShapeError, match="total is"):
            OPS.add_linear(wrong, x, weight)


def test_linear_layers_refuse_what_does_not_fit() -> None:
    x, norm, weight, total = torch.zeros(2, 96), torch.zeros(96), torch.zeros(64, 96), torch.zeros(2, 64)
    for wrong, message in ((weight[:, :95], "weight"), (weight.double(), "weight is"), (weight[0], r"weight \(96,\)")):
        with pytest.raises(UnsupportedShapeError, match=message):
            OPS.linear(x, wrong)
        with pytest.raises(UnsupportedShapeError, match=message):
            OPS.norm_linear(x, norm, 1e-6, wrong)
        with pytest.raises(UnsupportedShapeError, match=message):
            OPS.norm_gated_linear(x, norm, 1e-6, wrong)
    for wrong in (weight[:, :95], weight.double()):
        with pytest.raises(UnsupportedShapeError, match="weight"):
            OPS.add_linear(total, x, wrong)
    for bias in (torch.zeros(1), torch.zeros(2, 64), torch.zeros(64).double(), torch.zeros(128)[::2]):
        for op in (OPS.linear, lambda *args: OPS.norm_linear(args[0], norm, 1e-6, *args[1:])):
            with pytest.raises(UnsupportedShapeError, match="bias is"):
                op(x, weight, bias)
    with pytest.raises(UnsupportedShapeError, match="gate_up"):
        OPS.norm_gated_linear(x, norm, 1e-6, weight[:63])
    with pytest.raises(UnsupportedShapeError, match="weight must have"):
        OPS.norm_linear(x, norm[:95], 1e-6, weight)


def test_given_outputs_of_another_shape_or_dtype_are_refused() -> None:
    x, weight = torch.zeros(4, 96), torch.zeros(96)
    for out in (torch.zeros(3, 96), torch.zeros(4, 96).half(), torch.zeros(96, 4).T):
        for name in ("out", "total"):
            with pytest.raises(UnsupportedShapeError, match=rf"{name} is .*contiguous torch.float32 \(4, 96\)"):
                OPS.rms_norm(x, weight, 1e-6, x, **{name: out})
        with pytest.raises(UnsupportedShapeError, match="out is"):
            OPS.linear(x, torch.zeros(96, 96), out=out)
        with pytest.raises(UnsupportedShapeError, match="out is"):
            OPS.gated_linear(x, torch.zeros(192, 96), out=out)
    with pytest.raises(UnsupportedShapeError, match="without a residual"):
        OPS.rms_norm(x, weight, 1e-6, total=x)  # type: ignore[call-overload]


def test_rms_norm_takes_strided_heads() -> None:
    fused = torch.randn(5, 6 * 64)
    heads = fused[:, 64:192].view(5, 2, 64)
    weight = torch.randn(64)
    torch.testing.assert_close(OPS.rms_norm(heads, weight, 1e-6), OPS.rms_norm(heads.contiguous(), weight, 1e-6))


def test_rope_turns_pairs_by_their_angle() -> None:
    tokens, half = 6, 32
    fused = torch.randn(tokens, 4 * 64, dtype=F64)
    q, k = fused[:, :128].view(tokens, 2, 64), fused[:, 128:192].view(tokens, 1, 64)
    before = fused.clone()
    positions = torch.tensor([0, 5, 1, 9, 9, 3])
    angles = torch.outer(torch.arange(10, dtype=F64), 10000 ** (-torch.arange(half, dtype=F64) / half))
    OPS.rope(q, k, positions, torch.cat([angles.cos(), angles.sin()], dim=1))
    for x, start in ((q, 0), (k, 128)):
        old = before[:, start : start + x.shape[1] * 64].view(tokens, -1, 64)
        rotation = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
        turned = torch.complex(old[..., :half], old[..., half:]) * rotation
        torch.testing.assert_close(x, torch.cat([turned.real, turned.imag], dim=-1), rtol=1e-12, atol=1e-12)
    assert torch.equal(fused[:, 192:], before[:, 192:])


def test_silu_mul_by_hand() -> None:
    x = torch.randn(3, 10, dtype=F64)
    expected = x[:, :5] / (1 + torch.exp(-x[:, :5])) * x[:, 5:]
    torch.testing.assert_close(OPS.silu_mul(x), expected, rtol=1e-12, atol=1e-12)
    half = x.bfloat16()
    torch.testing.assert_close(OPS.silu_mul(half).double(), OPS.silu_mul(half.double()), rtol=5e-3, atol=1e-6)


def test_unsupported_arguments_name_value_and_limit() -> None:
    cache = torch.zeros(4, 12, 2, 64)
    k = torch.zeros(3, 2, 64)
    with pytest.raises(UnsupportedShapeError, match=r"block size 12 .* multiple of 8"):
        OPS.store_kv(k, k, cache, cache, torch.zeros(3, dtype=torch.int64))
    cache = torch.zeros(4, 8, 2, 64)
    with pytest.raises(UnsupportedShapeError, match=r"torch.int32.*torch.int64"):
        OPS.store_kv(k, k, cache, cache, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(UnsupportedShapeError, match=r"bfloat16.*float32"):
        OPS.store_kv(k.bfloat16(), k, cache, cache, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UnsupportedShapeError, match=r"3 query heads.*2 key"):
        tables = torch.zeros(3, 1, dtype=torch.int32)
        OPS.paged_decode_attention(torch.zeros(3, 3, 64), cache, cache, tables, torch.ones(3, dtype=torch.int32), 1.0)
    with pytest.raises(UnsupportedShapeError, match="2 rows for 3 sequences"):
        tables = torch.zeros(2, 1, dtype=torch.int32)
        OPS.paged_decode_attention(torch.zeros(3, 2, 64), cache, cache, tables, torch.ones(3, dtype=torch.int32), 1.0)


def test_only_cuda_ops_skip_checks() -> None:
    assert alike(OPS) is OPS


def test_get_ops() -> None:
    assert get_ops("cpu").name == "reference"
    if not torch.cuda.is_available():
        with pytest.raises(CudaUnavailableError, match="sees no CUDA GPU"):
            get_ops("cuda")
    with pytest.raises(UnsupportedShapeError, match="meta"):
        get_ops("meta")


@pytest.mark.parametrize("size", [96, 97])
@pytest.mark.parametrize("rows", range(11))
def test_linear_layers_of_few_rows(rows: int, size: int) -> None:
    """Float32 on the CPU takes another way for few rows; float64 does not."""
    x, weight, bias = torch.randn(rows, 200), torch.randn(size, 200), torch.randn(size)
    for b in (None, bias):
        expected = x.double() @ weight.double().T + (0 if b is None else b.double())
        out = torch.full((rows, size), float("nan"))
        assert OPS.linear(x, weight, b, out=out) is out
        for got in (out, OPS.linear(x, weight, b), OPS.linear(x, weight.T.contiguous().T, b)):
            assert got.is_contiguous() or rows < 2
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 24), (2, 24), (9, 24), (3, 5, 24), (9, 5, 24)], ids=str)
def test_few_rows_are_an_operator_like_any_other(shape: tuple[int, ...]) -> None:
    """With gradients, and for batches of rows, as more rows have them."""
    x, weight = torch.randn(shape), torch.randn(16, 24, requires_grad=True)
    got = OPS.linear(x, weight)
    torch.testing.assert_close(got, x @ weight.T, rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(got.sum(), weight)
    torch.testing.assert_close(grad, x.reshape(-1, 24).sum(0).expand(16, 24), rtol=1e-4, atol=1e-4)
