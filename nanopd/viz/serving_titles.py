"""What a picture of a serving benchmark shows, in words for its title: who is ahead, where, and by which number.

Each function returns a title, or its ``plain`` one where strategies cannot be compared: there is only one, or they run
on unequal hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanopd.bench.report import Report, Result

TIE = 0.01  # values that differ by less than this share are alike
ALIKE = "all alike"
SHORT_NAMES = {"second_token_gap": "Gap before the second token"}  # all other latencies have a short name in capitals


def throughput_title(report: Report, plain: str) -> str:
    """Who completes most at the highest rate."""
    runs = _at(report, max(_rates(report), default=0.0))
    if not _comparable(report) or not runs:
        return plain
    values = {name: run.summary.request_throughput for name, run in runs.items()}
    return f"Most completed at {_rate(runs)}: {_ahead(values)} ({max(values.values()):.3g}/s)"


def attainment_title(report: Report, target: float, plain: str) -> str:
    """Whose goodput is highest, if it was searched for all."""
    values = {name: found.rate for name, found in report.goodput.items()}
    if not _comparable(report) or set(values) != set(report.strategies):
        return plain
    if not any(values.values()):
        return f"Nobody serves {target:.0%} within the SLO"
    best = max(values.values())
    bounded = all(found.upper is not None for name, found in report.goodput.items() if values[name] == best)
    return f"Highest goodput: {_ahead(values)} ({'' if bounded else '≥ '}{best:.3g}/s)"  # ≥: no rate was too high


def latency_title(report: Report, metric: str, factor: float, unit: str, plain: str) -> str:
    """Whose p99 is lowest at the highest rate at which nothing was dropped: above it a p99 is one of survivors."""
    for rate in sorted(_rates(report), reverse=True):
        runs = _at(report, rate)
        found = {name: getattr(run.summary, metric).p99 for name, run in runs.items()}
        values = {name: value * factor for name, value in found.items() if value is not None}
        whole = all(run.summary.counters.num_dropped == 0 for run in runs.values())
        if _comparable(report) and whole and set(values) == set(report.strategies):
            name = SHORT_NAMES.get(metric, metric.upper())
            who = _ahead(values, -1)
            who += "" if who == ALIKE else " lowest"
            return f"{name} p99 at {_rate(runs)}: {who} ({min(values.values()):.3g} {unit})"
    return plain


def outcomes_title(report: Report, plain: str) -> str:
    """Who drops most at the highest rate."""
    if not any(run.summary.counters.num_dropped for run in report.results):
        return "Nothing was dropped"
    runs = _at(report, max(_rates(report)))
    values = {name: run.summary.counters.num_dropped / max(1, run.summary.offered) for name, run in runs.items()}
    if not _comparable(report) or not any(values.values()):
        return plain
    return f"Most dropped at {_rate(runs)}: {_ahead(values)} ({max(values.values()):.0%})"


# --- inside ----------------------------------------------------------------------------------------------------


def _comparable(report: Report) -> bool:
    return len(report.strategies) > 1 and not report.per_gpu


def _rates(report: Report) -> set[float]:
    return {run.rate for run in report.results}


def _at(report: Report, rate: float) -> dict[str, Result]:
    return {run.strategy: run for run in report.results if run.rate == rate}


def _rate(runs: Mapping[str, Result]) -> str:
    return f"{next(iter(runs.values())).rate:g}/s"


def _ahead(values: Mapping[str, float], sign: int = 1) -> str:
    """The names with the largest value, or with sign -1 the smallest one; ties are named together."""
    best = max(values.values(), key=lambda value: sign * value)
    names = [name for name, value in values.items() if abs(value - best) <= TIE * abs(best)]
    return ALIKE if len(names) == len(values) else " and ".join(names)
