"""Serving benchmark: workloads, traces, open-loop load, metrics, goodput. Plain Python. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.bench.compare import GoodputSearch, Strategy, compare_strategies
    from nanopd.bench.goodput import Goodput, Probe, find_goodput
    from nanopd.bench.hardware import Hardware, check_equal
    from nanopd.bench.lengths import Fixed, LogNormal, Uniform
    from nanopd.bench.load import LoadOptions, run_load
    from nanopd.bench.metrics import SLO, Counters, Percentiles, Summary, percentile, summarize
    from nanopd.bench.named import named_workload, workload_names
    from nanopd.bench.records import Outcome, RequestRecord, finished_record
    from nanopd.bench.report import Report, Result, load_report, make_report
    from nanopd.bench.target import EngineThread, Target
    from nanopd.bench.traces import load_trace, read_azure, read_mooncake
    from nanopd.bench.workload import Arrival, Part, Schedule, Workload, poisson, schedules

_HOME = {
    "Arrival": "workload",
    "Counters": "metrics",
    "EngineThread": "target",
    "Fixed": "lengths",
    "Goodput": "goodput",
    "GoodputSearch": "compare",
    "Hardware": "hardware",
    "LoadOptions": "load",
    "LogNormal": "lengths",
    "Outcome": "records",
    "Part": "workload",
    "Percentiles": "metrics",
    "Probe": "goodput",
    "Report": "report",
    "RequestRecord": "records",
    "Result": "report",
    "SLO": "metrics",
    "Schedule": "workload",
    "Strategy": "compare",
    "Summary": "metrics",
    "Target": "target",
    "Uniform": "lengths",
    "Workload": "workload",
    "check_equal": "hardware",
    "compare_strategies": "compare",
    "find_goodput": "goodput",
    "finished_record": "records",
    "load_report": "report",
    "load_trace": "traces",
    "make_report": "report",
    "named_workload": "named",
    "percentile": "metrics",
    "poisson": "workload",
    "read_azure": "traces",
    "read_mooncake": "traces",
    "run_load": "load",
    "schedules": "workload",
    "summarize": "metrics",
    "workload_names": "named",
}

__all__ = [
    "Arrival",
    "Counters",
    "EngineThread",
    "Fixed",
    "Goodput",
    "GoodputSearch",
    "Hardware",
    "LoadOptions",
    "LogNormal",
    "Outcome",
    "Part",
    "Percentiles",
    "Probe",
    "Report",
    "RequestRecord",
    "Result",
    "SLO",
    "Schedule",
    "Strategy",
    "Summary",
    "Target",
    "Uniform",
    "Workload",
    "check_equal",
    "compare_strategies",
    "find_goodput",
    "finished_record",
    "load_report",
    "load_trace",
    "make_report",
    "named_workload",
    "percentile",
    "poisson",
    "read_azure",
    "read_mooncake",
    "run_load",
    "schedules",
    "summarize",
    "workload_names",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
