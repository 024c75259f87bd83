"""The decoder-only transformer of Llama, Qwen2 and Qwen3, over a paged KV cache.

There is one forward pass for everything: a whole prompt, a chunk of one, a batch of decodes, or any mix. Tokens of all
sequences lie end to end in [T, ...] tensors; only attention knows which sequence a token belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding

from nanopd.model.batch import ForwardBatch
from nanopd.model.config import ModelConfig
from nanopd.model.rope import cos_sin_table
from nanopd.model.weights import LayerWeights, Weights
from nanopd.ops.interface import Ops

if TYPE_CHECKING:
    from nanopd.kv.cache import KVCache


class Transformer:
    """Weights and ops of one device. Holds no state between steps: all of that is in the KV cache.

    A forward pass never waits for the device and takes every size from the host, so it can be captured into a CUDA
    graph. No tensor asks for gradients.

    Args:
        config: shapes.
        weights: on one device, in one dtype.
        ops: kernels for that device.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.cos_sin = cos_sin_table(config, self.device)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, after_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Run the step: write its keys and values to the cache, return next-token logits.

        Args:
            batch: the tokens, see ``ForwardBatch`` for its invariants. Positions must be below the model's
                ``max_position_embeddings`` (the caller checks: looking would mean waiting for the device).
            kv_cache: same device and dtype as the weights. Blocks of earlier tokens are read, ``slot_mapping`` written.
            after_layer: called with i when layer i has been enqueued, its keys and values included: the place to start
                moving them elsewhere while later layers compute.

        Returns: logits [R, vocab] in the model's dtype, one row per entry of ``batch.logits_rows``.
        """
        rms_norm, eps = self.ops.rms_norm, self.config.rms_norm_eps
        prefill_cu_seqlens = batch.cu_seqlens_q[batch.num_decodes :] - batch.num_decodes
        residual = embedding(batch.token_ids, self.weights.embedding)
        x = rms_norm(residual, self.weights.layers[0].input_norm, eps)
        for i, layer in enumerate(self.weights.layers):
            if i > 0:
                # A layer leaves its last addition to the next norm, which reads both terms anyway.
                x, residual = rms_norm(x, layer.input_norm, eps, residual)
            x, residual = self._layer(layer, x, residual, batch, prefill_cu_seqlens, *kv_cache.layer(i))
            if after_layer is not None:
                after_layer(i)
        if batch.logits_rows.shape[0] == 0:  # every chunk ends before its prompt does
            return x.new_empty(0, self.config.vocab_size)
        # Only wanted rows go on: a prefill chunk of 2,048 tokens needs one row of logits at most.
        x, residual = x[batch.logits_rows], residual[batch.logits_rows]
        x, _ = rms_norm(x, self.weights.final_norm, eps, residual)
        return self.ops.linear(x, self.weights.lm_head)

    __call__ = forward

    def _layer(
        self,
        w: LayerWeights,
        x: Tensor,
        residual: Tensor,
        batch: ForwardBatch,
        prefill_cu_seqlens: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One layer. ``x`` is the normed input, ``residual`` the input itself; what is returned adds up to the output.

        All are [T, hidden_size].
        """
        ops, config, eps = self.ops, self.config, self.config.rms_norm_eps
        qkv = ops.linear(x, w.qkv, w.qkv_bias)
        q, k, v = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=1)
        q, k, v = (t.unflatten(1, (-1, config.head_dim)) for t in (q, k, v))
        rotation = (batch.positions, self.cos_sin)
        q = ops.norm_rope_store(q, k, v, w.q_norm, w.k_norm, eps, *rotation, k_cache, v_cache, batch.slot_mapping)
        x = ops.linear(self._attention(q, k_cache, v_cache, batch, prefill_cu_seqlens), w.attn_out)

        x, residual = ops.rms_norm(x, w.mlp_norm, eps, residual)
        x = ops.linear(ops.gated_linear(x, w.gate_up), w.down)
        return x, residual

    def _attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, prefill_cu_seqlens: Tensor
    ) -> Tensor:
        """q [T, Hq, D] -> [T, Hq * D]. Decodes and prefill chunks read the same cache through different kernels."""
        n, scale = batch.num_decodes, self.config.head_dim**-0.5
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n > 0:
            self.ops.paged_decode_attention(
                q[:n], k_cache, v_cache, batch.block_tables[:n], batch.context_lens[:n], scale, out=out[:n]
            )
        if n < batch.num_seqs:
            self.ops.paged_prefill_attention(
                q[n:],
                k_cache,
                v_cache,
                batch.block_tables[n:],
                prefill_cu_seqlens,
                batch.context_lens[n:],
                batch.max_seqlen_q,
                scale,
                out=out[n:],
            )
        return out.flatten(1)
