"""Warm-up: load the kernels that a runner is going to need, before it has company.

A kernel is loaded at its first launch, and the driver then waits until the device is idle, with everybody else: the
first prompt of one worker would make the decodes of another one on the card wait to its end. Which kernels attention
and matrix products take depends on the number of tokens, hence many prompts, with and without a prefix; and for
products, of which a step with decodes and a chunk may have any number, more than for the rest. The activations'
memory, too, is then taken. Sampling has kernels of its own, a set for each way to do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanopd.engine.sampler import SamplingBatch, greedy_tokens, sample_tokens
from nanopd.kv.cache import KVCache
from nanopd.model.batch import ForwardBatch

if TYPE_CHECKING:
    from nanopd.engine.runner import Model


def warm_up(model: Model, kv_cache: KVCache, most: int, max_blocks: int) -> Tensor:
    """Compute prompts, and ends of prompts, of many lengths up to ``most`` tokens, on the current stream.

    Args:
        kv_cache: its first blocks are used, and zero afterwards: what was computed would look like somebody's tokens.
        max_blocks: of one sequence's table.

    Returns: the last one's logits, [1, vocab].
    """
    most = min(most, min(kv_cache.num_blocks, max_blocks) * kv_cache.block_size)
    for num_tokens in prompt_lengths(most):
        for context_len in {num_tokens, most}:
            logits = model.forward(_end_of_prompt(num_tokens, context_len, kv_cache), kv_cache)
    for num_tokens in product_lengths(most):
        model.each_product(num_tokens)
    kv_cache.tensor[:, :, : -(-most // kv_cache.block_size)].zero_()
    return logits


def sample_every_way(logits: Tensor) -> Tensor:
    """Greedy, by temperature, and filtered, for one row and for many: torch loads its kernels at their first use too,
    and takes others for one row, for some, and for more than 16.

    Args:
        logits: [R, vocab].

    Returns: some tokens, [N] int64.
    """
    greedy, plain, filtered = (0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 2, 0.5)
    for copies in (1, 2, 32):
        for ways in ((greedy,), (plain,), (filtered,), (greedy, plain, filtered)):
            temperature, top_k, top_p = map(np.array, zip(*(ways * copies)))
            zeros = np.zeros(len(temperature))
            batch = SamplingBatch(zeros.astype(np.int64), temperature, top_k, top_p, uniform=zeros)
            tokens = sample_tokens(logits, batch)
        rows = torch.zeros(copies, dtype=torch.int64).to(logits.device)
        tokens = torch.cat((greedy_tokens(logits)[rows], tokens))
    return tokens


def prompt_lengths(most: int) -> list[int]:
    """``most``, below it the powers of two and what lies halfway between them, from 16 on, and 1; longest first."""
    between = (n for k in range(4, most.bit_length()) for n in (2**k, 3 * 2 ** (k - 1)) if n < most)
    return sorted({most, *between, 1}, reverse=True)


def product_lengths(most: int) -> list[int]:
    """Numbers of tokens up to ``most``, an eighth apart and no closer than 8, in multiples of 8."""
    lengths = [8]
    while lengths[-1] < most:
        lengths.append(lengths[-1] + max(8, lengths[-1] // 64 * 8))
    return [min(length, most) for length in lengths]


def _end_of_prompt(num_tokens: int, context_len: int, kv_cache: KVCache) -> ForwardBatch:
    """The last ``num_tokens`` of ``context_len``, in the pool's first blocks. The table is as wide as a step makes it:
    attention chooses its kernel by that."""
    device, num_blocks = kv_cache.device, -(-context_len // kv_cache.block_size)
    positions = torch.arange(context_len - num_tokens, context_len, device=device)
    return ForwardBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([context_len], dtype=torch.int32, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0),
        logits_rows=torch.tensor([num_tokens - 1], device=device),
        num_decodes=0,
        max_seqlen_q=num_tokens,
    )
