"""The engine: requests, scheduler, loop (no torch), and sampler and runner (torch). Names load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "SamplingParams": "sampling_params",
    "Request": "request",
    "RequestState": "request",
    "FinishReason": "request",
    "Stamp": "request",
    "ScheduledChunk": "scheduler",
    "StepPlan": "scheduler",
    "SchedulerConfig": "scheduler",
    "Scheduler": "scheduler",
    "Engine": "engine",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "RequestMetrics": "outputs",
    "Detokenizer": "detokenizer",
    "LLM": "llm",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
