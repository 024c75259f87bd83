"""Pictures of a serving benchmark: the values drawn are the report's, and the SLO stands where it belongs."""

from __future__ import annotations

from dataclasses import replace

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from bench_cases import single_server
from matplotlib.axes import Axes

from nanopd.bench import SLO, Hardware, Outcome, Probe, Report, Result, Workload, make_report, poisson, summarize
from nanopd.bench.goodput import find_goodput
from nanopd.bench.records import dropped_record
from nanopd.bench.report import samples
from nanopd.errors import ConfigError
from nanopd.viz.serving import (
    draw_attainment,
    draw_latency,
    draw_outcomes,
    draw_throughput,
    draw_violins,
    figures,
)
from nanopd.viz.style import bare_figure

RATES = (2.0, 5.0, 10.0, 20.0)
SERVICE = {"collocated": 0.08, "disaggregated": 0.05, "adaptive": 0.045}


def canvas() -> Axes:
    return bare_figure(7, 4.5).add_subplot()


def make(gpus: dict[str, int] | None = None, timeout_s: float = 4.0, rates: tuple[float, ...] = RATES) -> Report:
    slo, results, goodput, hardware = SLO(0.5, 0.05), [], {}, {}
    for name, service_s in SERVICE.items():
        hardware[name] = Hardware(tuple(f"cuda:{i}" for i in range((gpus or {}).get(name, 1))))

        def run(rate: float, name: str = name, service_s: float = service_s) -> Result:
            schedule = poisson(Workload.fixed(16, 8), rate, 60.0, 1)
            records = [
                r if r.e2e_s < timeout_s else dropped_record(a, Outcome.TIMED_OUT, "late", 0.0)
                for r, a in zip(single_server(schedule, service_s), schedule.arrivals)
            ]
            summary = summarize(records, slo, offered=len(schedule), duration_s=60.0, num_gpus=hardware[name].num_gpus)
            return Result(name, rate, summary, schedule.fingerprint(), samples(records))

        runs = [run(rate) for rate in rates]
        results += runs
        known = [Probe(r.rate, r.summary.attained, r.summary.offered) for r in runs]
        goodput[name] = find_goodput(lambda rate: run(rate).summary, low=min(rates), high=40.0, known=known)
    return make_report(
        results, hardware, allow_unequal=gpus is not None, workload="fixed-16-8", note="a test", slo=slo, seed=1,
        options={}, goodput=goodput,
    )  # fmt: skip


@pytest.fixture(scope="module")
def report() -> Report:
    return make()


def lines(ax: Axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {str(line.get_label()): (np.array(line.get_xdata()), np.array(line.get_ydata())) for line in ax.get_lines()}


def horizontal(ax: Axes) -> set[float]:
    return {float(y[0]) for x, y in lines(ax).values() if list(x) == [0, 1] and y[0] == y[1]}


def test_throughput_is_what_was_completed(report: Report) -> None:
    drawn = lines(draw_throughput(report, ax=canvas()))
    for name in SERVICE:
        x, y = drawn[name]
        assert list(x) == list(RATES)
        assert list(y) == [run.summary.request_throughput for run in report.of(name)]
    x, y = drawn["all that is offered"]
    assert list(x) == list(y)


@pytest.mark.parametrize(("metric", "factor"), [("ttft", 1e3), ("tpot", 1e3), ("e2e", 1.0)])
def test_latencies_are_the_summaries_percentiles(report: Report, metric: str, factor: float) -> None:
    ax = draw_latency(report, metric, ax=canvas())
    drawn = lines(ax)
    for name in SERVICE:
        for quantile in ("p50", "p99"):
            expected = [getattr(getattr(run.summary, metric), quantile) * factor for run in report.of(name)]
            assert list(drawn[f"{name}, {quantile}"][1]) == pytest.approx(expected)
    limit = {"ttft": 500.0, "tpot": 50.0, "e2e": None}[metric]
    assert horizontal(ax) == ({limit} if limit else set())


def test_points_that_cover_less_than_was_offered_are_hollow(report: Report) -> None:
    ax = draw_latency(report, "ttft", ax=canvas())
    points = [line for line in ax.get_lines() if line.get_marker() in "osD" and len(line.get_xdata()) == 1]
    hollow = {float(line.get_xdata()[0]) for line in points if line.get_markerfacecolor() == "white"}
    dropped = {run.rate for run in report.results if run.summary.counters.num_dropped}
    assert hollow == dropped != set()


def test_a_latency_that_nobody_measured_draws_nothing(report: Report) -> None:
    ax = draw_latency(report, "itl", ax=canvas())
    assert all(len(x) == 0 for x, _ in lines(ax).values())


def test_attainment_and_goodput(report: Report) -> None:
    ax = draw_attainment(report, ax=canvas())
    drawn = lines(ax)
    assert horizontal(ax) == {90.0}
    for name in SERVICE:
        found = report.goodput[name]
        x, y = drawn[f"{name}: goodput {found.rate:.3g}/s"]
        assert set(RATES) <= set(x)
        assert list(x) == sorted(probe.rate for probe in found.probes)
        assert list(y) == pytest.approx([100 * probe.attainment for probe in found.probes])
        assert any(list(v[0]) == [found.rate] * 2 and list(v[1]) == [0, 90.0] for v in drawn.values())


def test_bars_stack_up_to_what_was_offered(report: Report) -> None:
    ax = draw_outcomes(report, ax=canvas())
    tops: dict[float, float] = {}
    for bar in ax.patches:
        center = round(bar.get_x() + bar.get_width() / 2, 3)
        tops[center] = max(tops.get(center, 0), bar.get_y() + bar.get_height())
    assert sorted(tops.values()) == sorted(run.summary.offered for run in report.results)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[:3] == [f"completed, {name}" for name in SERVICE]
    assert labels[3:] == ["timed out"]


def test_violins_have_their_medians(report: Report) -> None:
    ax = draw_violins(report, "ttft", ax=canvas())
    medians = sorted(float(y[0]) for x, y in lines(ax).values() if len(x) == 2 and 0 < x[1] - x[0] < 0.3)
    expected = sorted(1e3 * np.sort(run.samples["ttft_s"])[len(run.samples["ttft_s"]) // 2] for run in report.results)
    assert medians == pytest.approx(expected)
    assert [label.get_text() for label in ax.get_xticklabels()] == [f"{rate:g}" for rate in RATES]


def test_unequal_hardware_is_drawn_per_gpu_and_says_so() -> None:
    report = make({"adaptive": 2})
    ax = draw_throughput(report, ax=canvas())
    assert "per GPU" in ax.get_title(loc="left")
    assert "per GPU" in ax.get_xlabel()
    x, y = lines(ax)["adaptive"]
    assert list(x) == [rate / 2 for rate in RATES]
    assert list(y) == [run.summary.request_throughput / 2 for run in report.of("adaptive")]


def test_a_cpu_is_no_gpu() -> None:
    report = make({"adaptive": 2})
    on_cpu = {name: replace(h, devices=("cpu",) * len(h.devices)) for name, h in report.hardware.items()}
    ax = draw_throughput(replace(report, hardware=on_cpu), ax=canvas())
    assert "per device" in ax.get_title(loc="left") and "per device" in ax.get_xlabel()


def title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def test_titles_say_who_is_ahead_and_by_which_number(report: Report) -> None:
    last = {name: report.of(name)[-1].summary for name in SERVICE}
    best = max(s.request_throughput for s in last.values())
    assert title(draw_throughput(report, ax=canvas())) == (
        f"Most completed at 20/s: disaggregated and adaptive ({best:.3g}/s)"  # a tie
    )
    goodput = report.goodput["adaptive"].rate
    assert title(draw_attainment(report, ax=canvas())) == f"Highest goodput: adaptive ({goodput:.3g}/s)"
    # At 20/s collocated dropped requests: the comparison is at 10/s, where each p99 covers all.
    p99 = 1e3 * report.of("adaptive")[RATES.index(10.0)].summary.ttft.p99
    assert title(draw_latency(report, "ttft", ax=canvas())) == f"TTFT p99 at 10/s: adaptive lowest ({p99:.3g} ms)"
    assert title(draw_latency(report, "tpot", ax=canvas())) == "TPOT p99 at 10/s: all alike (10 ms)"
    share = last["collocated"].counters.num_dropped / last["collocated"].offered
    assert title(draw_outcomes(report, ax=canvas())) == f"Most dropped at 20/s: collocated ({share:.0%})"


def test_a_goodput_that_no_rate_bounds_is_a_lower_bound() -> None:
    report = make(rates=(2.0,))
    goodput = {
        name: find_goodput(lambda rate: None, low=1.0, high=2.0, known=[Probe(1.0, 10, 10), Probe(2.0, 10, 10)])
        for name in SERVICE
    }
    ax = draw_attainment(replace(report, goodput=goodput), ax=canvas())
    assert title(ax) == "Highest goodput: all alike (≥ 2/s)"
    assert "adaptive: goodput ≥ 2/s" in lines(ax)


def test_titles_claim_nothing_where_nothing_can_be_compared() -> None:
    unequal, dropped = make({"adaptive": 2}), make(timeout_s=0.001, rates=(2.0,))
    assert title(draw_attainment(unequal, ax=canvas())).startswith("SLO attainment")
    assert title(draw_latency(dropped, "ttft", ax=canvas())) == "Time to first token"
    assert title(draw_attainment(dropped, ax=canvas())) == "Nobody serves 90% within the SLO"
    assert title(draw_outcomes(make(timeout_s=1e6), ax=canvas())) == "Nothing was dropped"


def test_every_figure_can_be_saved(report: Report, tmp_path) -> None:
    drawn = figures(report)
    assert {"throughput", "attainment", "outcomes", "ttft", "tpot", "e2e", "ttft-violins"} <= set(drawn)
    for name in ("throughput", "ttft-violins"):
        drawn[name].savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("draw", [draw_latency, draw_violins], ids=["latency", "violins"])
def test_an_unknown_latency_is_named(report: Report, draw) -> None:
    with pytest.raises(ConfigError, match="'jitter'"):
        draw(report, "jitter", ax=canvas())


def test_a_run_in_which_nothing_completed_is_drawn() -> None:
    report = make(timeout_s=0.001, rates=(2.0,))
    for draw in (draw_throughput, draw_attainment, draw_outcomes, draw_latency, draw_violins):
        draw(report, ax=canvas()).figure.canvas.draw()
