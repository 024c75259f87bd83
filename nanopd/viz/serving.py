"""Serving benchmark as pictures: one curve per strategy over the offered rate, with the SLO where it belongs.

Each function takes a `nanopd.bench.Report`. The title says who is ahead; unequal hardware is drawn per GPU (on a
CPU per device), and then it says so. Legends stand below the axes, where they hide no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from nanopd.bench.hardware import device_word
from nanopd.errors import ConfigError
from nanopd.viz.serving_titles import attainment_title, latency_title, outcomes_title, throughput_title
from nanopd.viz.style import ALERT_COLOR, GREY, INK, PALETTE, axes_for, bare_figure, styled, tint

if TYPE_CHECKING:
    from nanopd.bench.metrics import Percentiles
    from nanopd.bench.report import Report, Result

LATENCIES = {  # field of the summary -> name, factor, unit
    "ttft": ("time to first token", 1e3, "ms"),
    "tpot": ("time per output token", 1e3, "ms"),
    "second_token_gap": ("gap before the second token", 1e3, "ms"),
    "itl": ("gap between tokens", 1e3, "ms"),
    "e2e": ("end-to-end latency", 1.0, "s"),
}
MARKERS = "osD^vP*"
DROP_STYLES = (
    (INK, "///"),
    (GREY, "\\\\\\"),
    (ALERT_COLOR, "xxx"),
    ("#B0B0B0", "..."),
)  # refused, timed out, failed, unfinished


def draw_throughput(report: Report, *, ax: Axes | None = None) -> Axes:
    """Completed requests per second against offered ones; where a curve leaves the dotted line, load piles up."""
    with styled():
        ax = axes_for(ax, (7, 4.5))
        highest = 0.0
        for name, color, marker, runs in _curves(report):
            x = [_rate(report, run) for run in runs]
            y = [run.summary.request_throughput / _divisor(report, run) for run in runs]
            ax.plot(x, y, color=color, marker=marker, label=name)
            highest = max([highest, *x])
        ax.plot([0, highest], [0, highest], color=GREY, linestyle=":", linewidth=1.5, label="all that is offered")
        ax.set_ylabel(f"completed (requests/s{_per_gpu(report)})")
        _finish(ax, report, throughput_title(report, "Throughput"))
    return ax


def draw_latency(report: Report, metric: str = "e2e", *, ax: Axes | None = None) -> Axes:
    """p50 (solid) and p99 (dashed) of ``metric``, a key of `LATENCIES`, over the rate, on a logarithmic axis.

    Hollow points cover fewer requests than were offered: the latencies of drops are not in them.

    Raises ConfigError for another metric.
    """
    name, factor, unit = _latency(metric)
    with styled():
        ax = axes_for(ax, (7, 4.5))
        for strategy, color, marker, runs in _curves(report):
            for quantile, style in (("p50", "-"), ("p99", "--")):
                points = [(run, getattr(_percentiles(run, metric), quantile)) for run in runs]
                known = [(run, value) for run, value in points if value is not None]
                x = [_rate(report, run) for run, _ in known]
                y = [value * factor for _, value in known]
                ax.plot(x, y, color=color, linestyle=style, label=f"{strategy}, {quantile}")
                for run, a, b in zip((run for run, _ in known), x, y):
                    whole = run.summary.counters.num_dropped == 0
                    ax.plot([a], [b], marker=marker, color=color, markerfacecolor=color if whole else "white")
        _slo_line(ax, report, metric, factor, unit)
        if any(getattr(run.summary, metric).count for run in report.results):
            _log_axis(ax)
        ax.set_ylabel(f"{name} ({unit})")
        _finish(ax, report, latency_title(report, metric, factor, unit, name.capitalize()))
    return ax


def draw_violins(report: Report, metric: str = "ttft", *, ax: Axes | None = None) -> Axes:
    """The whole distribution of ``metric`` ("ttft", "tpot" or "e2e") for each rate and strategy, with its median.

    Raises ConfigError for another metric.
    """
    if metric not in ("ttft", "tpot", "e2e"):
        raise ConfigError(f"violins are drawn of ttft, tpot or e2e, not of {metric!r}")
    name, factor, unit = _latency(metric)
    rates = sorted({run.rate for run in report.results})
    count = len(report.strategies)
    with styled():
        ax = axes_for(ax, (max(7.0, 0.55 * count * len(rates) + 2.5), 4.5))
        for index, (strategy, color, _, runs) in enumerate(_curves(report)):
            offset = (index - (count - 1) / 2) * 0.8 / count
            for run in runs:
                values = [value * factor for value in run.samples.get(f"{metric}_s", ())]
                _violin(ax, rates.index(run.rate) + offset, values, 0.7 / count, color)
            ax.plot([], [], color=color, linewidth=8, label=strategy)
        _slo_line(ax, report, metric, factor, unit)
        _log_axis(ax)
        ax.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        ax.set_ylabel(f"{name} ({unit})")
        _finish(ax, report, f"{name.capitalize()} of completed requests", from_zero=False)
    return ax


def draw_outcomes(report: Report, *, ax: Axes | None = None) -> Axes:
    """Completed and dropped requests, by reason, as stacked bars: one group per rate, one bar per strategy."""
    rates = sorted({run.rate for run in report.results})
    count = len(report.strategies)
    with styled():
        ax = axes_for(ax, (max(7.0, 0.45 * count * len(rates) + 2.5), 4.5))
        handles: dict[str, Patch] = {}
        for index, (strategy, color, _, runs) in enumerate(_curves(report)):
            offset = (index - (count - 1) / 2) * 0.8 / count
            for run in runs:
                counters = run.summary.counters
                styles = [(color, None), *DROP_STYLES]
                parts = [(f"completed, {strategy}", counters.completed), *counters.dropped.items()]
                bottom = 0
                for (label, number), (paint, hatch) in zip(parts, styles, strict=True):
                    if number:
                        look: dict[str, Any] = {
                            "facecolor": tint(paint, 0.3) if hatch else paint,
                            "edgecolor": paint,
                            "hatch": hatch,
                        }
                        ax.bar(rates.index(run.rate) + offset, number, 0.7 / count, bottom, **look)
                        handles.setdefault(label, Patch(label=label, **look))
                    bottom += number
        ax.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        ax.set_ylabel("requests")
        _finish(ax, report, outcomes_title(report, "Completed and dropped requests"), from_zero=False, legend=False)
        order = sorted(handles, key=lambda label: not label.startswith("completed"))
        _legend_below(ax, [handles[label] for label in order])
    return ax


def draw_attainment(report: Report, *, target: float = 0.9, ax: Axes | None = None) -> Axes:
    """Share of offered requests within TTFT and TPOT over the rate, and each strategy's goodput where it was searched.

    Small points are the rates that the search ran in between.
    """
    with styled():
        ax = axes_for(ax, (7, 4.5))
        for name, color, marker, runs in _curves(report):
            found = report.goodput.get(name)
            gpus = _divisor(report, runs[0]) if runs else 1
            probes = {probe.rate / gpus: probe.attainment for probe in found.probes} if found else {}
            marked = {_rate(report, run): run.summary.attainment for run in runs}
            line = dict(sorted({**probes, **marked}.items()))
            least = "≥ " if found and found.upper is None else ""  # no rate that was tried was too high
            label = f"{name}: goodput {least}{found.rate / gpus:.3g}/s" if found else name
            ax.plot(list(line), [100 * y for y in line.values()], color=color, marker=".", label=label)
            ax.plot(list(marked), [100 * y for y in marked.values()], color=color, marker=marker, linestyle="none")
            if found and found.rate:
                ax.plot([found.rate / gpus] * 2, [0, 100 * target], color=color, linestyle=":", linewidth=1.5)
        ax.axhline(100 * target, color=ALERT_COLOR, linewidth=1.2)
        ax.annotate(f"{target:.0%}", (1, 100 * target), (4, 0), xycoords=("axes fraction", "data"),
                    textcoords="offset points", va="center", color=ALERT_COLOR)  # fmt: skip
        ax.set_ylabel("offered requests within the SLO (%)")
        _finish(ax, report, attainment_title(report, target, "SLO attainment"))
        ax.set_ylim(-3, 106)
    return ax


def figures(report: Report) -> dict[str, Figure]:
    """Every picture, by file name. They belong to nobody's pyplot."""
    drawn: dict[str, Figure] = {}
    for name, draw in (
        ("throughput", draw_throughput),
        ("attainment", draw_attainment),
        ("outcomes", draw_outcomes),
        ("ttft", lambda r, ax: draw_latency(r, "ttft", ax=ax)),
        ("tpot", lambda r, ax: draw_latency(r, "tpot", ax=ax)),
        ("e2e", lambda r, ax: draw_latency(r, "e2e", ax=ax)),
        ("ttft-violins", lambda r, ax: draw_violins(r, "ttft", ax=ax)),
        ("e2e-violins", lambda r, ax: draw_violins(r, "e2e", ax=ax)),
    ):
        with styled():
            wide = name in ("outcomes", "ttft-violins", "e2e-violins")
            columns = len(report.results) if wide else 0
            figure = bare_figure(max(7.5, 0.5 * columns + 2.5), 4.5)
            draw(report, ax=figure.add_subplot())  # type: ignore[operator]
        drawn[name] = figure
    return drawn


# --- inside ----------------------------------------------------------------------------------------------------


def _curves(report: Report) -> Iterator[tuple[str, str, str, list[Result]]]:
    """(strategy, colour, marker, its runs by rate)."""
    for index, name in enumerate(report.strategies):
        yield name, PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)], report.of(name)


def _divisor(report: Report, run: Result) -> int:
    return run.summary.num_gpus if report.per_gpu else 1


def _rate(report: Report, run: Result) -> float:
    return run.rate / _divisor(report, run)


def _per_gpu(report: Report) -> str:
    """What rates were divided by; nothing if hardware is equal."""
    return f" per {device_word(report.hardware.values())}" if report.per_gpu else ""


def _latency(metric: str) -> tuple[str, float, str]:
    if metric not in LATENCIES:
        raise ConfigError(f"there is no latency {metric!r}; there are {', '.join(LATENCIES)}")
    return LATENCIES[metric]


def _percentiles(run: Result, metric: str) -> Percentiles:
    found: Percentiles = getattr(run.summary, metric)
    return found


def _violin(ax: Axes, x: float, values: Sequence[float], width: float, color: str) -> None:
    """Values as they are if they are too few, or all alike, for a density."""
    if len(set(values)) < 5:
        ax.plot([x] * len(values), values, "o", color=color, markersize=4, alpha=0.6)
        return
    parts: dict[str, Any] = ax.violinplot([values], [x], widths=width, showextrema=False, points=60)
    for body in parts["bodies"]:
        body.set_facecolor(color)
        body.set_edgecolor(color)
        body.set_alpha(0.55)
    middle = sorted(values)[len(values) // 2]
    ax.plot([x - width / 3, x + width / 3], [middle] * 2, color=INK, linewidth=1.5)


def _slo_line(ax: Axes, report: Report, metric: str, factor: float, unit: str) -> None:
    limit = {"ttft": report.slo.ttft_s, "tpot": report.slo.tpot_s}.get(metric)
    if limit is None:
        return
    ax.axhline(limit * factor, color=ALERT_COLOR, linewidth=1.2)
    # Beside the axes, where it hides no data.
    ax.annotate(f"SLO\n{limit * factor:g} {unit}", (1, limit * factor), (4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", color=ALERT_COLOR)  # fmt: skip


def _log_axis(ax: Axes) -> None:
    """Plain numbers at 1, 2, 5 of each decade: a range is often shorter than a decade, and 10^x is hard to read off."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _finish(ax: Axes, report: Report, title: str, *, from_zero: bool = True, legend: bool = True) -> None:
    ax.set_title(title + (f"\nunequal hardware:{_per_gpu(report)}" if report.per_gpu else ""))
    ax.set_xlabel(f"offered rate of {report.workload} (requests/s{_per_gpu(report) if from_zero else ''})")
    if from_zero:
        ax.set_xlim(left=0)
        if ax.get_yscale() == "linear":
            ax.set_ylim(bottom=0)
    handles = ax.get_legend_handles_labels()[0]
    if legend and handles:
        _legend_below(ax, handles)


def _legend_below(ax: Axes, handles: Sequence[Any]) -> None:
    """Two entries a row, column by column; with p50 and p99 of each strategy, two rows and a column for each."""
    columns = len(handles) // 2 if len(handles) > 4 else 2
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=min(3, columns),
              handlelength=1.6, columnspacing=1.2)  # fmt: skip
