"""The engine: requests, scheduler, loop (no torch), and sampler, runner and LLM (torch). Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.engine.beam import BeamOutput, BeamSearch
    from nanopd.engine.detokenizer import Detokenizer
    from nanopd.engine.engine import Engine, StepRecord
    from nanopd.engine.generate import OutputStream
    from nanopd.engine.llm import LLM
    from nanopd.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from nanopd.engine.plan import ScheduledChunk, SchedulerConfig, StepPlan
    from nanopd.engine.request import FinishReason, Request, RequestState, Stamp
    from nanopd.engine.runner import ModelRunner
    from nanopd.engine.sampling_params import SamplingParams
    from nanopd.engine.scheduler import Scheduler

_HOME = {
    "BeamOutput": "beam",
    "BeamSearch": "beam",
    "CompletionOutput": "outputs",
    "Detokenizer": "detokenizer",
    "Engine": "engine",
    "FinishReason": "request",
    "LLM": "llm",
    "ModelRunner": "runner",
    "OutputStream": "generate",
    "Request": "request",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestState": "request",
    "SamplingParams": "sampling_params",
    "ScheduledChunk": "plan",
    "Scheduler": "scheduler",
    "SchedulerConfig": "plan",
    "Stamp": "request",
    "StepPlan": "plan",
    "StepRecord": "engine",
}

__all__ = [
    "LLM",
    "BeamOutput",
    "BeamSearch",
    "CompletionOutput",
    "Detokenizer",
    "Engine",
    "FinishReason",
    "ModelRunner",
    "OutputStream",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestState",
    "SamplingParams",
    "ScheduledChunk",
    "Scheduler",
    "SchedulerConfig",
    "Stamp",
    "StepPlan",
    "StepRecord",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562), so that the policy can be used without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
