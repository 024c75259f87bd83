"""The kernels of csrc/ behind the Ops interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from nanopd.errors import UnsupportedShapeError
from nanopd.ops import checks
from nanopd.ops.compiler import KernelLibrary
from nanopd.ops.launch import Kernel, Launch, no_launch
from nanopd.ops.linear import linear_into

if TYPE_CHECKING:
    from nanopd.ops.attention import PagedAttention


_VEC = 8  # 16-bit elements in 16 bytes
_GEMV_ROWS, _GEMV_THREADS = 2, 256  # rows per warp of gemv.cu, and its block
_LONGEST_GEMV_NORM = 6144  # what a block of gemv.cu norms without spilling registers
_MOVE_TILE = 256 * 4  # vectors per thread block of move_blocks.cu
_LONGEST_ROW = 8 * 1024 * 16  # rms_norm.cu keeps a row in the registers of 1024 threads, 16 vectors each


class CudaOps:
    """CUDA kernels of one device, compiled when a shape is first met and kept.

    Supports bfloat16 and float16. Tensors must be aligned to 16 bytes, as torch allocates them and as rows of a fused
    qkv matrix are whenever the head dimension is a multiple of 8.

    Args:
        device: a CUDA device.
        num_sms: how many of its SMs the kernels will find, if they run in an SM partition; see ``PagedAttention``.

    Raises:
        CudaUnavailableError: no such GPU, or cuda-core is missing.
    """

    name = "cuda"

    def __init__(self, device: torch.device | str, num_sms: int | None = None) -> None:
        self.library = KernelLibrary(torch.device(device))
        self.device = self.library.device
        self.num_sms = num_sms
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._attention: PagedAttention | None = None

    # --- attention ---------------------------------------------------------------------------------------------

    @property
    def attention(self) -> PagedAttention:
        """The attention kernels, all variants; built on first use."""
        if self._attention is None:
            from nanopd.ops.attention import PagedAttention

            self._attention = PagedAttention(self.library, num_sms=self.num_sms)
        return self._attention

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
        return self.attention.decode(q, k_cache, v_cache, block_tables, context_lens, scale, out)

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
        return self.attention.prefill(
            q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, max_seqlen_q, scale, out
        )

    # --- the KV cache ------------------------------------------------------------------------------------------

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        checks.store_kv(k, v, k_cache, v_cache, slot_mapping)
        num_tokens, num_heads, head_dim = k.shape
        if num_tokens == 0:
            return
        k_stride, v_stride = k.stride(0), v.stride(0)
        self._check_scalar(k_cache)
        _check_vectors("k and v", k.data_ptr() | v.data_ptr(), num_heads * head_dim, k_stride, v_stride)
        row_vecs = num_heads * head_dim // _VEC
        kernel = self._kernel("store_kv.cu", "store_kv", ROW_VECS=row_vecs)
        grid = -(-num_tokens * row_vecs // 256)
        kernel(grid, 256, k, v, k_cache, v_cache, slot_mapping, num_tokens, k_stride, v_stride)

    def copy_blocks(self, kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
        checks.copy_blocks(kv_cache, src, dst)
        self._prepare_move("copy_blocks", src.shape[0], kv_cache, src, dst)()

    def transfer_blocks(
        self, source: Tensor, destination: Tensor, source_blocks: Tensor, destination_blocks: Tensor
    ) -> None:
        self.prepare_transfer_blocks(source, destination, source_blocks, destination_blocks)()

    def prepare_transfer_blocks(
        self, source: Tensor, destination: Tensor, source_blocks: Tensor, destination_blocks: Tensor
    ) -> Callable[[], object]:
        checks.transfer_blocks(source, destination, source_blocks, destination_blocks)
        _check_vectors("destination", destination.data_ptr())
        tensors, more = (source, destination, source_blocks, destination_blocks), (destination.shape[2],)
        return self._prepare_move("transfer_blocks", source_blocks.shape[0], *tensors, more=more)

    def gather_blocks(self, kv_cache: Tensor, block_ids: Tensor, out: Tensor | None = None) -> Tensor:
        checks.move_blocks(kv_cache, block_ids, out)
        if out is None:
            shape = (*kv_cache.shape[:2], block_ids.shape[0], *kv_cache.shape[3:])
            out = torch.empty(shape, dtype=kv_cache.dtype, device=kv_cache.device)
        self._prepare_move("gather_blocks", block_ids.shape[0], kv_cache, out, block_ids)()
        return out

    def scatter_blocks(self, staging: Tensor, kv_cache: Tensor, block_ids: Tensor) -> None:
        checks.move_blocks(kv_cache, block_ids, staging)
        self._prepare_move("scatter_blocks", block_ids.shape[0], kv_cache, staging, block_ids)()

    def _prepare_move(
        self, function: str, num_moved: int, kv_cache: Tensor, *others: Tensor, more: tuple[int, ...] = ()
    ) -> Callable[[], object]:
        """Of a kernel in move_blocks.cu, which takes these tensors in this order."""
        if num_moved == 0:
            return no_launch
        self._check_scalar(kv_cache)
        self._check_device(*others)
        num_layers, _, num_blocks, block_size, num_heads, head_dim = kv_cache.shape
        block_elements = block_size * num_heads * head_dim
        _check_vectors("kv_cache", kv_cache.data_ptr(), block_elements)
        planes = 2 * num_layers
        kernel = self._kernel("move_blocks.cu", function, BLOCK_VECS=block_elements // _VEC)
        grid = -(-num_moved * planes * block_elements // (_VEC * _MOVE_TILE))
        return partial(kernel.prepare(grid, 256, num_moved, planes, num_blocks, *more), kv_cache, *others)

    # --- between the matrix products ---------------------------------------------------------------------------

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
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if total is None and residual is not None:
            total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.prepare_rms_norm(x, weight, eps, residual, out, total)(x, weight, residual, out, total)
        return out if total is None else (out, total)

    def prepare_rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor, total: Tensor | None
    ) -> Launch:
        """To be launched with (x, weight, residual, out, total)."""
        checks.rms_norm(x, weight, residual, out, total)
        scalar = self._check_scalar(x)
        row = x.shape[-1]
        heads, stride = _rows_of(x)
        self._check_device(weight, out, residual, total)
        _check_vectors("x", x.data_ptr() | weight.data_ptr() | out.data_ptr(), row, stride)
        if residual is not None and total is not None:
            if not residual.is_contiguous():
                raise UnsupportedShapeError(f"residual has strides {residual.stride()}; it must be contiguous")
            _check_vectors("residual", residual.data_ptr() | total.data_ptr(), row)
        threads, group = _norm_threads(row)
        rows = x.numel() // row
        if rows == 0:
            return no_launch
        kernel = self._kernel(
            "rms_norm.cu",
            "rms_norm",
            SCALAR=scalar,
            ROW=row,
            RESIDUAL=int(residual is not None),
            THREADS=threads,
            GROUP=group,
        )
        return kernel.prepare(-(-rows * group // threads), threads, rows, heads, stride, float(eps), overlap=True)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        checks.rope(q, k, positions, cos_sin)
        num_tokens, q_heads, head_dim = q.shape
        if num_tokens == 0:
            return
        if cos_sin.dtype is not torch.float32:
            raise UnsupportedShapeError(f"cos_sin is {cos_sin.dtype}; torch.float32 is needed")
        if head_dim % (2 * _VEC):
            raise UnsupportedShapeError(f"head dimension {head_dim} is not a multiple of {2 * _VEC}")
        k_heads, q_stride, k_stride = k.shape[1], q.stride(0), k.stride(0)
        _check_vectors("q and k", q.data_ptr() | k.data_ptr(), head_dim, q_stride, k_stride)
        half_vecs = head_dim // (2 * _VEC)
        scalar = self._check_scalar(q)
        kernel = self._kernel("rope.cu", "rope", SCALAR=scalar, HEAD_DIM=head_dim, HALF_VECS=half_vecs)
        grid = -(-num_tokens * (q_heads + k_heads) * half_vecs // 128)
        kernel(grid, 128, q, k, positions, cos_sin, num_tokens, q_heads, k_heads, q_stride, k_stride)

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
        tensors = (q, k, v, q_norm, k_norm, positions, cos_sin, k_cache, v_cache, slot_mapping)
        self.prepare_norm_rope_store(eps, *tensors)(*tensors)
        return q

    def prepare_norm_rope_store(
        self,
        eps: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        *cache: Tensor,
        overlap: bool = False,
    ) -> Launch:
        """To be launched with (q, k, v, q_norm, k_norm, positions, cos_sin, k_cache, v_cache, slot_mapping).

        ``overlap``: see csrc/overlap.cuh. Only where a linear layer comes before it, and positions and slots before
        that one.
        """
        checks.norm_rope_store(q, k, v, q_norm, k_norm, positions, cos_sin, *cache)
        num_tokens, q_heads, head_dim = q.shape
        if num_tokens == 0:
            return no_launch
        if cos_sin.dtype is not torch.float32:
            raise UnsupportedShapeError(f"cos_sin is {cos_sin.dtype}; torch.float32 is needed")
        if head_dim % (2 * _VEC):
            raise UnsupportedShapeError(f"head dimension {head_dim} is not a multiple of {2 * _VEC}")
        kv_heads, strides = k.shape[1], (q.stride(0), k.stride(0), v.stride(0))
        scalar = self._check_scalar(q)
        self._check_device(k, v, q_norm, k_norm, positions, cos_sin, *cache)
        _check_vectors("q, k and v", q.data_ptr() | k.data_ptr() | v.data_ptr(), head_dim, *strides)
        group, norm = _head_group(head_dim), int(q_norm is not None)
        kernel = self._kernel(
            "norm_rope_store.cu", "norm_rope_store", SCALAR=scalar, HEAD_DIM=head_dim, GROUP=group, NORM=norm
        )
        grid = -(-num_tokens * (q_heads + 2 * kv_heads) * group // 128)
        return kernel.prepare(grid, 128, num_tokens, q_heads, kv_heads, *strides, float(eps), overlap=overlap)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """A matrix product is cuBLAS's business; one token's is a stream through the weights, and gemv.cu's."""
        if _fits_gemv(x, weight):
            return self._gemv(x, weight, out, bias=bias)
        checks.linear(x, weight, bias, out)
        self._check_device(x, weight, bias, out)
        return torch_linear(x, weight, bias) if out is None else linear_into(out, x, weight, bias)

    def gated_linear(self, x: Tensor, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
        if _fits_gemv(x, gate_up):
            return self._gemv(x, gate_up, out, gated=True)
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
        if _fits_gemv(x, weight, norm):
            return self._gemv(x, weight, out, norm=norm, eps=eps, bias=bias)
        return self.linear(self.rms_norm(x, norm, eps), weight, bias, out=out)

    def norm_gated_linear(
        self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        if _fits_gemv(x, gate_up, norm):
            return self._gemv(x, gate_up, out, norm=norm, eps=eps, gated=True)
        return self.gated_linear(self.rms_norm(x, norm, eps), gate_up, out=out)

    def add_linear(self, total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        checks.output(total, (x.shape[0], weight.shape[0]), x.dtype, "total")
        if _fits_gemv(x, weight):
            return self._gemv(x, weight, total, residual=total)
        self._check_device(total)
        return total.add_(self.linear(x, weight))

    def _gemv(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor | None,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        num_rows, width = weight.shape
        scalar = self._check_scalar(x)
        self._check_device(weight, norm, bias, out)
        if bias is not None:
            checks.linear(x, weight, bias)
        if gated and num_rows % 2:
            raise UnsupportedShapeError(f"gate_up has {num_rows} rows; as many gates as ups are needed")
        shape = (1, num_rows // 2 if gated else num_rows)
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        checks.output(out, shape, x.dtype)
        extras = {"norm": norm is not None, "bias": bias is not None, "residual": residual is not None, "gated": gated}
        kernel = self._kernel("gemv.cu", "gemv", **_gemv_defines(scalar, width, **extras))
        grid = -(-num_rows // (_GEMV_ROWS * _GEMV_THREADS // 32))
        kernel(grid, _GEMV_THREADS, weight, x, norm, bias, residual, out, num_rows, float(eps), overlap=True)
        return out

    def silu_mul(self, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
        checks.silu_mul(gate_up)
        if out is None:
            shape = (gate_up.shape[0], gate_up.shape[1] // 2)
            out = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
        self.prepare_silu_mul(gate_up, out)(gate_up, out)
        return out

    def prepare_silu_mul(self, gate_up: Tensor, out: Tensor) -> Launch:
        """To be launched with (gate_up, out)."""
        checks.silu_mul(gate_up, out)
        num_tokens, half = out.shape
        scalar = self._check_scalar(gate_up)
        self._check_device(out)
        _check_vectors("gate_up", gate_up.data_ptr() | out.data_ptr(), half)
        if num_tokens == 0:
            return no_launch
        vecs = num_tokens * half // _VEC
        kernel = self._kernel("silu_mul.cu", "silu_mul", SCALAR=scalar, OUT_VECS=half // _VEC)
        return kernel.prepare(-(-vecs // 256), 256, vecs, overlap=True)

    # --- shared ------------------------------------------------------------------------------------------------

    def _kernel(self, file: str, function: str, **defines: object) -> Kernel:
        key = (function, *defines.values())
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self.library.get(file, function, defines)
        return kernel

    def _check_scalar(self, x: Tensor) -> str:
        scalar = checks.SCALARS.get(x.dtype)
        if scalar is None:
            raise UnsupportedShapeError(f"dtype {x.dtype} has no CUDA kernels; use torch.bfloat16 or torch.float16")
        if x.get_device() != self.device.index:
            raise UnsupportedShapeError(f"a tensor lies on {x.device}; these kernels run on {self.device}")
        return scalar

    def _check_device(self, *tensors: Tensor | None) -> None:
        for x in tensors:
            if x is not None and x.get_device() != self.device.index:
                raise UnsupportedShapeError(f"a tensor lies on {x.device}; these kernels run on {self.device}")


def _check_vectors(name: str, addresses: int, *elements: int) -> None:
    """Every address is a multiple of 16 bytes, every count or stride one of 8 elements."""
    if addresses % 16:
        raise UnsupportedShapeError(f"{name} is not aligned to 16 bytes")
    for count in elements:
        if count % _VEC:
            raise UnsupportedShapeError(f"{name} has a row size or stride of {count}, not a multiple of {_VEC}")


def _rows_of(x: Tensor) -> tuple[int, int]:
    """How to find the rows of x: row r starts at (r // heads) * stride + (r % heads) * row_size. (heads, stride)"""
    row = x.shape[-1]
    if x.is_contiguous():
        return 1, row
    if x.dim() == 2:
        return 1, x.stride(0)
    if x.dim() == 3 and x.stride(1) == row:
        return x.shape[1], x.stride(0)
    raise UnsupportedShapeError(
        f"x has shape {tuple(x.shape)} and strides {x.stride()}; only token rows may be strided"
    )


def _head_group(head_dim: int) -> int:
    """Lanes of norm_rope_store.cu that hold one head, 16 elements each: a power of two."""
    return 1 << (head_dim // (2 * _VEC) - 1).bit_length()


def _fits_gemv(x: Tensor, weight: Tensor, norm: Tensor | None = None) -> bool:
    """Whether this is one token and gemv.cu can stream the weights; other kernels take everything else."""
    return (
        weight.dim() == 2
        and x.shape == (1, weight.shape[1])
        and x.dtype in checks.SCALARS
        and x.dtype is weight.dtype
        and weight.is_contiguous()
        and x.stride(1) == 1
        and weight.shape[1] % _VEC == 0
        and (x.data_ptr() | weight.data_ptr()) % 16 == 0
        and (norm is None or _fits_gemv_norm(norm, weight.shape[1], x.dtype))
    )


def _fits_gemv_norm(norm: Tensor, width: int, dtype: torch.dtype) -> bool:
    """Whether the blocks of gemv.cu can norm their input themselves: it lies in shared memory then."""
    return (
        width <= _LONGEST_GEMV_NORM
        and norm.shape == (width,)
        and norm.dtype is dtype
        and norm.is_contiguous()
        and norm.data_ptr() % 16 == 0
    )


def _gemv_defines(
    scalar: str, width: int, *, norm: bool = False, bias: bool = False, residual: bool = False, gated: bool = False
) -> dict[str, object]:
    """Macros of gemv.cu: what it streams, and what comes along."""
    extras = {"NORM": int(norm), "BIAS": int(bias), "RESIDUAL": int(residual), "GATED": int(gated)}
    return {"SCALAR": scalar, "K_VECS": width // _VEC, **extras}


def _norm_threads(row: int) -> tuple[int, int]:
    """Threads per block and lanes per row of rms_norm.cu.

    Rows up to 256 elements share a warp or take one. Longer rows take a block with two vectors per thread, so that its
    loads overlap; a row too long for that in 1024 threads takes more per thread.
    """
    if row > _LONGEST_ROW:
        raise UnsupportedShapeError(f"rms_norm over {row} elements; the limit is {_LONGEST_ROW}")
    vecs = row // _VEC
    if vecs <= 32:
        return 128, 1 << max(0, (vecs - 1).bit_length())
    threads = min(1024, max(64, -(-vecs // 2) + 31 & ~31))
    return threads, threads


def variants() -> Iterator[tuple[str, str, dict[str, object]]]:
    """(file, function, defines) of what CudaOps compiles for the shape presets and for odd sizes; CI compiles these."""
    for row_vecs in (16, 24, 128):  # one head of 128, SmolLM2's 3 x 64, eight heads of 128
        yield "store_kv.cu", "store_kv", {"ROW_VECS": row_vecs}
        for function in ("copy_blocks", "transfer_blocks", "gather_blocks", "scatter_blocks"):
            yield "move_blocks.cu", function, {"BLOCK_VECS": 16 * row_vecs}
    for scalar in checks.SCALARS.values():
        for row in (64, 96, 128, 256, 576, 896, 1024, 1536, 2048, 4096, 5120, 8192):
            threads, group = _norm_threads(row)
            shared = {"SCALAR": scalar, "ROW": row, "THREADS": threads, "GROUP": group}
            yield "rms_norm.cu", "rms_norm", {**shared, "RESIDUAL": 0}
            yield "rms_norm.cu", "rms_norm", {**shared, "RESIDUAL": 1}
        for head_dim in checks.HEAD_DIMS:
            half_vecs = head_dim // (2 * _VEC)
            yield "rope.cu", "rope", {"SCALAR": scalar, "HEAD_DIM": head_dim, "HALF_VECS": half_vecs}
            for norm in (0, 1):
                options = {"SCALAR": scalar, "HEAD_DIM": head_dim, "GROUP": _head_group(head_dim), "NORM": norm}
                yield "norm_rope_store.cu", "norm_rope_store", options
        yield "gemv.cu", "gemv", _gemv_defines(scalar, 576)
        yield "gemv.cu", "gemv", _gemv_defines(scalar, 1536, norm=True, bias=True)
        for width in (576, 4096, 6144):
            yield "gemv.cu", "gemv", _gemv_defines(scalar, width, norm=True)
            yield "gemv.cu", "gemv", _gemv_defines(scalar, width, norm=True, gated=True)
        for width in (4096, 12288):
            yield "gemv.cu", "gemv", _gemv_defines(scalar, width, residual=True)
        for out_vecs in (1536 // _VEC, 12288 // _VEC):
            yield "silu_mul.cu", "silu_mul", {"SCALAR": scalar, "OUT_VECS": out_vecs}
