"""How close each kernel comes to what the device can do, every figure a ratio within one run.

Memory-bound kernels are compared with a plain copy (bytes read plus bytes written per second), attention also with
PyTorch's scaled_dot_product_attention over contiguous memory, which has no block table to follow, the two taking turns.
A kernel's bytes are those it cannot avoid: for decode attention the keys and values of the context, once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from nanopd.ops.attention import DecodeKernel, PrefillKernel
from nanopd.ops.ceilings import Ceilings, measure_ceilings
from nanopd.ops.cuda import CudaOps
from nanopd.ops.interface import Ops
from nanopd.ops.measure import Inputs, time_in_turn
from nanopd.ops.select import get_ops

BLOCK_SIZE = 16
_CACHE_BYTES = 200e6  # inputs rotate until they hold this much: three times the 60 MB of L2 on an H200
_MOST_SETS = 16

Row = dict[str, Any]
Calls = dict[str, tuple[Callable[..., Any], Inputs]]  # by name a function and its sets of arguments
Plan = tuple[str, str, Callable[[], Row]]  # (group, name, how to measure it)


@dataclass(frozen=True)
class Heads:
    """Head counts and head dimension of one attention layer."""

    q: int
    kv: int
    dim: int

    @property
    def name(self) -> str:
        return f"h{self.q}_{self.kv}_d{self.dim}"


def bench_kernels(
    device: torch.device | str, dtype: torch.dtype | None = None, *, progress: bool = True
) -> dict[str, Any]:
    """Measure every kernel. Under a minute on an H200; on a CPU the reference at small sizes, a few seconds.

    Args:
        device: CPU or CUDA device.
        dtype: bfloat16 on CUDA and float32 on the CPU by default.
        progress: show a progress bar.

    Returns: ``{"ceilings": {...}, "decode": {row: {...}}, "prefill": ..., "cache": ..., "elementwise": ...}``, plain
    numbers throughout, for ``measure.write_result``. Each kernel has ``ms``, then ``gb_s`` and ``of_copy`` or
    ``tflop_s`` and ``of_matmul``; where PyTorch has a counterpart also ``of_sdpa``, its time over ours.
    """
    device = torch.device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    bench = KernelBenchmark(get_ops(device), device, dtype, measure_ceilings(device, dtype))
    results: dict[str, Any] = {"ceilings": bench.ceilings.as_dict()}
    for group, name, measure in _with_progress(list(bench.plan()), progress):
        results.setdefault(group, {})[name] = measure()
    return results


def _with_progress(plan: list[Plan], show: bool) -> Iterator[Plan]:
    from tqdm.auto import tqdm

    with tqdm(plan, disable=not show, unit="row") as bar:
        for group, name, measure in bar:
            bar.set_description(f"{group} {name}")
            yield group, name, measure


class KernelBenchmark:
    """The rows of the table, and how each is measured."""

    def __init__(self, ops: Ops, device: torch.device, dtype: torch.dtype, ceilings: Ceilings) -> None:
        self.ops, self.device, self.dtype, self.ceilings = ops, device, dtype, ceilings
        self.large = device.type == "cuda"
        self.bytes_per_element = torch.empty(0, dtype=dtype).element_size()

    def plan(self) -> Iterator[Plan]:
        """Every row, not yet measured."""
        llama = Heads(32, 8, 128) if self.large else Heads(9, 3, 64)
        scale = 1 if self.large else 32
        ragged = random.Random(0).choices(range(100, 8001), k=128) if self.large else [5, 70, 200]
        batch = 32 if self.large else 4
        decodes = {
            f"b{batch}_ctx{4096 // scale}_{llama.name}": (llama, [4096 // scale] * batch),
            f"b1_ctx{32768 // scale}_{llama.name}": (llama, [32768 // scale]),
            f"b{len(ragged)}_ragged_{llama.name}": (llama, ragged),
            f"b{batch}_ctx{4096 // scale}_h64_8_d64": (Heads(64, 8, 64), [4096 // scale] * batch),
            f"b{batch}_ctx{4096 // scale}_h9_3_d64": (Heads(9, 3, 64), [4096 // scale] * batch),
        }
        for i, (name, (heads, contexts)) in enumerate(decodes.items()):
            yield "decode", name, partial(self.decode, heads, contexts, every_variant=i == 0)
        n = 8192 // scale
        yield "prefill", f"causal_{n}_{llama.name}", partial(self.prefill, llama, n, n)
        yield "prefill", f"causal_{n // 4}_{llama.name}", partial(self.prefill, llama, n // 4, n // 4, naive=True)
        chunk, prefix = 512 // scale, 16384 // scale
        name = f"chunk_{chunk}_prefix_{prefix}_{llama.name}"
        yield "prefill", name, partial(self.prefill, llama, chunk, chunk + prefix)
        tokens = 65536 // scale
        yield "cache", f"store_kv_{tokens}", partial(self.store_kv, llama, tokens)
        for op in ("copy_blocks", "gather_blocks", "scatter_blocks"):
            yield "cache", f"{op}_{tokens}", partial(self.move_blocks, op, llama, tokens)
        for tokens in (8192 // scale, 64):
            yield "elementwise", f"rms_norm_{tokens}", partial(self.rms_norm, tokens, False)
            yield "elementwise", f"rms_norm_residual_{tokens}", partial(self.rms_norm, tokens, True)
            yield "elementwise", f"rope_{tokens}", partial(self.rope, llama, tokens)
            yield "elementwise", f"silu_mul_{tokens}", partial(self.silu_mul, tokens)

    # --- attention -------------------------------------------------------------------------------------------------

    def decode(self, heads: Heads, contexts: list[int], *, every_variant: bool) -> Row:
        """Variants of decode attention, and SDPA where all contexts are equally long."""
        kv_bytes = 2 * sum(contexts) * heads.kv * heads.dim * self.bytes_per_element
        sets = self._sets(kv_bytes)
        inputs = [self._paged_decode(heads, contexts) for _ in range(sets)]
        row: Row = {"contexts": len(contexts), "kv_tokens": sum(contexts), "kv_bytes": kv_bytes, "input_sets": sets}
        variants = self._decode_variants(every_variant)
        calls: Calls = {name: (fn, inputs) for name, fn in variants.items()}
        if len(set(contexts)) == 1:
            dense = [self._dense(heads, len(contexts), 1, contexts[0]) for _ in range(sets)]
            calls["sdpa"] = (_sdpa, dense)
        return row | _beside_sdpa({name: self._memory_row(ms, kv_bytes) for name, ms in self._in_turn(calls).items()})

    def _decode_variants(self, every: bool) -> dict[str, Callable[..., Tensor]]:
        if not isinstance(self.ops, CudaOps):
            return {"reference": self.ops.paged_decode_attention}
        kernels: tuple[DecodeKernel, ...] = ("naive", "warp", "split") if every else ("split",)
        # As a model launches it; nobody writes these caches, so a call may well start before the last one has ended.
        return {kernel: partial(self.ops.attention.decode, kernel=kernel, overlap=True) for kernel in kernels}

    def prefill(self, heads: Heads, chunk: int, context: int, *, naive: bool = False) -> Row:
        """One sequence: ``chunk`` queries at the end of ``context`` positions, against SDPA on the same shapes."""
        pairs = chunk * context - chunk * (chunk - 1) // 2  # causal: query i sees context - chunk + i + 1 keys
        operations = 4 * heads.q * heads.dim * pairs  # a multiply-add for q.k and one for p.v
        sets = 2
        inputs = [self._paged_prefill(heads, chunk, context) for _ in range(sets)]
        row: Row = {"chunk": chunk, "context": context, "operations": operations, "input_sets": sets}
        variants: dict[str, Callable[..., Tensor]] = {"reference": self.ops.paged_prefill_attention}
        if isinstance(self.ops, CudaOps):
            kernels: list[PrefillKernel] = ["tiled", "naive"] if naive else ["tiled"]
            if self.ops.attention.has_wgmma:
                kernels.insert(0, "wgmma")
            variants = {kernel: partial(self.ops.attention.prefill, kernel=kernel) for kernel in kernels}
        calls: Calls = {name: (fn, inputs) for name, fn in variants.items()}
        calls["sdpa"] = (partial(_sdpa, causal=True), [self._dense(heads, 1, chunk, context) for _ in range(sets)])
        times = self._in_turn(calls)
        return row | _beside_sdpa({name: self._compute_row(ms, operations) for name, ms in times.items()})

    # --- memory movement -------------------------------------------------------------------------------------------

    def store_kv(self, heads: Heads, tokens: int) -> Row:
        row_elements = heads.kv * heads.dim
        moved = 2 * 2 * tokens * row_elements * self.bytes_per_element  # K and V, read and written
        inputs = []
        for _ in range(self._sets(moved)):
            qkv = self._randn(tokens, (heads.q + 2 * heads.kv) * heads.dim)
            k, v = (part.view(tokens, heads.kv, heads.dim) for part in qkv[:, -2 * row_elements :].chunk(2, dim=1))
            cache = self._randn(2, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, heads.kv, heads.dim)
            blocks = torch.randperm(cache.shape[1], device=self.device)  # blocks anywhere, tokens in order within
            slots = (blocks.unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=self.device)).flatten()
            inputs.append((k, v, cache[0], cache[1], slots[:tokens].contiguous()))
        return self._memory_row(self._time(self.ops.store_kv, inputs), moved)

    def move_blocks(self, op: str, heads: Heads, tokens: int) -> Row:
        num_layers, num_blocks = 4, tokens // BLOCK_SIZE
        cache = self._randn(num_layers, 2, 2 * num_blocks, BLOCK_SIZE, heads.kv, heads.dim)
        moved = cache.numel() * self.bytes_per_element  # half the cache is read, as much is written
        order = torch.randperm(2 * num_blocks, device=self.device)
        src, dst = order[:num_blocks].contiguous(), order[num_blocks:].contiguous()
        args: tuple[Tensor, ...] = (cache, src, dst)
        if op != "copy_blocks":
            staging = self.ops.gather_blocks(cache, src)
            args = (cache, src, staging) if op == "gather_blocks" else (staging, cache, dst)
        return self._memory_row(self._time(getattr(self.ops, op), [args]), moved)

    def rms_norm(self, tokens: int, residual: bool) -> Row:
        width = 4096 if self.large else 576
        moved = (4 if residual else 2) * tokens * width * self.bytes_per_element
        inputs = []
        for _ in range(self._sets(moved)):
            x, weight = self._randn(tokens, width), self._randn(width)
            inputs.append((x, weight, 1e-6, self._randn(tokens, width)) if residual else (x, weight, 1e-6))
        return self._memory_row(self._time(self.ops.rms_norm, inputs), moved)

    def rope(self, heads: Heads, tokens: int) -> Row:
        moved = 2 * tokens * (heads.q + heads.kv) * heads.dim * self.bytes_per_element
        table = torch.rand(tokens, heads.dim, device=self.device)
        positions = torch.arange(tokens, device=self.device)
        inputs = []
        for _ in range(self._sets(moved)):
            qkv = self._randn(tokens, (heads.q + 2 * heads.kv) * heads.dim).view(tokens, -1, heads.dim)
            inputs.append((qkv[:, : heads.q], qkv[:, heads.q : heads.q + heads.kv], positions, table))
        return self._memory_row(self._time(self.ops.rope, inputs), moved)

    def silu_mul(self, tokens: int) -> Row:
        width = 12288 if self.large else 1536
        moved = 3 * tokens * width * self.bytes_per_element
        inputs = [(self._randn(tokens, 2 * width),) for _ in range(self._sets(moved))]
        return self._memory_row(self._time(self.ops.silu_mul, inputs), moved)

    # --- inputs ----------------------------------------------------------------------------------------------------

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _sets(self, num_bytes: int) -> int:
        """How many different inputs it takes to leave no useful part of one in the L2 cache."""
        return min(_MOST_SETS, max(2, math.ceil(_CACHE_BYTES / num_bytes))) if self.large else 2

    def _paged(self, heads: Heads, contexts: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """k_cache, v_cache, block_tables, context_lens, with the blocks of all sequences shuffled."""
        needs = [-(-context // BLOCK_SIZE) for context in contexts]
        cache = self._randn(2, sum(needs), BLOCK_SIZE, heads.kv, heads.dim)
        order = torch.randperm(sum(needs)).to(torch.int32).split(needs)
        tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).contiguous().to(self.device)
        return cache[0], cache[1], tables, torch.tensor(contexts, dtype=torch.int32, device=self.device)

    def _paged_decode(self, heads: Heads, contexts: list[int]) -> tuple[Any, ...]:
        q = self._randn(len(contexts), heads.q, heads.dim)
        return (q, *self._paged(heads, contexts), heads.dim**-0.5)

    def _paged_prefill(self, heads: Heads, chunk: int, context: int) -> tuple[Any, ...]:
        k_cache, v_cache, tables, lens = self._paged(heads, [context])
        starts = torch.tensor([0, chunk], dtype=torch.int32, device=self.device)
        q = self._randn(chunk, heads.q, heads.dim)
        return q, k_cache, v_cache, tables, starts, lens, chunk, heads.dim**-0.5

    def _dense(self, heads: Heads, batch: int, queries: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
        keys = self._randn(2, batch, heads.kv, context, heads.dim)
        return self._randn(batch, heads.q, queries, heads.dim), keys[0], keys[1]

    # --- results ---------------------------------------------------------------------------------------------------

    def _time(self, fn: Callable[..., Any], inputs: list[Any]) -> float:
        return self._in_turn({"": (fn, inputs)})[""]

    def _in_turn(self, calls: Calls) -> dict[str, float]:
        return time_in_turn(self.device, calls, samples=9 if self.large else 5)

    def _memory_row(self, ms: float, num_bytes: int) -> Row:
        gb_s = num_bytes / ms / 1e6
        return {"ms": ms, "gb_s": gb_s, "of_copy": gb_s / self.ceilings.copy_gb_s}

    def _compute_row(self, ms: float, operations: int) -> Row:
        tflop_s = operations / ms / 1e9
        return {"ms": ms, "tflop_s": tflop_s, "of_matmul": tflop_s / self.ceilings.matmul_tflop_s}


def _beside_sdpa(rows: dict[str, Row]) -> dict[str, Row]:
    """Adds ``of_sdpa`` to the rows of our kernels, if SDPA is among them."""
    if "sdpa" in rows:
        for name in rows.keys() - {"sdpa"}:
            rows[name]["of_sdpa"] = rows["sdpa"]["ms"] / rows[name]["ms"]
    return rows


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """SDPA of [B, Hq, n, D] with grouped keys. Causal means that the last query sees the last key."""
    if causal and q.shape[2] != k.shape[2]:
        bias = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)  # type: ignore[arg-type]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
