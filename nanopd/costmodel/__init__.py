"""Cost model: what a step and a request cost here. No torch, except in the profiler. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.costmodel.analytical import AnalyticalModel
    from nanopd.costmodel.cost_model import CostModel, LoadState, RequestSize
    from nanopd.costmodel.estimate import Estimate
    from nanopd.costmodel.features import StepFeatures, StepPoint
    from nanopd.costmodel.hardware_profile import (
        HardwareProfile,
        load_profile,
        own_profile,
        own_profile_path,
        preset,
        preset_names,
    )
    from nanopd.costmodel.places import measure_cluster, measure_link
    from nanopd.costmodel.profiler import measure_place, profile_device
    from nanopd.costmodel.quality import FitQuality
    from nanopd.costmodel.step_cost import StepTimeCost
    from nanopd.costmodel.step_fit import StepTimeFit, fit_step_time
    from nanopd.costmodel.step_time import StepTimeModel, prefill_steps

_HOME = {
    "AnalyticalModel": "analytical",
    "CostModel": "cost_model",
    "Estimate": "estimate",
    "FitQuality": "quality",
    "HardwareProfile": "hardware_profile",
    "LoadState": "cost_model",
    "RequestSize": "cost_model",
    "StepFeatures": "features",
    "StepPoint": "features",
    "StepTimeCost": "step_cost",
    "StepTimeFit": "step_fit",
    "StepTimeModel": "step_time",
    "fit_step_time": "step_fit",
    "load_profile": "hardware_profile",
    "measure_cluster": "places",
    "measure_link": "places",
    "measure_place": "profiler",
    "own_profile": "hardware_profile",
    "own_profile_path": "hardware_profile",
    "prefill_steps": "step_time",
    "preset": "hardware_profile",
    "preset_names": "hardware_profile",
    "profile_device": "profiler",
}

__all__ = [
    "AnalyticalModel",
    "CostModel",
    "Estimate",
    "FitQuality",
    "HardwareProfile",
    "LoadState",
    "RequestSize",
    "StepFeatures",
    "StepPoint",
    "StepTimeCost",
    "StepTimeFit",
    "StepTimeModel",
    "fit_step_time",
    "load_profile",
    "measure_cluster",
    "measure_link",
    "measure_place",
    "own_profile",
    "own_profile_path",
    "prefill_steps",
    "preset",
    "preset_names",
    "profile_device",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562), so that all but the profiler can be used without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
