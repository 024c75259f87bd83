"""The model layer: configurations, the decoder-only transformer, and loading of checkpoints.

Names are imported on first use: ``nanopd.model.ModelConfig`` never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.model.batch import ForwardBatch
    from nanopd.model.config import ModelConfig, RopeScaling
    from nanopd.model.loader import LoadedModel, load_model
    from nanopd.model.tokenizer import Tokenizer
    from nanopd.model.transformer import Transformer

_LAZY = {
    "ForwardBatch": "batch",
    "ModelConfig": "config",
    "RopeScaling": "config",
    "preset": "presets",
    "presets": "presets",
    "LoadedModel": "loader",
    "load_model": "loader",
    "Tokenizer": "tokenizer",
    "Transformer": "transformer",
}

__all__ = ["ForwardBatch", "LoadedModel", "ModelConfig", "RopeScaling", "Tokenizer", "Transformer", "load_model"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"nanopd.model.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
