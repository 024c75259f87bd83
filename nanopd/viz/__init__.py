"""Pictures and widgets, drawn from live objects. Plain functions return Matplotlib axes; widgets redraw on each action.

Nothing here imports torch, and Matplotlib and ipywidgets load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.viz.block_explorer import BlockTableExplorer
    from nanopd.viz.block_table import draw_pool
    from nanopd.viz.cluster_designer import ClusterDesigner
    from nanopd.viz.cost_model import LabelledStep, draw_analytical_fits, draw_predictions, draw_step_terms
    from nanopd.viz.frontier import draw_frontier, draw_frontiers
    from nanopd.viz.predictor import Coverage, draw_coverage, draw_posterior
    from nanopd.viz.roofline import RooflinePoint, Work, decode_work, draw_roofline, prefill_work
    from nanopd.viz.roofline_explorer import RooflineExplorer
    from nanopd.viz.route_explorer import RouteExplorer
    from nanopd.viz.route_map import RouteMap, draw_route_map
    from nanopd.viz.serving import draw_attainment, draw_latency, draw_outcomes, draw_throughput, draw_violins
    from nanopd.viz.step_explorer import StepExplorer
    from nanopd.viz.step_timeline import StepTimeline
    from nanopd.viz.style import PALETTE, styled
    from nanopd.viz.timeline import draw_steps, draw_timeline, spans
    from nanopd.viz.transfer_timeline import TransferTimelineWidget, draw_transfer_timeline
    from nanopd.viz.worker_timeline import draw_worker_steps

_HOME = {
    "BlockTableExplorer": "block_explorer",
    "draw_pool": "block_table",
    "ClusterDesigner": "cluster_designer",
    "draw_frontier": "frontier",
    "draw_frontiers": "frontier",
    "LabelledStep": "cost_model",
    "draw_analytical_fits": "cost_model",
    "draw_predictions": "cost_model",
    "draw_step_terms": "cost_model",
    "RooflinePoint": "roofline",
    "Work": "roofline",
    "decode_work": "roofline",
    "draw_roofline": "roofline",
    "prefill_work": "roofline",
    "RooflineExplorer": "roofline_explorer",
    "Coverage": "predictor",
    "draw_coverage": "predictor",
    "draw_posterior": "predictor",
    "RouteExplorer": "route_explorer",
    "RouteMap": "route_map",
    "draw_route_map": "route_map",
    "draw_attainment": "serving",
    "draw_latency": "serving",
    "draw_outcomes": "serving",
    "draw_throughput": "serving",
    "draw_violins": "serving",
    "StepExplorer": "step_explorer",
    "StepTimeline": "step_timeline",
    "TransferTimelineWidget": "transfer_timeline",
    "PALETTE": "style",
    "styled": "style",
    "draw_steps": "timeline",
    "draw_timeline": "timeline",
    "draw_transfer_timeline": "transfer_timeline",
    "draw_worker_steps": "worker_timeline",
    "spans": "timeline",
}

__all__ = [
    "BlockTableExplorer",
    "ClusterDesigner",
    "Coverage",
    "LabelledStep",
    "PALETTE",
    "RooflineExplorer",
    "RooflinePoint",
    "RouteExplorer",
    "RouteMap",
    "StepExplorer",
    "StepTimeline",
    "TransferTimelineWidget",
    "Work",
    "decode_work",
    "draw_analytical_fits",
    "draw_attainment",
    "draw_coverage",
    "draw_frontier",
    "draw_frontiers",
    "draw_latency",
    "draw_outcomes",
    "draw_pool",
    "draw_posterior",
    "draw_predictions",
    "draw_roofline",
    "draw_route_map",
    "draw_step_terms",
    "draw_steps",
    "draw_throughput",
    "draw_timeline",
    "draw_transfer_timeline",
    "draw_violins",
    "draw_worker_steps",
    "prefill_work",
    "spans",
    "styled",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
