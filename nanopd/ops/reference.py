"""The kernels in plain PyTorch: what serves on a CPU, and what the CUDA kernels are tested against.

It favours few, large torch calls over clever ones. On a CPU a decode step of a small model is bound by reading the
weights, so what matters here is not to add much to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopd.ops import checks
from nanopd.ops.linear import linear_into

# Queries per SDPA call in a prefill with a cached prefix. Bounds the mask to _QUERY_TILE x context values.
_QUERY_TILE = 512

# Decodes are attended to in groups of neighbours, padded to the group's longest context. A group holds at most
# _GROUP_TOKENS padded tokens (what it gathers should stay in the CPU's cache) and _MAX_PADDING times its real tokens.
_GROUP_TOKENS = 8192
_MAX_PADDING = 2.0

# Up to so many rows a float32 product on a CPU is computed the other way round, W x^T: MKL takes up to four times as
# long for x W^T, and for a single row it uses one core only, unless W comes in two halves.
_FEW_ROWS = 8


class ReferenceOps:
    """Every op of ``nanopd.ops.interface.Ops`` on any device; bfloat16, float16, float32 and float64.

    Sums run in float32, or float64 for float64 inputs, which makes it the oracle of the tests. On a GPU it reads
    lengths back to the host, so it cannot be captured into a CUDA graph.
    """

    name = "reference"

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        checks.store_kv(k, v, k_cache, v_cache, slot_mapping)
        if slot_mapping.numel() == 0:
            return
        if int(slot_mapping.min()) < 0:
            kept = (slot_mapping >= 0).nonzero().flatten()
            k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
        k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, k)
        v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, v)

    def paged_decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        checks.decode_attention(q, k_cache, v_cache, block_tables, context_lens, out)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        for start, stop, longest in _decode_groups(context_lens.tolist()):
            rows = slice(start, stop)
            if longest == 0:
                out[rows].zero_()
            else:
                group = (q[rows], k_cache, v_cache, block_tables[rows], context_lens[rows])
                out[rows] = _decode_padded(*group, longest, scale)
        return out

    def paged_prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        max_seqlen_q: int,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        checks.prefill_attention(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, out)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        bounds = cu_seqlens_q.tolist()
        for s, length in enumerate(context_lens.tolist()):
            rows = slice(bounds[s], bounds[s + 1])
            if length == 0:
                out[rows].zero_()
            elif rows.stop > rows.start:
                slots = _slots_of(block_tables[s : s + 1], length, k_cache.shape[1]).flatten()
                _attend_causally(q[rows], _take(k_cache, slots), _take(v_cache, slots), scale, out[rows])
        return out

    def copy_blocks(self, kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
        checks.copy_blocks(kv_cache, src, dst)
        kv_cache[:, :, dst] = kv_cache[:, :, src]

    def transfer_blocks(
        self, source: Tensor, destination: Tensor, source_blocks: Tensor, destination_blocks: Tensor
    ) -> None:
        checks.transfer_blocks(source, destination, source_blocks, destination_blocks)
        destination[:, :, destination_blocks] = source[:, :, source_blocks]

    def prepare_transfer_blocks(
        self, source: Tensor, destination: Tensor, source_blocks: Tensor, destination_blocks: Tensor
    ) -> Callable[[], object]:
        checks.transfer_blocks(source, destination, source_blocks, destination_blocks)
        return partial(self.transfer_blocks, source, destination, source_blocks, destination_blocks)

    def gather_blocks(self, kv_cache: Tensor, block_ids: Tensor, out: Tensor | None = None) -> Tensor:
        checks.move_blocks(kv_cache, block_ids, out)
        if out is None:
            return kv_cache.index_select(2, block_ids)
        return torch.index_select(kv_cache, 2, block_ids, out=out)

    def scatter_blocks(self, staging: Tensor, kv_cache: Tensor, block_ids: Tensor) -> None:
        checks.move_blocks(kv_cache, block_ids, staging)
        kv_cache.index_copy_(2, block_ids, staging)

    @overload
    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: None = None, *, out: Tensor | None = None
    ) -> Tensor: ...

    @overload
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor,
        *,
        out: Tensor | None = None,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        *,
        out: Tensor | None = None,
        total: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        checks.rms_norm(x, weight, residual, out, total)
        summed = x if residual is None else torch.add(x, residual, out=total)
        wide = summed if summed.dtype == torch.float64 else summed.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        normed = (wide * scale).mul_(weight).to(x.dtype)
        normed = normed if out is None else out.copy_(normed)
        return normed if residual is None else (normed, summed)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        checks.rope(q, k, positions, cos_sin)
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, D/2]
        for x in (q, k):
            first, second = x.chunk(2, dim=-1)
            rotated_first = first * cos - second * sin
            second.copy_(second * cos + first * sin)
            first.copy_(rotated_first)

    def norm_rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        if q_norm is not None and k_norm is not None:
            q.copy_(self.rms_norm(q, q_norm, eps))
            k = self.rms_norm(k, k_norm, eps)
        self.rope(q, k, positions, cos_sin)
        self.store_kv(k, v, k_cache, v_cache, slot_mapping)
        return q

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        checks.linear(x, weight, bias, out)
        if x.dim() == 2 and 0 < x.shape[0] <= _FEW_ROWS and x.dtype is torch.float32 and x.device.type == "cpu":
            return _linear_of_few(x, weight, bias, out)
        return F.linear(x, weight, bias) if out is None else linear_into(out, x, weight, bias)

    def gated_linear(self, x: Tensor, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self.silu_mul(self.linear(x, gate_up), out=out)

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        return self.linear(self.rms_norm(x, norm, eps), weight, bias, out=out)

    def norm_gated_linear(
        self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        return self.gated_linear(self.rms_norm(x, norm, eps), gate_up, out=out)

    def add_linear(self, total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        checks.output(total, (x.shape[0], weight.shape[0]), x.dtype, "total")
        return total.add_(self.linear(x, weight))

    def silu_mul(self, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
        checks.silu_mul(gate_up, out)
        gate, up = gate_up.chunk(2, dim=-1)
        if gate_up.dtype in (torch.float32, torch.float64):
            return torch.mul(F.silu(gate), up, out=out)
        product = F.silu(gate.float()).mul_(up)
        return product.to(gate_up.dtype) if out is None else out.copy_(product)


def _linear_of_few(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """x [T, K] @ weight [N, K].T as weight @ x.T; returns [T, N], contiguous."""
    num_rows, size = x.shape[0], weight.shape[0]
    if num_rows == 1 and size % 2 == 0:
        column = x.t().expand(2, -1, 1)
        halves = None if out is None else out.view(2, size // 2, 1)
        product = torch.bmm(weight.unflatten(0, (2, -1)), column, out=halves)
        out = product.view(1, size) if out is None else out
    else:
        out = torch.empty((num_rows, size), dtype=x.dtype) if out is None else out
        out.copy_(torch.mm(weight, x.t()).t())
    return out if bias is None else out.add_(bias)


def _slots_of(block_tables: Tensor, length: int, block_size: int) -> Tensor:
    """Slot of each position below ``length``: [B, length] int64."""
    blocks = block_tables[:, : -(-length // block_size)].long()
    offsets = torch.arange(block_size, device=block_tables.device)
    return (blocks.unsqueeze(-1) * block_size + offsets).flatten(1)[:, :length]


def _take(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows ``slots`` [N] of one layer's keys or values: [N, Hkv, D]."""
    return cache.view(-1, *cache.shape[2:]).index_select(0, slots)


def _decode_groups(lens: list[int]) -> Iterator[tuple[int, int, int]]:
    """Split a decode batch into (start, stop, longest context). Empty contexts form groups of their own."""
    start = 0
    while start < len(lens):
        stop, longest, total = start + 1, lens[start], lens[start]
        while stop < len(lens) and (lens[stop] == 0) == (longest == 0):
            padded = (stop + 1 - start) * max(longest, lens[stop])
            if padded > min(_GROUP_TOKENS, _MAX_PADDING * (total + lens[stop])):
                break
            longest, total, stop = max(longest, lens[stop]), total + lens[stop], stop + 1
        yield start, stop, longest
        start = stop


def _decode_padded(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """Decode attention with every context padded to ``longest``; all context lengths are at least 1. [B, Hq, D]

    Padding repeats the sequence's own first token, because whatever lies in unused slots (NaN, perhaps) would
    survive a mask: 0 * NaN is NaN. The query heads that share a key head become rows of one small matrix product.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    slots = _slots_of(block_tables, longest, k_cache.shape[1])
    mask = None
    if batch > 1:
        valid = torch.arange(longest, device=q.device) < context_lens.unsqueeze(1)
        slots = torch.where(valid, slots, slots[:, :1])
        mask = torch.zeros(valid.shape, dtype=q.dtype, device=q.device).masked_fill_(~valid, float("-inf"))
        mask = mask.view(batch, 1, 1, longest)
    shape = (batch, longest, num_kv_heads, head_dim)
    k = _take(k_cache, slots.flatten()).view(shape).transpose(1, 2)
    v = _take(v_cache, slots.flatten()).view(shape).transpose(1, 2)
    grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return result.reshape(batch, num_heads, head_dim)


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
    """Causal attention of the last n of c positions. q, out: [n, Hq, D]; k, v: [c, Hkv, D].

    Query heads that share a key head are spread over the batch dimension, where k and v repeat without a copy.
    """
    num_queries, num_heads, head_dim = q.shape
    context, num_kv_heads = k.shape[0], k.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.reshape(num_queries, num_kv_heads, group, head_dim).permute(2, 1, 0, 3)  # [G, Hkv, n, D]
    result = out.view(num_queries, num_kv_heads, group, head_dim).permute(2, 1, 0, 3)
    k = k.transpose(0, 1).expand(group, -1, -1, -1)
    v = v.transpose(0, 1).expand(group, -1, -1, -1)
    if num_queries == context:
        result.copy_(F.scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scale))
        return
    prefix = context - num_queries
    positions = torch.arange(context, device=q.device)
    for start in range(0, num_queries, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, num_queries)
        visible = prefix + stop  # no query of this tile sees further
        hidden = positions[:visible] > positions[prefix + start : visible].unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        tile = grouped[:, :, start:stop]
        attended = F.scaled_dot_product_attention(
            tile, k[:, :, :visible], v[:, :, :visible], attn_mask=mask, scale=scale
        )
        result[:, :, start:stop] = attended
