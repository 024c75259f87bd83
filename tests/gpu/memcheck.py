"""Every kernel once, at ragged sizes, for compute-sanitizer. Not collected by pytest; run

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck.py

Without torch's caching allocator each tensor is an allocation of its own, so an access one byte past its end is seen.
"""

from __future__ import annotations

import sys

import torch

from nanopd.ops.attention import PagedAttention
from nanopd.ops.cuda import CudaOps


def exercise(ops: CudaOps, dtype: torch.dtype, hq: int, hkv: int, d: int, block_size: int) -> None:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    contexts, chunks = [1, 0, 37, 700], [1, 1, 19, 130]  # long enough for split to divide the keys
    tokens = sum(chunks)
    tables, used = [], 0
    width = -(-max(contexts) // block_size)
    for context in contexts:
        need = -(-context // block_size)
        tables.append([*range(used, used + need), *[0] * (width - need)])
        used += need
    cache = randn(2, 2, used, block_size, hkv, d)  # no spare block: the last slot ends the allocation
    block_tables = torch.tensor(tables, dtype=torch.int32, device="cuda")
    context_lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 1, 2, 21, tokens], dtype=torch.int32, device="cuda")
    k_cache, v_cache = cache[1, 0], cache[1, 1]

    qkv = randn(tokens, (hq + 2 * hkv) * d)
    q, k, v = qkv.split([hq * d, hkv * d, hkv * d], dim=1)
    q, k, v = q.view(tokens, hq, d), k.view(tokens, hkv, d), v.view(tokens, hkv, d)
    slots = torch.randperm(used * block_size, device="cuda")[:tokens]
    slots[-1], slots[0] = used * block_size - 1, -1
    ops.rope(q, k, torch.arange(tokens, device="cuda"), torch.rand(tokens, d, device="cuda"))
    ops.store_kv(k, v, k_cache, v_cache, slots)

    attention: PagedAttention = ops.attention
    rows = q[: len(contexts)]
    for kernel in ("naive", "warp", "split"):
        attention.decode(rows, k_cache, v_cache, block_tables, context_lens, 0.1, kernel=kernel)
    for kernel in ("naive", "tiled", "split", *(["wgmma"] if attention.has_wgmma else [])):
        attention.prefill(q, k_cache, v_cache, block_tables, starts, context_lens, max(chunks), 0.1, kernel=kernel)

    ids = torch.randperm(used, device="cuda")
    staging = ops.gather_blocks(cache, ids[:5].contiguous())
    ops.scatter_blocks(staging, cache, ids[5:10].contiguous())
    ops.copy_blocks(cache, ids[:3].contiguous(), ids[-3:].contiguous())

    hidden = qkv[:, : hq * d].contiguous()
    normed, _ = ops.rms_norm(hidden, randn(hq * d), 1e-6, hidden.clone())
    ops.rms_norm(k, randn(d), 1e-6)
    ops.silu_mul(normed)
    one, matrix = hidden[:1].clone(), randn(hq * d, hq * d)
    ops.add_linear(one, ops.norm_gated_linear(one, randn(hq * d), 1e-6, randn(2 * hq * d, hq * d)), matrix)
    ops.norm_linear(one, randn(hq * d), 1e-6, matrix, randn(hq * d))


def main() -> int:
    ops = CudaOps("cuda")
    for dtype in (torch.bfloat16, torch.float16):
        for hq, hkv, d, block_size in [(9, 3, 64, 16), (4, 1, 96, 8), (8, 2, 128, 32), (2, 2, 256, 16)]:
            exercise(ops, dtype, hq, hkv, d, block_size)
            torch.cuda.synchronize()
            print(f"{dtype}, {hq} query heads, {hkv} key heads, head dim {d}, block size {block_size}: done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
