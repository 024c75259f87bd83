"""Simulator: the real scheduler, block managers, router and central scheduler under a virtual clock. No torch.

Names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.sim.checks import check_littles_law, check_work_conserving
    from nanopd.sim.cluster import SimulatedCluster
    from nanopd.sim.driver import VirtualDriver
    from nanopd.sim.layouts import Layout, ratios, splits
    from nanopd.sim.link import Lane, SimulatedLink
    from nanopd.sim.load import run_virtual
    from nanopd.sim.recording import Recorder, Recording, load_recording
    from nanopd.sim.runner import SimulatedRunner
    from nanopd.sim.search import search_layouts, simulate

_HOME = {
    "Lane": "link",
    "Layout": "layouts",
    "Recorder": "recording",
    "Recording": "recording",
    "SimulatedCluster": "cluster",
    "SimulatedLink": "link",
    "SimulatedRunner": "runner",
    "VirtualDriver": "driver",
    "check_littles_law": "checks",
    "check_work_conserving": "checks",
    "load_recording": "recording",
    "ratios": "layouts",
    "run_virtual": "load",
    "search_layouts": "search",
    "simulate": "search",
    "splits": "layouts",
}

__all__ = [
    "Lane",
    "Layout",
    "Recorder",
    "Recording",
    "SimulatedCluster",
    "SimulatedLink",
    "SimulatedRunner",
    "VirtualDriver",
    "check_littles_law",
    "check_work_conserving",
    "load_recording",
    "ratios",
    "run_virtual",
    "search_layouts",
    "simulate",
    "splits",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
