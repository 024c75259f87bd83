"""Checks of the options that everything built around a model shares. No torch."""

from __future__ import annotations

from typing import Any, TypeGuard

from nanopd.errors import ConfigError
from nanopd.model.config import ModelConfig


def check_options(*, block_size: Any, num_blocks: Any, **flags: Any) -> None:
    """Raise ConfigError unless these can be a pool's sizes (``num_blocks`` may be None) and ``flags`` are bools."""
    if not is_int(block_size) or block_size < 8 or block_size % 8:
        raise ConfigError(f"block_size must be a positive multiple of 8, got {block_size!r}")
    if num_blocks is not None and (not is_int(num_blocks) or num_blocks < 1):
        raise ConfigError(f"num_blocks must be an int >= 1, got {num_blocks!r}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} must be True or False, got {flag!r}")


def model_len(config: ModelConfig, max_model_len: Any) -> Any:
    """``max_model_len``, by default the model's own limit. Raises ConfigError beyond it; other junk is left alone."""
    limit = config.max_position_embeddings
    if is_int(max_model_len) and max_model_len > limit:
        raise ConfigError(f"max_model_len {max_model_len} exceeds the {limit} positions of {config.name}")
    return limit if max_model_len is None else max_model_len


def is_int(value: Any) -> TypeGuard[int]:
    """An int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)
