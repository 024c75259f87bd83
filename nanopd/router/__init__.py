"""Router: where a request runs, and the state machine that carries it there. Plain Python. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.router.adaptive import Adaptive
    from nanopd.router.central import CentralConfig, CentralScheduler
    from nanopd.router.decision import Decision, Path, Policy
    from nanopd.router.policies import (
        POLICY_NAMES,
        AlwaysCollocated,
        AlwaysDisaggregated,
        PrefillLengthThreshold,
        RoundRobin,
        make_policy,
    )
    from nanopd.router.predictor import OutputLengthPredictor
    from nanopd.router.rule import SeedEstimate, SeedRule
    from nanopd.router.server import Server
    from nanopd.router.situation import Situation
    from nanopd.router.slo import SloAware
    from nanopd.router.snapshot import Snapshot, WorkerSnapshot

_HOME = {
    "Adaptive": "adaptive",
    "AlwaysCollocated": "policies",
    "AlwaysDisaggregated": "policies",
    "CentralConfig": "central",
    "CentralScheduler": "central",
    "Decision": "decision",
    "OutputLengthPredictor": "predictor",
    "POLICY_NAMES": "policies",
    "Path": "decision",
    "Policy": "decision",
    "PrefillLengthThreshold": "policies",
    "RoundRobin": "policies",
    "SeedEstimate": "rule",
    "SeedRule": "rule",
    "Server": "server",
    "Situation": "situation",
    "SloAware": "slo",
    "Snapshot": "snapshot",
    "WorkerSnapshot": "snapshot",
    "make_policy": "policies",
}

__all__ = [
    "Adaptive",
    "AlwaysCollocated",
    "AlwaysDisaggregated",
    "CentralConfig",
    "CentralScheduler",
    "Decision",
    "OutputLengthPredictor",
    "POLICY_NAMES",
    "Path",
    "Policy",
    "PrefillLengthThreshold",
    "RoundRobin",
    "SeedEstimate",
    "SeedRule",
    "Server",
    "Situation",
    "SloAware",
    "Snapshot",
    "WorkerSnapshot",
    "make_policy",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
