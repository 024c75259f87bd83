"""How many KV blocks fit: what is left of the memory once weights and the largest step have theirs."""

from __future__ import annotations

import torch

from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.sampler import SamplingBatch, sample_tokens
from nanopd.errors import ConfigError
from nanopd.kv.cache import KVCache, block_bytes, free_memory
from nanopd.model.batch import ForwardBatch
from nanopd.model.transformer import Transformer

CPU_BYTES = 1 << 30  # of KV, at most; a laptop has other uses for its memory


def default_num_blocks(
    model: Transformer, block_size: int, limits: SchedulerConfig, *, gpu_memory_utilization: float = 0.9
) -> int:
    """Blocks for the only pool on the model's device: all that ``kv_bytes`` allows.

    Never more than ``max_num_seqs`` sequences of ``max_model_len`` need. Raises ConfigError as ``kv_bytes``.
    """
    budget = kv_bytes(model, block_size, limits, gpu_memory_utilization=gpu_memory_utilization)
    return min(budget // block_bytes(model.config, block_size, model.dtype), useful_blocks(limits, block_size))


def useful_blocks(limits: SchedulerConfig, block_size: int) -> int:
    """The most that one worker can ever use."""
    return limits.max_num_seqs * -(-limits.max_model_len // block_size)


def kv_bytes(
    model: Transformer,
    block_size: int,
    limits: SchedulerConfig,
    *,
    gpu_memory_utilization: float = 0.9,
    num_workers: int = 1,
) -> int:
    """Bytes that the pools on the model's device may take, all of them together.

    On a GPU: what remains of ``gpu_memory_utilization`` of its memory after the weights, whatever else is allocated
    there, and for each of ``num_workers`` the scratch memory of the largest step, which is run once to find out. On the
    CPU: 1 GiB, or a quarter of the free memory if that is less.

    Raises ConfigError if not even one block fits.
    """
    if not isinstance(gpu_memory_utilization, (int, float)) or not 0.0 < gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization!r}")
    device, dtype = model.device, model.dtype
    if device.type == "cuda":
        scratch = largest_step_bytes(model, block_size, limits) * num_workers
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - gpu_memory_utilization) * total - scratch)
        account = f"{free / 1e9:.2f} of {total / 1e9:.2f} GB are free and steps take {scratch / 1e9:.2f} GB"
    else:
        free_bytes = free_memory(device)
        budget = CPU_BYTES if free_bytes is None else min(CPU_BYTES, free_bytes // 4)
        account = f"a quarter of the free memory is {budget / 1e9:.2f} GB"
    per_block = block_bytes(model.config, block_size, dtype)
    if budget < per_block:
        raise ConfigError(f"no memory for KV on {device}: {account}; a block takes {per_block / 1e6:.2f} MB")
    return budget


@torch.inference_mode()
def largest_step_bytes(model: Transformer, block_size: int, limits: SchedulerConfig) -> int:
    """Peak of the memory that a step allocates on the GPU beyond what is allocated now; the caches are left empty.

    The step: one chunk as long as the budget allows, logits for ``max_num_seqs`` sequences, each drawn with top-p.
    """
    device = model.device
    num_tokens = min(limits.max_num_batched_tokens, limits.max_model_len)
    cache = KVCache.allocate(model.config, 1, block_size, model.dtype, device)
    batch = ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.arange(num_tokens, device=device),
        slot_mapping=torch.full((num_tokens,), -1, device=device),  # stores nothing, so one block will do
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_tables=torch.zeros((1, -(-num_tokens // block_size)), dtype=torch.int32, device=device),
        logits_rows=torch.arange(limits.max_num_seqs, device=device) % num_tokens,
        num_decodes=0,
        max_seqlen_q=num_tokens,
    )
    n = limits.max_num_seqs
    full = torch.ones(n, dtype=torch.float64).numpy()
    draw = SamplingBatch(
        torch.arange(n).numpy(), full, torch.zeros(n, dtype=torch.int64).numpy(), full * 0.9, full * 0.5
    )
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    sample_tokens(model.forward(batch, cache), draw)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
