"""ClusterDesigner: choose devices, roles, link and load, and watch what share of the requests is served in time.

Each change simulates some hundred requests, on the chosen roles and on the same devices collocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanopd.bench.goodput import find_goodput
from nanopd.bench.load import LoadOptions
from nanopd.bench.metrics import SLO, Summary, summarize
from nanopd.bench.workload import Workload, poisson
from nanopd.costmodel.hardware_profile import HardwareProfile
from nanopd.errors import ConfigError
from nanopd.sim.bounds import bound
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.layouts import Layout
from nanopd.sim.load import run_virtual
from nanopd.sim.search import default_policy
from nanopd.viz.live import LiveFigure, button
from nanopd.viz.style import DECODE_COLOR, GREEN, GREY, LIGHT, PREFILL_COLOR, bare_figure
from nanopd.workers.worker import Role

TOKENS = 6_000  # output tokens of one run, at most: what keeps a change below a second
LEAST, MOST = 40, 200  # requests of one run
ROLE_COLORS = {Role.COLLOCATED: GREEN, Role.PREFILL: PREFILL_COLOR, Role.DECODE: DECODE_COLOR}


@dataclass(frozen=True)
class Served:
    """One layout under the load: its numbers, and how busy each worker was: (name, role, share of the time)."""

    layout: Layout
    summary: Summary
    busy: tuple[tuple[str, Role, float], ...]


class ClusterDesigner(LiveFigure):
    """Sliders over a simulated cluster.

    Args:
        profiles: hardware by name.
        slo: what a request must meet.
        gpus: the largest number of devices.
    """

    def __init__(self, profiles: Mapping[str, HardwareProfile], slo: SLO, *, gpus: int = 8, seed: int = 0) -> None:
        super().__init__()
        if not profiles or gpus < 1:
            raise ConfigError(f"a designer needs a hardware profile and a GPU, got {list(profiles)} and {gpus}")
        self.profiles, self.slo, self.seed = dict(profiles), slo, seed
        self.served: list[Served] = []
        self.hardware = widgets.Dropdown(options=list(profiles), description="hardware")
        self.gpus = widgets.IntSlider(min(4, gpus), 1, gpus, description="GPUs", continuous_update=False)
        self.prefill = widgets.IntSlider(
            min(1, gpus - 1), 0, max(1, gpus - 1), description="prefill", continuous_update=False
        )
        self.link = _powers("link GB/s", -3, 10, 4)  # from a network card of 1 gigabit
        self.rate = _powers("requests/s", -2, 9, 2)
        self.prompt = _powers("prompt", 4, 14, 9)
        self.output = _powers("output", 0, 9, 5)
        self._controls = [self.hardware, self.gpus, self.prefill, self.link, self.rate, self.prompt, self.output]
        for control in self._controls:
            control.observe(lambda _: self._show(), names="value")
        find = button("Find goodput", self._find, "bisection over the rate: some ten runs")
        rows = [widgets.HBox(self._controls[:4]), widgets.HBox([*self._controls[4:], find])]
        self._widget = self.layout(*rows)
        self._show()

    @property
    def widget(self) -> widgets.Widget:
        return self._widget

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def chosen(self) -> Layout:
        """The layout that the sliders say; prefill 0 means collocated, and at least one GPU decodes."""
        prefill = min(self.prefill.value, self.gpus.value - 1)
        if prefill < 1:
            return Layout(collocated=self.gpus.value)
        return Layout(prefill=prefill, decode=self.gpus.value - prefill)

    def cluster(self, layout: Layout) -> SimulatedCluster:
        base = SimulatedCluster(
            self.profiles[self.hardware.value], ["cuda:0"], collocated_chunk=512, link_gb_s=float(self.link.value)
        )
        return layout.on(base)

    def serve(self, layout: Layout, rate: float) -> Served:
        """One run at ``rate`` requests per second."""
        count = max(LEAST, min(MOST, TOKENS // self.output.value))
        workload = Workload.fixed(self.prompt.value, self.output.value)
        schedule = poisson(workload, rate, count / rate, self.seed)
        cluster = self.cluster(layout)
        driver = cluster.driver(default_policy(layout))
        records = run_virtual(driver, schedule, options=LoadOptions(drain_s=2 * schedule.duration_s + 60.0))
        summary = summarize(
            records,
            self.slo,
            offered=len(schedule),
            duration_s=schedule.duration_s,
            num_gpus=layout.num_devices,
        )
        busy = tuple((name, w.role, driver.busy_s[name] / driver.now) for name, w in driver.central.workers.items())
        return Served(layout, summary, busy)

    # --- pictures ----------------------------------------------------------------------------------------------

    def draw(self) -> Figure:
        figure = bare_figure(10, 3.8)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
        if self.served:
            self._draw_served(left)
            self._draw_busy(right)
        return figure

    def _draw_served(self, ax: Axes) -> None:
        gpus = self.gpus.value
        names = [str(served.layout) for served in self.served]
        values = [served.summary.attained_rate_per_gpu for served in self.served]
        offered = self.served[0].summary.offered_rate / gpus
        colors = [DECODE_COLOR if served.layout.prefill else GREEN for served in self.served]
        bars = ax.bar(range(len(names)), values, color=colors, width=0.6)
        ax.bar_label(bars, [f"{served.summary.attainment:.0%}" for served in self.served])
        ax.axhline(offered, color=GREY, linestyle="--")
        ax.text(len(names) - 0.5, offered, "offered", ha="left", va="center", color=GREY)
        ax.set_xticks(range(len(names)), [name.replace(" : ", "\n") for name in names])
        ax.set_ylim(0, 1.2 * max(offered, *values))
        ax.set_ylabel("requests/s per GPU within the SLO")
        ax.set_title("Served in time at this load")

    def _draw_busy(self, ax: Axes) -> None:
        busy = self.served[0].busy
        ax.barh([name for name, *_ in busy], [1.0] * len(busy), color=LIGHT)
        ax.barh([n for n, *_ in busy], [share for *_, share in busy], color=[ROLE_COLORS[role] for _, role, _ in busy])
        ax.invert_yaxis()
        ax.set_xlim(0, 1)
        ax.set_xlabel("share of the time in steps")
        name, _, share = max(busy, key=lambda worker: worker[2])
        ax.set_title(f"Busiest: {name}, {share:.0%} of the time")

    # --- reactions ---------------------------------------------------------------------------------------------

    def _show(self) -> None:
        self.attempt(self._simulate)

    def _simulate(self) -> None:
        """The chosen layout, and the same devices collocated beside it."""
        layouts = dict.fromkeys([self.chosen, Layout(collocated=self.gpus.value)])
        self.served = []
        self.served = [self.serve(layout, float(self.rate.value)) for layout in layouts]
        self.say("; ".join(map(_describe, self.served)) + ".")

    def _find(self) -> None:
        self.attempt(self._search)

    def _search(self) -> None:
        layout = self.chosen
        arrivals = poisson(Workload.fixed(self.prompt.value, self.output.value), 1.0, 50.0, self.seed).arrivals
        limit = bound(self.cluster(layout), arrivals, self.slo)
        found = find_goodput(
            lambda rate: self.serve(layout, rate).summary,
            low=limit.rate / 16,
            high=limit.rate * 1.5,
            tolerance=0.1,
            max_runs=10,
            num_gpus=layout.num_devices,
        )
        self.say(
            f"{layout}: goodput {found.per_gpu:.3g} requests/s per GPU; at most {limit.rate / layout.num_devices:.3g} "
            f"by arithmetic ({limit.side} is the limit). {found.reason}."
        )


def _describe(served: Served) -> str:
    s = served.summary
    ttft, tpot = (_ms(values.p90) for values in (s.ttft, s.tpot))
    return f"{served.layout}: {s.attained_rate_per_gpu:.3g}/s per GPU in time, TTFT p90 {ttft}, TPOT p90 {tpot}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3g} ms"


def _powers(name: str, low: int, high: int, start: int) -> Any:
    """A slider over powers of two."""
    options = [2**e if e >= 0 else 2.0**e for e in range(low, high + 1)]
    return widgets.SelectionSlider(
        options=options, value=options[start - low], description=name, continuous_update=False
    )
