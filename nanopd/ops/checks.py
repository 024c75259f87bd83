"""Argument checks that both implementations share: what a kernel would otherwise read out of bounds.

They compare sizes and strides only, never values, so that they cost about a microsecond and never wait for a GPU. That
ids and slots lie inside the cache is the block manager's promise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanopd.errors import UnsupportedShapeError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALARS = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # dtypes that CUDA kernels take, by their name in csrc
HEAD_DIMS = (64, 96, 128, 256)
BLOCK_SIZE_MULTIPLE = 8


def fail(message: str) -> UnsupportedShapeError:
    return UnsupportedShapeError(message)


def token_rows(name: str, x: Tensor, num_heads: int | None = None, head_dim: int | None = None) -> None:
    """``x`` is [T, H, D] with [H, D] contiguous; the token stride is free."""
    shape = x.shape
    if len(shape) != 3:
        raise fail(f"{name} has shape {tuple(shape)}; [tokens, heads, head_dim] is needed")
    if (num_heads is not None and shape[1] != num_heads) or (head_dim is not None and shape[2] != head_dim):
        raise fail(f"{name} has shape {tuple(shape)}; [tokens, {num_heads}, {head_dim}] is needed")
    stride = x.stride()
    if stride[2] != 1 or stride[1] != shape[2]:
        raise fail(f"{name} has strides {stride}; its last two dimensions must be contiguous")


def layer_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype is not v_cache.dtype:
        raise fail(
            f"k_cache {tuple(k_cache.shape)} {k_cache.dtype} and v_cache {tuple(v_cache.shape)} {v_cache.dtype} "
            "must both be [num_blocks, block_size, num_kv_heads, head_dim] of one dtype"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise fail("one layer's k_cache and v_cache must be contiguous")
    if k_cache.shape[1] % BLOCK_SIZE_MULTIPLE:
        raise fail(f"block size {k_cache.shape[1]} is not a multiple of {BLOCK_SIZE_MULTIPLE}")
    if k_cache.dtype not in FLOATS:
        raise fail(f"cache dtype {k_cache.dtype} is not supported; use one of {FLOATS}")


def same_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype is not dtype:
        raise fail(f"{name} is {x.dtype}, but the tensor it goes with is {dtype}")


def index(name: str, x: Tensor, dtype: torch.dtype, length: int) -> None:
    if x.dtype is not dtype or x.dim() != 1 or x.shape[0] != length:
        raise fail(f"{name} is {x.dtype} {tuple(x.shape)}; {dtype} [{length}] is needed")
    if length > 1 and x.stride(0) != 1:
        raise fail(f"{name} has stride {x.stride(0)}; it must be contiguous")


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    layer_cache(k_cache, v_cache)
    token_rows("k", k, k_cache.shape[2], k_cache.shape[3])
    token_rows("v", v, k_cache.shape[2], k_cache.shape[3])
    if v.shape[0] != k.shape[0]:
        raise fail(f"k has {k.shape[0]} tokens, v has {v.shape[0]}")
    same_dtype("k", k, k_cache.dtype)
    same_dtype("v", v, k_cache.dtype)
    index("slot_mapping", slot_mapping, torch.int64, k.shape[0])


def _attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, out: Tensor | None) -> None:
    layer_cache(k_cache, v_cache)
    token_rows("q", q, None, k_cache.shape[3])
    same_dtype("q", q, k_cache.dtype)
    if q.shape[1] % k_cache.shape[2]:
        raise fail(f"{q.shape[1]} query heads are not a multiple of {k_cache.shape[2]} key/value heads")
    if block_tables.dtype is not torch.int32 or block_tables.dim() != 2 or not block_tables.is_contiguous():
        shape = tuple(block_tables.shape)
        raise fail(f"block_tables is {block_tables.dtype} {shape}; contiguous int32 [sequences, max_blocks] is needed")
    output(out, q.shape, q.dtype)


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, out: Tensor | None
) -> None:
    _attention(q, k_cache, v_cache, block_tables, out)
    if block_tables.shape[0] != q.shape[0]:
        raise fail(f"block_tables has {block_tables.shape[0]} rows for {q.shape[0]} sequences")
    index("context_lens", context_lens, torch.int32, q.shape[0])


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    out: Tensor | None,
) -> None:
    _attention(q, k_cache, v_cache, block_tables, out)
    num_seqs = block_tables.shape[0]
    index("context_lens", context_lens, torch.int32, num_seqs)
    index("cu_seqlens_q", cu_seqlens_q, torch.int32, num_seqs + 1)


def whole_cache(kv_cache: Tensor, name: str = "kv_cache") -> None:
    if kv_cache.dim() != 6 or kv_cache.shape[1] != 2 or not kv_cache.is_contiguous():
        raise fail(
            f"{name} has shape {tuple(kv_cache.shape)}; contiguous "
            "[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim] is needed"
        )


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    whole_cache(kv_cache)
    index("src", src, torch.int64, src.numel())
    index("dst", dst, torch.int64, src.numel())


def transfer_blocks(source: Tensor, destination: Tensor, source_blocks: Tensor, destination_blocks: Tensor) -> None:
    whole_cache(source, "source")
    whole_cache(destination, "destination")
    layouts = [(x.dtype, *x.shape[:2], *x.shape[3:]) for x in (source, destination)]
    if layouts[0] != layouts[1]:
        raise fail(
            f"source is {source.dtype} {tuple(source.shape)}, destination {destination.dtype}"
            f" {tuple(destination.shape)}; only num_blocks (the third size) may differ"
        )
    if source.device != destination.device:
        raise fail(f"source lies on {source.device}, destination on {destination.device}; one device is needed")
    index("source_blocks", source_blocks, torch.int64, source_blocks.numel())
    index("destination_blocks", destination_blocks, torch.int64, source_blocks.numel())


def move_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor | None) -> None:
    whole_cache(kv_cache)
    index("block_ids", block_ids, torch.int64, block_ids.numel())
    if staging is None:
        return
    shape = (*kv_cache.shape[:2], block_ids.shape[0], *kv_cache.shape[3:])
    if staging.shape != shape or staging.dtype is not kv_cache.dtype or not staging.is_contiguous():
        raise fail(f"staging is {staging.dtype} {tuple(staging.shape)}; contiguous {kv_cache.dtype} {shape} is needed")


def output(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, name: str = "out") -> None:
    if out is not None and (out.shape != shape or out.dtype is not dtype or not out.is_contiguous()):
        raise fail(f"{name} is {out.dtype} {tuple(out.shape)}; contiguous {dtype} {tuple(shape)} is needed")


def rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    if x.dim() < 1 or weight.shape != x.shape[-1:] or x.stride(-1) != 1:
        raise fail(
            f"x {tuple(x.shape)} with strides {x.stride()} and weight {tuple(weight.shape)}: "
            "weight must have x's last size, and that dimension of x must be contiguous"
        )
    same_dtype("weight", weight, x.dtype)
    if residual is not None:
        same_dtype("residual", residual, x.dtype)
        if residual.shape != x.shape:
            raise fail(f"residual has shape {tuple(residual.shape)}, x {tuple(x.shape)}")
    elif total is not None:
        raise fail("total is given without a residual")
    output(out, x.shape, x.dtype)
    output(total, x.shape, x.dtype, "total")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> None:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise fail(f"x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; [tokens, K] and [N, K] are needed")
    same_dtype("weight", weight, x.dtype)
    size = weight.shape[0]
    if bias is not None and (bias.shape != (size,) or bias.dtype is not x.dtype or not bias.is_contiguous()):
        raise fail(f"bias is {bias.dtype} {tuple(bias.shape)}; contiguous {x.dtype} [{size}] is needed")
    if out is not None:
        output(out, (x.shape[0], size), x.dtype)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    token_rows("q", q)
    token_rows("k", k, None, q.shape[2])
    if k.shape[0] != q.shape[0]:
        raise fail(f"q has {q.shape[0]} tokens, k has {k.shape[0]}")
    if q.shape[2] % 2:
        raise fail(f"head dimension {q.shape[2]} is odd; rope pairs its halves")
    same_dtype("k", k, q.dtype)
    index("positions", positions, torch.int64, q.shape[0])
    if cos_sin.dim() != 2 or cos_sin.shape[1] != q.shape[2] or not cos_sin.is_contiguous():
        raise fail(f"cos_sin has shape {tuple(cos_sin.shape)}; contiguous [max_position, {q.shape[2]}] is needed")


def norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    rope(q, k, positions, cos_sin)
    if (q_norm is None) != (k_norm is None):
        raise fail("q_norm and k_norm must both be given, or neither")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.shape != (q.shape[2],) or weight.dtype is not q.dtype):
            shape = tuple(weight.shape)
            raise fail(f"{name} is {weight.dtype} {shape}; {q.dtype} [{q.shape[2]}] is needed")


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise fail(f"gate_up has shape {tuple(gate_up.shape)}; contiguous [tokens, 2 * F] is needed")
    output(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
