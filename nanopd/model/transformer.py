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
from nanopd.model.residual import ResidualStream
from nanopd.model.rope import cos_sin_table
from nanopd.model.weights import LayerWeights, Weights
from nanopd.ops.alike import alike
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
        step = _Step(self, batch)
        for i, layer in enumerate(self.weights.layers):
            self._layer(layer, step, *kv_cache.layer(i))
            if after_layer is not None:
                after_layer(i)
        if batch.logits_rows.shape[0] == 0:  # every chunk ends before its prompt does
            return step.qkv.new_empty(0, self.config.vocab_size)
        return step.stream.logits(batch.logits_rows, self.weights.final_norm, self.weights.lm_head, self.ops)

    __call__ = forward

    def each_product(self, num_tokens: int) -> None:
        """Each matrix product of a layer once, for so many tokens: by their number a library picks its kernels. That of
        the logits too, if they are few: a step has one row of them per sequence."""
        w = self.weights.layers[0]
        products = [(w.qkv, w.qkv_bias), (w.attn_out, None), (w.gate_up, None), (w.down, None)]
        if num_tokens <= 64:
            products.append((self.weights.lm_head, None))
        for weight, bias in products:
            x = torch.zeros((num_tokens, weight.shape[1]), dtype=self.dtype, device=self.device)
            self.ops.linear(x, weight, bias, out=x.new_empty(num_tokens, weight.shape[0]))

    def _layer(self, w: LayerWeights, step: _Step, k_cache: Tensor, v_cache: Tensor) -> None:
        """One layer: attention, then the MLP, each reading ``step.stream`` through a norm and adding to it."""
        s, ops, eps = step, step.ops, self.config.rms_norm_eps
        s.stream.linear(w.input_norm, w.qkv, w.qkv_bias, out=s.qkv)
        rotation = (s.batch.positions, self.cos_sin)
        ops.norm_rope_store(s.q, s.k, s.v, w.q_norm, w.k_norm, eps, *rotation, k_cache, v_cache, s.batch.slot_mapping)
        # Decodes and prefill chunks read the same cache through different kernels.
        if s.decodes is not None:
            q, rest = s.decodes
            ops.paged_decode_attention(q, k_cache, v_cache, *rest)
        if s.prefills is not None:
            q, others = s.prefills
            ops.paged_prefill_attention(q, k_cache, v_cache, *others)
        s.stream.add_linear(s.attended, w.attn_out)
        s.stream.gated_linear(w.mlp_norm, w.gate_up, out=s.gated)
        s.stream.add_linear(s.gated, w.down)


class _Step:
    """What the layers of one forward pass have in common: its input, and the activations, which each layer overwrites.

    To allocate and slice them anew in every layer would cost the host more than launching the kernels that fill them.
    """

    def __init__(self, model: Transformer, batch: ForwardBatch) -> None:
        config, num_tokens = model.config, batch.token_ids.shape[0]
        self.batch = batch
        self.ops = alike(model.ops)
        embedded = embedding(batch.token_ids, model.weights.embedding)  # [T, hidden_size]
        self.stream = ResidualStream(self.ops, embedded, config.rms_norm_eps)

        def empty(width: int) -> Tensor:
            return torch.empty((num_tokens, width), dtype=model.dtype, device=model.device)

        self.gated = empty(config.intermediate_size)
        self.qkv, self.attended = empty(config.q_size + 2 * config.kv_size), empty(config.q_size)
        parts = self.qkv.split([config.q_size, config.kv_size, config.kv_size], dim=1)
        self.q, self.k, self.v = (part.unflatten(1, (-1, config.head_dim)) for part in parts)  # [T, heads, D]
        out = self.attended.view(self.q.shape)

        # For attention: the queries, and the arguments that follow the cache.
        n, scale = batch.num_decodes, config.head_dim**-0.5
        tables, lens = batch.block_tables, batch.context_lens
        self.decodes = (self.q[:n], (tables[:n], lens[:n], scale, out[:n])) if n > 0 else None
        self.prefills = None
        if n < batch.num_seqs:
            starts = batch.cu_seqlens_q[n:] - n
            self.prefills = self.q[n:], (tables[n:], starts, lens[n:], batch.max_seqlen_q, scale, out[n:])
