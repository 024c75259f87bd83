"""nanopd: an LLM inference engine small enough to read, with prefill and decode in separate places.

The names below are imported on first use, so that ``import nanopd`` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.engine.llm import LLM
    from nanopd.engine.outputs import RequestOutput
    from nanopd.engine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": "nanopd.engine.llm",
    "RequestOutput": "nanopd.engine.outputs",
    "SamplingParams": "nanopd.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
