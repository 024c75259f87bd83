"""The weights of a model as plain tensors, and the names under which a checkpoint stores them.

Projections that read the same input are fused into one matrix (q, k, v; gate, up): one large matrix product reads the
input once and launches once. Checkpoints store them apart, so ``checkpoint_slots`` maps each checkpoint name to the
slice of a fused tensor it belongs in; loading is then a copy into the slice, and what is left over is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanopd.model.config import ModelConfig


@dataclass
class LayerWeights:
    """One decoder layer. H hidden size, F intermediate size, D head dim; matrices are [out, in] as in nn.Linear."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(num_heads + 2 num_kv_heads) * D, H]: query heads, then key heads, then value heads
    qkv_bias: Tensor | None  # [(num_heads + 2 num_kv_heads) * D], Qwen2 only
    q_norm: Tensor | None  # [D], Qwen3 only
    k_norm: Tensor | None  # [D], Qwen3 only
    attn_out: Tensor  # [H, num_heads * D]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2 F, H]: gate, then up
    down: Tensor  # [H, F]


@dataclass
class Weights:
    """A whole model."""

    embedding: Tensor  # [vocab, H]
    layers: list[LayerWeights]
    final_norm: Tensor  # [H]
    lm_head: Tensor  # [vocab, H]; the very tensor of ``embedding`` when tied


def allocate(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Weights:
    """Uninitialised weights of the right shapes, to be filled by a loader."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden, qkv = config.hidden_size, config.q_size + 2 * config.kv_size
    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(qkv, hidden),
            qkv_bias=empty(qkv) if config.qkv_bias else None,
            q_norm=empty(config.head_dim) if config.qk_norm else None,
            k_norm=empty(config.head_dim) if config.qk_norm else None,
            attn_out=empty(hidden, config.q_size),
            mlp_norm=empty(hidden),
            gate_up=empty(2 * config.intermediate_size, hidden),
            down=empty(hidden, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    ]
    embedding = empty(config.vocab_size, hidden)
    lm_head = embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
    return Weights(embedding, layers, empty(hidden), lm_head)


def checkpoint_slots(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Checkpoint tensor name -> view into ``weights`` of the same shape as the tensor in the checkpoint.

    The views cover every element exactly once; writing to all of them fills the model.
    """
    slots = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.tie_word_embeddings:
        slots["lm_head.weight"] = weights.lm_head
    qkv_sizes = [config.q_size, config.kv_size, config.kv_size]
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}"
        slots[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        slots[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
        slots[f"{prefix}.self_attn.o_proj.weight"] = layer.attn_out
        slots[f"{prefix}.mlp.down_proj.weight"] = layer.down
        for name, rows in zip("qkv", layer.qkv.split(qkv_sizes), strict=True):
            slots[f"{prefix}.self_attn.{name}_proj.weight"] = rows
        for name, rows in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
            slots[f"{prefix}.mlp.{name}_proj.weight"] = rows
        if layer.qkv_bias is not None:
            for name, rows in zip("qkv", layer.qkv_bias.split(qkv_sizes), strict=True):
                slots[f"{prefix}.self_attn.{name}_proj.bias"] = rows
        if layer.q_norm is not None and layer.k_norm is not None:
            slots[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm
            slots[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm
    return slots
