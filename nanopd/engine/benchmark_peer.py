"""The same work in transformers, with the very same weights: what the engine's figures are compared with."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch

from nanopd.errors import ConfigError
from nanopd.model.config import ModelConfig
from nanopd.model.transformer import Transformer
from nanopd.model.weights import checkpoint_slots


def hf_config(config: ModelConfig) -> Any:
    """transformers' configuration of the same shape. Raises ConfigError for scaled RoPE, which is not translated."""
    from transformers import AutoConfig

    if config.rope_scaling is not None:
        raise ConfigError(f"{config.name} scales its positions; the comparison knows plain RoPE only")
    return AutoConfig.for_model(
        config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
    )


def hf_twin(model: Transformer) -> Any:
    """A transformers model whose parameters are views of ``model``'s weights: no second copy in memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(hf_config(model.config), dtype=model.dtype)
    twin.load_state_dict(checkpoint_slots(model.config, model.weights), assign=True, strict=False)
    if model.config.tie_word_embeddings:
        twin.tie_weights()
    rotary = twin.model.rotary_emb  # its buffers are computed, not loaded
    twin.model.rotary_emb = type(rotary)(config=twin.config).to(model.device)
    missing = [
        name for name, tensor in itertools.chain(twin.named_parameters(), twin.named_buffers()) if tensor.is_meta
    ]
    if missing:
        raise ConfigError(f"transformers' {model.config.architecture} has weights that ours lacks: {missing[:3]}")
    return twin.eval()


def generate_batch_seconds(twin: Any, prompts: Sequence[Sequence[int]], num_output: int) -> float:
    """Wall time of transformers' continuous batching, greedy, on a GPU; a short run before it warms up.

    Raises ConfigError if a request did not get its ``num_output`` tokens: then the time means nothing.
    """
    from transformers import GenerationConfig

    def run(some: Sequence[Sequence[int]], length: int) -> float:
        options = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begin = time.perf_counter()
        outputs = twin.generate_batch([list(prompt) for prompt in some], generation_config=options)
        seconds = time.perf_counter() - begin
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        if lengths != [length] * len(some):
            raise ConfigError(f"generate_batch returned {lengths[:8]}… tokens, not {length} for {len(some)} requests")
        return seconds

    run(prompts[:2], 2)
    return run(prompts, num_output)


@torch.inference_mode()
def decode_ms(twin: Any, batch_size: int, kv_len: int, steps: int, cache: Literal["dynamic", "static"]) -> float:
    """Median time of a greedy decode step of ``batch_size`` sequences that start with ``kv_len`` tokens of KV.

    A bare loop over ``forward``: faster than ``generate``, which adds checks of its own to every token.
    """
    from transformers import DynamicCache, StaticCache

    past: Any = DynamicCache(config=twin.config)
    if cache == "static":
        past = StaticCache(config=twin.config, max_cache_len=kv_len + steps + 2)
    device = twin.device
    tokens = torch.randint(twin.config.vocab_size, (batch_size, kv_len), device=device)
    times = []
    for step in range(steps + 2):  # the prompt, a step to warm up, and those that count
        begin = time.perf_counter()
        logits = twin(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1).logits
        tokens = logits[:, -1:].argmax(-1).reshape(batch_size, 1)
        tokens.tolist()  # the host waits, as it must to stop at an end token
        if step >= 2:
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)
