"""Shapes of well-known models, for timing with random weights (``dummy:NAME``) and for the cost model. No torch."""

from __future__ import annotations

from nanopd.errors import ModelLoadError
from nanopd.model.config import ModelConfig


def presets() -> dict[str, ModelConfig]:
    """Preset name -> shape, as published with the checkpoint that the comment names.

    ``eos_token_ids`` is empty: a random model says nothing, so it must not stop early by chance either.
    """
    shapes = [
        ModelConfig(  # Qwen/Qwen3-8B
            name="qwen3-8b",
            architecture="qwen3",
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            rope_scaling=None,
            max_position_embeddings=40960,
            tie_word_embeddings=False,
            qkv_bias=False,
            qk_norm=True,
        ),
        ModelConfig(  # meta-llama/Meta-Llama-3-8B
            name="llama3-8b",
            architecture="llama",
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            rope_scaling=None,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            qkv_bias=False,
            qk_norm=False,
        ),
        ModelConfig(  # Qwen/Qwen2-1.5B-Instruct
            name="qwen2-1.5b",
            architecture="qwen2",
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_layers=28,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            rope_scaling=None,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            qkv_bias=True,
            qk_norm=False,
        ),
        ModelConfig(  # ours: the smallest shape that every kernel supports
            name="tiny",
            architecture="llama",
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=512,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            rope_scaling=None,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            qkv_bias=False,
            qk_norm=False,
        ),
    ]
    return {shape.name: shape for shape in shapes}


def preset(name: str) -> ModelConfig:
    """One preset by name.

    Raises:
        ModelLoadError: no such preset; the message lists those there are.
    """
    known = presets()
    if name not in known:
        raise ModelLoadError(f"no shape preset {name!r}; known: {', '.join(known)}")
    return known[name]
