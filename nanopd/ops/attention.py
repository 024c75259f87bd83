"""Host side of the attention kernels: which variant, how large a grid, how much shared memory and workspace.

Everything here depends on shapes and on the GPU, never on values that lie on the device, so that a launch captured into
a CUDA graph stays right when context lengths and block tables change in place. What does depend on them (how the work
is divided, when to stop) the kernels compute for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nanopd.errors import UnsupportedShapeError
from nanopd.ops import checks
from nanopd.ops.compiler import Kernel, KernelLibrary
from nanopd.ops.launch import Launch, no_launch
from nanopd.ops.tensor_map import CacheMaps, has_tensor_maps

WGMMA_ARCH = "sm_90a"  # Hopper; its instructions exist in no other architecture

DecodeKernel = Literal["naive", "warp", "split"]
PrefillKernel = Literal["naive", "tiled", "split", "wgmma"]

# These repeat constants of csrc; tests/gpu/test_attention.py fails if they drift apart.
_MIN_UNITS = 4  # attention_plan.cuh: units in the smallest part
_WARP_KERNEL_THREADS = 256  # attention_decode_warp.cu
_SPLIT_THREADS = 128  # attention_prefill_split.cu
_SPLIT_ROWS = 64  # attention_prefill_split.cu: rows of a tile, each a query of one head
_MAX_SPLITS = 32  # attention_prefill_split.cu: blocks that share a tile
_MIN_TILES = 4  # attention_prefill_split.cu: tiles of keys in the smallest share
_WGMMA_STAGES = 2  # attention_prefill_wgmma.cu: tiles of K, and of V, in shared memory

_MAX_GRID_YZ = 65535  # the hardware's limit for the second and third grid dimension
_REGISTERS_PER_SM = 65536  # on every architecture from sm_80 on
_RESERVED_SHARED_BYTES = 1024  # what the driver takes per resident block
_MAX_BLOCKS_PER_SM = 32  # the hardware's limit
_READY_COUNTERS = 8  # streams that can capture a graph as the first thing they do


class Ring(NamedTuple):
    """Macros of attention_decode_split.cu."""

    STAGES: int  # tiles per warp in shared memory
    HEAD_TILES: int  # of 8 query heads that share a key: 1, or 2 where more do


STAGES = (3, 2)  # the rings there are


class Tiling(NamedTuple):
    """Macros of attention_prefill_tiled.cu."""

    ROW_TILES: int  # 16 queries each, per warp
    WARPS: int
    LOAD_K: int  # keys brought into shared memory at a time

    @property
    def queries(self) -> int:
        """Queries per block."""
        return self.WARPS * self.ROW_TILES * 16


class SplitGrid(NamedTuple):
    """Grid of attention_prefill_split.cu."""

    num_kv_heads: int
    num_seqs: int
    tiles: int  # of the longest chunk
    splits: int  # blocks that may share a tile

    @property
    def all_tiles(self) -> int:
        return self.num_kv_heads * self.num_seqs * self.tiles


class KernelVariant(NamedTuple):
    """One thing to compile: ``function`` of ``csrc/file`` under ``defines``."""

    file: str
    function: str
    defines: dict[str, object]


def variants(
    dtypes: Iterable[torch.dtype] = tuple(checks.SCALARS),
    head_dims: Iterable[int] = checks.HEAD_DIMS,
    block_sizes: Iterable[int] = (16,),
) -> list[KernelVariant]:
    """Every kernel that ``PagedAttention`` can ask for with these dtypes, head dims and block sizes."""
    names = ("decode_naive", "decode_warp", "prefill_naive", "prefill_split")
    result = []
    for dtype in dtypes:
        for head_dim in head_dims:
            for block_size in block_sizes:
                defines = _defines(dtype, head_dim, block_size)
                result += [KernelVariant(f"attention_{name}.cu", f"attention_{name}", defines) for name in names]
                for name, macros in _with_macros(head_dim):
                    result.append(
                        KernelVariant(f"attention_{name}.cu", f"attention_{name}", defines | macros._asdict())
                    )
    return result


def _with_macros(head_dim: int) -> list[tuple[str, Tiling | Ring]]:
    rings = [Ring(stages, tiles) for stages in STAGES for tiles in (1, 2)]
    return [*(("decode_split", ring) for ring in rings), *(("prefill_tiled", tiling) for tiling in tilings(head_dim))]


def wgmma_variants(
    dtypes: Iterable[torch.dtype] = tuple(checks.SCALARS), block_sizes: Iterable[int] = (16,)
) -> list[KernelVariant]:
    """As ``variants``: the kernels that are compiled for ``WGMMA_ARCH`` only."""
    name = "attention_prefill_wgmma"
    formats = [(dtype, dim, size) for dtype in dtypes for dim in checks.HEAD_DIMS for size in block_sizes]
    return [KernelVariant(f"{name}.cu", name, _defines(*one)) for one in formats]


class PagedAttention:
    """Attention over a paged KV cache on one GPU.

    Args:
        library: compiled kernels of the device.
        num_sms: how many SMs the kernels will find. Less than the GPU has when they run in an SM partition: decode
            cuts its work into as many equal parts as fit the SMs at once, so a wrong count costs time (never
            correctness).
    """

    def __init__(self, library: KernelLibrary, *, num_sms: int | None = None) -> None:
        self._library = library
        self._device = library.device
        self._kernels: dict[tuple[object, ...], Kernel] = {}  # by fewer fields than the library's, so faster to find
        properties: Any = torch.cuda.get_device_properties(library.device)
        self.num_sms = num_sms or properties.multi_processor_count
        self._is_whole = self.num_sms == properties.multi_processor_count
        self._shared_bytes_per_sm = properties.shared_memory_per_multiprocessor
        self._shared_bytes_per_block = properties.shared_memory_per_block_optin
        # Zeroed here, outside of any capture: inside one, clearing them would become part of every replay.
        size = (_READY_COUNTERS, self.num_sms * _MAX_BLOCKS_PER_SM)
        self._ready_counters = list(torch.zeros(size, dtype=torch.int32, device=library.device))
        torch.cuda.current_stream(library.device).synchronize()  # other streams will use them
        self._counters: dict[int, Tensor] = {}  # by stream
        self._cache_maps = CacheMaps(self._device.index)
        # Whether ``kernel="wgmma"`` can be asked for.
        self.has_wgmma = f"{library.arch}a" == WGMMA_ARCH and has_tensor_maps()

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        out: Tensor | None = None,
        *,
        kernel: DecodeKernel = "split",
        overlap: bool = False,
    ) -> Tensor:
        """One query per sequence against its whole context; see ``Ops.paged_decode_attention``.

        Args:
            q: [B, Hq, D] bfloat16 or float16, rows may be strided; D in 64, 96, 128, 256.
            k_cache, v_cache: [num_blocks, block_size, Hkv, D], block_size a multiple of 8.
            block_tables: [B, max_blocks] int32.
            context_lens: [B] int32; 0 gives zeros.
            scale: > 0.
            out: [B, Hq, D], written if given.
            kernel: ``naive``, ``warp`` and ``split`` give the same result at very different speeds.
            overlap: let ``split`` start before the kernels in front of it have ended. They may still be writing q and,
                in the caches, each sequence's newest token. The caller promises that lengths, block tables and all
                older tokens were complete before: ``split`` reads them at once (csrc/overlap.cuh).

        Raises:
            UnsupportedShapeError: nothing was launched.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        tensors = (out, q, k_cache, v_cache, block_tables, context_lens)
        self.prepare_decode(*tensors, scale, kernel=kernel, overlap=overlap)(*tensors)
        return out

    def prepare_decode(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        *,
        kernel: DecodeKernel = "split",
        overlap: bool = False,
    ) -> Launch:
        """``decode`` without the launch itself, which takes these six tensors, or others that are alike."""
        checks.decode_attention(q, k_cache, v_cache, block_tables, context_lens, out)
        self._check(out, q, k_cache, v_cache, scale, (block_tables, context_lens))
        num_seqs, num_heads, head_dim = q.shape
        if num_seqs > _MAX_GRID_YZ:
            raise UnsupportedShapeError(f"{num_seqs} sequences in one decode batch; the grid takes {_MAX_GRID_YZ}")
        if out.numel() == 0:
            return no_launch
        if kernel == "split":
            return self._decode_split(q, k_cache, block_tables, scale, overlap)
        threads = head_dim if kernel == "naive" else _WARP_KERNEL_THREADS
        sizes = (q.stride(0), block_tables.shape[1], k_cache.shape[2])
        return self._kernel(f"decode_{kernel}", q.dtype, k_cache).prepare((num_heads, num_seqs), threads, scale, *sizes)

    def prefill(
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
        *,
        kernel: PrefillKernel | None = None,
    ) -> Tensor:
        """Chunks of queries, causal over cached prefix and chunk; see ``Ops.paged_prefill_attention``.

        Args:
            q: [T, Hq, D] bfloat16 or float16, rows may be strided; D in 64, 96, 128, 256.
            k_cache, v_cache: [num_blocks, block_size, Hkv, D]; the chunk's own keys and values are stored already.
            block_tables: [S, max_blocks] int32.
            cu_seqlens_q: [S + 1] int32.
            context_lens: [S] int32, the chunk included; 0 gives zeros.
            max_seqlen_q: the longest chunk, or more. Queries beyond it in a longer one would not be computed.
            scale: > 0.
            out: [T, Hq, D], written if given. Rows at and after ``cu_seqlens_q[-1]`` are left as they are.
            kernel: the fastest that this GPU has, unless named. For few queries that is ``split``, which divides the
                keys among blocks as decode does.

        Raises:
            UnsupportedShapeError: nothing was launched.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        tensors = (out, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens)
        self.prepare_prefill(*tensors, max_seqlen_q, scale, kernel=kernel)(*tensors)
        return out

    def prepare_prefill(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        max_seqlen_q: int,
        scale: float,
        *,
        kernel: PrefillKernel | None = None,
    ) -> Launch:
        """``prefill`` without the launch itself, which takes these seven tensors, or others that are alike."""
        checks.prefill_attention(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, out)
        self._check(out, q, k_cache, v_cache, scale, (block_tables, cu_seqlens_q, context_lens))
        num_tokens, num_heads, head_dim = q.shape
        num_seqs, max_blocks = block_tables.shape
        if max(num_seqs, num_heads) > _MAX_GRID_YZ:
            raise UnsupportedShapeError(f"{num_seqs} sequences, {num_heads} heads; the grid takes {_MAX_GRID_YZ}")
        if out.numel() == 0 or num_seqs == 0 or max_seqlen_q < 1:
            return no_launch
        if kernel == "naive":
            sizes = (q.stride(0), max_blocks, num_seqs, k_cache.shape[2])
            naive = self._kernel("prefill_naive", q.dtype, k_cache)
            return naive.prepare((num_tokens, num_heads), head_dim, scale, *sizes)
        split = self._split_grid(q, k_cache, block_tables, max_seqlen_q)
        if kernel is None and split.splits >= (4 if self.has_wgmma else 2):
            kernel = "split"
        if kernel == "split":
            return self._prefill_split(q, k_cache, max_blocks, scale, split)
        tiling = self._tiling(head_dim, num_heads * num_seqs, max_seqlen_q)
        if kernel is None:  # measured: with few queries or little to see, starting wgmma takes longer than it gains
            suits = max_seqlen_q > 64 and max_blocks * k_cache.shape[1] * head_dim >= 2**16
            kernel = "wgmma" if suits and self.has_wgmma else "tiled"
        if kernel == "wgmma":
            return self._prefill_wgmma(q, k_cache, num_seqs, max_blocks, max_seqlen_q, scale)
        tile_q, shared = tiled_shape(head_dim, *tiling)
        # All of them: another step may want another one, and compiling would stall it.
        tiled = {one: self._kernel("prefill_tiled", q.dtype, k_cache, one) for one in tilings(head_dim)}[tiling]
        grid = (num_heads, num_seqs, min(_ceil_div(max_seqlen_q, tile_q), _ceil_div(num_tokens, tile_q)))
        if grid[2] > _MAX_GRID_YZ:
            raise UnsupportedShapeError(
                f"a chunk of {max_seqlen_q} tokens; at most {_MAX_GRID_YZ * tile_q} are possible"
            )
        return tiled.prepare(grid, tiling.WARPS * 32, scale, q.stride(0), max_blocks, k_cache.shape[2], shared=shared)

    def _prefill_wgmma(
        self, q: Tensor, k_cache: Tensor, num_seqs: int, max_blocks: int, max_seqlen_q: int, scale: float
    ) -> Launch:
        num_tokens, num_heads, head_dim = q.shape
        if not self.has_wgmma:
            needs = f"{WGMMA_ARCH} and a cuda-core that has tensor maps"
            raise UnsupportedShapeError(f"wgmma needs {needs}; this is {self._library.arch}")
        shape = wgmma_shape(head_dim)
        tiles = num_seqs + num_tokens // shape.queries  # at most
        tiles = min(tiles, num_seqs * _ceil_div(max_seqlen_q, shape.queries))
        if tiles * num_heads > 2**31 - 2**16:
            raise UnsupportedShapeError(f"{tiles} tiles of queries, {num_heads} heads; they are counted in 32 bits")
        kernel = self._kernel("prefill_wgmma", q.dtype, k_cache, arch=WGMMA_ARCH)
        sizes = (q.stride(0), max_blocks, num_heads, k_cache.shape[2], num_seqs)
        blocks = min(tiles * num_heads, self.num_sms)
        prepared = kernel.prepare(blocks, shape.threads, scale, *sizes, shared=shape.shared_bytes)
        counters, maps = self._arrival_counters(), self._cache_maps
        box_tokens = math.gcd(k_cache.shape[1], shape.keys)

        def launch(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, *indices: Tensor) -> None:
            prepared(out, q, *maps.get(k_cache, v_cache, box_tokens), *indices, counters)

        return launch

    def _decode_split(self, q: Tensor, k_cache: Tensor, block_tables: Tensor, scale: float, overlap: bool) -> Launch:
        num_seqs, num_heads, head_dim = q.shape
        num_kv_heads, max_blocks = k_cache.shape[2], block_tables.shape[1]
        tiles = head_tiles(num_heads // num_kv_heads)
        segments = num_seqs * num_kv_heads * _ceil_div(num_heads // num_kv_heads, 8 * tiles)
        kernel, threads, shared, room = self._decode_ring(q.dtype, k_cache, segments, tiles)
        most_work = segments * _ceil_div(max_blocks * k_cache.shape[1], unit_tokens(head_dim))
        parts = max(1, min(room, _ceil_div(most_work, _MIN_UNITS)))

        # Up to two unfinished pieces per part: 8 or 16 heads of D sums and one logarithm each, in float32. It lives as
        # long as the launch, whose repetitions, one behind the other on its stream, share it. Then torch hands the
        # memory only to work that comes later on that stream.
        pieces = 2 * parts * 8 * tiles
        workspace = torch.empty(pieces * (head_dim + 1), dtype=torch.float32, device=self._device)
        partial_lse = workspace[pieces * head_dim :]
        counters = self._arrival_counters()
        sizes = (q.stride(0), max_blocks, num_seqs, num_heads, num_kv_heads)
        prepared = kernel.prepare(parts, threads, scale, *sizes, shared=shared, overlap=overlap)

        def launch(out: Tensor, *inputs: Tensor) -> None:
            prepared(out, workspace, partial_lse, counters, *inputs)

        return launch

    def _decode_ring(
        self, dtype: torch.dtype, k_cache: Tensor, segments: int, tiles: int
    ) -> tuple[Kernel, int, int, int]:
        """Decode's kernel, its threads, its shared memory, and how many of its blocks there is room for.

        On the whole GPU memory sets the pace, and three slots in the ring, with fewer blocks, read a little faster if
        equally long segments are then cut at their ends: borders of parts inside of segments cost more than slots
        gain. In a partition the SMs do, and they read faster with more warps: two slots.
        """
        found = []
        for stages in STAGES:  # all of them: another batch may want the other one, and compiling would stall its step
            kernel = self._kernel("decode_split", dtype, k_cache, Ring(stages, tiles))
            warps, shared = split_shape(k_cache.shape[3], stages)
            room = self.num_sms * self._blocks_per_sm(kernel, warps * 32, shared)
            found.append((kernel, warps * 32, shared, room))
        three_slots, two_slots = found
        suits = self._is_whole and 10 * aligned_parts(segments, three_slots[3]) >= 9 * three_slots[3]
        return three_slots if suits else two_slots

    def _split_grid(self, q: Tensor, k_cache: Tensor, block_tables: Tensor, max_seqlen_q: int) -> SplitGrid:
        num_tokens, num_heads, head_dim = q.shape
        _, block_size, num_kv_heads, _ = k_cache.shape
        num_seqs, max_blocks = block_tables.shape
        rows = min(max_seqlen_q, num_tokens) * (num_heads // num_kv_heads)
        return split_grid(num_kv_heads, num_seqs, rows, max_blocks * block_size, head_dim, self.num_sms)

    def _prefill_split(self, q: Tensor, k_cache: Tensor, max_blocks: int, scale: float, grid: SplitGrid) -> Launch:
        _, num_heads, head_dim = q.shape
        if grid.tiles * grid.splits > _MAX_GRID_YZ:
            raise UnsupportedShapeError(f"{grid.tiles} tiles of queries in one chunk; the grid takes {_MAX_GRID_YZ}")
        rows = grid.all_tiles * grid.splits * _SPLIT_ROWS if grid.splits > 1 else 0
        workspace = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=self._device)
        partial_lse = workspace[rows * head_dim :]
        counters = self._arrival_counters()
        sizes = (q.stride(0), max_blocks, num_heads, grid.splits)
        dims = (grid.num_kv_heads, grid.num_seqs, grid.tiles * grid.splits)
        shared = tiled_shape(head_dim, row_tiles=1)[1]
        kernel = self._kernel("prefill_split", q.dtype, k_cache)
        prepared = kernel.prepare(dims, _SPLIT_THREADS, scale, *sizes, shared=shared)

        def launch(out: Tensor, *inputs: Tensor) -> None:
            prepared(out, workspace, partial_lse, counters, *inputs)

        return launch

    def _arrival_counters(self) -> Tensor:
        """Zeros that every launch leaves as zeros. Those of one stream share them: also one that starts early touches
        them only once all before it have ended. Another stream needs its own."""
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        counters = self._counters.get(stream)
        if counters is None:
            if self._ready_counters:
                counters = self._ready_counters.pop()
            else:
                counters = torch.zeros(self.num_sms * _MAX_BLOCKS_PER_SM, dtype=torch.int32, device=self._device)
                if torch.cuda.is_current_stream_capturing():
                    return counters  # cleared by, and living with, the graph that is being captured
            self._counters[stream] = counters
        return counters

    def _kernel(
        self,
        name: str,
        dtype: torch.dtype,
        k_cache: Tensor,
        macros: Tiling | Ring | None = None,
        arch: str | None = None,
    ) -> Kernel:
        key = (name, dtype, k_cache.shape[3], k_cache.shape[1], macros)
        kernel = self._kernels.get(key)
        if kernel is None:
            defines = _defines(dtype, k_cache.shape[3], k_cache.shape[1])
            if macros is not None:
                defines |= macros._asdict()
            kernel = self._library.get(f"attention_{name}.cu", f"attention_{name}", defines, arch=arch)
            self._kernels[key] = kernel
        return kernel

    def _blocks_per_sm(self, kernel: Kernel, threads: int, shared: int) -> int:
        """How many blocks of the kernel are resident on one SM at a time, by shared memory and by registers."""
        by_shared = self._shared_bytes_per_sm // (shared + kernel.static_shared_bytes + _RESERVED_SHARED_BYTES)
        by_registers = _REGISTERS_PER_SM // (threads * _ceil_div(kernel.num_registers, 8) * 8)
        return max(1, min(by_shared, by_registers))

    def _tiling(self, head_dim: int, blocks_per_tile: int, max_seqlen_q: int) -> Tiling:
        """The largest tiles that a block's shared memory has room for and that still fill the GPU."""
        for tiling in reversed(tilings(head_dim)[1:]):
            blocks = blocks_per_tile * _ceil_div(max_seqlen_q, tiling.queries)
            fits = tiled_shape(head_dim, *tiling)[1] + _RESERVED_SHARED_BYTES <= self._shared_bytes_per_block
            if fits and max_seqlen_q > 64 and blocks >= (1.5 if tiling.WARPS == 8 else 2) * self.num_sms:
                return tiling
        return tilings(head_dim)[0]

    def _check(
        self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, indices: tuple[Tensor, ...]
    ) -> None:
        """What these kernels ask for beyond ``nanopd.ops.checks``."""
        if q.dtype not in checks.SCALARS:
            raise UnsupportedShapeError(f"dtype {q.dtype}; the kernels take {' and '.join(checks.SCALARS.values())}")
        if q.shape[2] not in checks.HEAD_DIMS:
            raise UnsupportedShapeError(f"head dimension {q.shape[2]}; the kernels are written for {checks.HEAD_DIMS}")
        if not 0 < scale < math.inf:
            raise UnsupportedShapeError(f"scale {scale}; it must be positive and finite")
        for tensor in (out, q, k_cache, v_cache, *indices):
            if tensor.device != self._device:
                raise UnsupportedShapeError(f"a tensor lies on {tensor.device}, the kernels run on {self._device}")
        addresses = out.data_ptr() | q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
        if q.stride(0) % 8 or addresses % 16:
            raise UnsupportedShapeError(
                f"rows of q (stride {q.stride(0)} elements), caches and out must start at 16-byte boundaries"
            )


def split_shape(head_dim: int, stages: int) -> tuple[int, int]:
    """Warps per block and bytes of dynamic shared memory of attention_decode_split.cu."""
    warps = 4 if head_dim <= 128 else 2
    return warps, warps * stages * 2 * unit_tokens(head_dim) * head_dim * 2


def head_tiles(ratio: int) -> int:
    """Tiles of 8 query heads that are handled together, if ``ratio`` share a key/value head."""
    return 1 if ratio <= 8 else 2


def aligned_parts(segments: int, room: int) -> int:
    """Of at most ``room`` parts, how many can all end where equally long segments do: a multiple of their number, or
    one that divides it; 0 if none is found. As in attention_plan.cuh."""
    if segments <= room:
        return room // segments * segments
    each = _ceil_div(segments, room)
    return segments // each if segments % each == 0 else 0


def unit_tokens(head_dim: int) -> int:
    """Tokens in a unit of work of attention_plan.cuh."""
    return 32 if head_dim <= 64 else 16


def split_grid(num_kv_heads: int, num_seqs: int, rows: int, most_keys: int, head_dim: int, num_sms: int) -> SplitGrid:
    """The grid of attention_prefill_split.cu for ``rows`` queries, counted per head that shares a key/value head.

    Two blocks fit an SM, so as many share a tile as make two per SM. More than 1 means that tiles alone would not fill
    the GPU, and that contexts may be long enough (``most_keys``) to be worth dividing.
    """
    tiles = _ceil_div(rows, _SPLIT_ROWS)
    useful = most_keys // ((64 if head_dim <= 128 else 32) * _MIN_TILES)
    splits = min(2 * num_sms // (num_kv_heads * num_seqs * tiles), useful, _MAX_SPLITS)
    return SplitGrid(num_kv_heads, num_seqs, tiles, max(1, splits))


def tilings(head_dim: int) -> list[Tiling]:
    """Those of attention_prefill_tiled.cu, smallest first. The first two fit the 99 KB that a block has on sm_86."""
    if head_dim > 128:
        return [Tiling(1, 4, 32)]
    return [Tiling(1, 4, 64), Tiling(2, 4, 64), Tiling(2, 8, 64), Tiling(2, 8, 128)]


def tiled_shape(head_dim: int, row_tiles: int, warps: int = 4, load_k: int | None = None) -> tuple[int, int]:
    """Queries per block and bytes of dynamic shared memory of attention_prefill_tiled.cu, given its macros."""
    queries = warps * row_tiles * 16
    load_k = load_k or (64 if head_dim <= 128 else 32)
    return queries, (queries + 2 * 2 * load_k) * head_dim * 2


class WgmmaShape(NamedTuple):
    """Sizes of attention_prefill_wgmma.cu."""

    queries: int  # per block
    keys: int  # per tile
    threads: int
    shared_bytes: int  # dynamic


def wgmma_shape(head_dim: int) -> WgmmaShape:
    """Those for a head dimension."""
    queries, keys, slots = 192 if head_dim <= 64 else 128, 128, 2
    if head_dim > 128:
        keys, slots = 64, 1
    rows = slots * queries + 2 * _WGMMA_STAGES * keys
    return WgmmaShape(queries, keys, 2 * queries + 128, rows * _ceil_div(head_dim, 64) * 128 + 1024)


def _defines(dtype: torch.dtype, head_dim: int, block_size: int) -> dict[str, object]:
    return {"SCALAR": checks.SCALARS[dtype], "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
