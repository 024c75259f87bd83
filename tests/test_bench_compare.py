"""Comparison and report: equal arrivals, equal hardware, resumable records, one JSON that can be read again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench_cases import BlockingServer, VirtualClock, single_server

from nanopd.bench import (
    SLO,
    GoodputSearch,
    Hardware,
    LoadOptions,
    Report,
    Strategy,
    Workload,
    check_equal,
    compare_strategies,
    load_report,
    make_report,
    named_workload,
    schedules,
)
from nanopd.bench.raw import read_records, write_records
from nanopd.bench.target import Target
from nanopd.bench.workload import Schedule
from nanopd.errors import ConfigError, ReportError, UnequalHardwareError

ONE_GPU = Hardware(("cuda:0",), 132, "cuda:0")


class Bench:
    """Strategies that differ in their service time, and what they were given."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.servers: dict[str, BlockingServer] = {}
        self.seen: list[tuple[float, Schedule]] = []

    def strategy(self, name: str, service_s: float, hardware: Hardware = ONE_GPU) -> Strategy:
        @contextmanager
        def open_target() -> Iterator[Target]:
            self.opened.append(name)
            self.servers[name] = BlockingServer(VirtualClock(), service_s)
            yield self.servers[name]
            self.closed.append(name)

        return Strategy(name, hardware, open_target)

    def run(self, target: Target, schedule: Schedule):
        """A virtual-time driver: the queue of one server, without threads."""
        assert isinstance(target, BlockingServer)
        self.seen.append((target.service_s, schedule))
        return single_server(schedule, target.service_s)


def compare(bench: Bench, strategies: list[Strategy], **options) -> Report:
    arguments = {
        "rates": [2.0, 8.0],
        "slo": SLO(0.5, 0.1),
        "vocab_size": 100,
        "run": bench.run,
        "use_tqdm": False,
        **options,
    }
    return compare_strategies(strategies, schedules(named_workload("short"), 30.0, 1), **arguments)


def test_all_strategies_see_the_same_arrivals_at_each_rate() -> None:
    bench = Bench()
    report = compare(bench, [bench.strategy("a", 0.05), bench.strategy("b", 0.15)], search=None)
    assert [(r.strategy, r.rate) for r in report.results] == [("a", 2.0), ("a", 8.0), ("b", 2.0), ("b", 8.0)]
    by_rate = {len(schedule): {id(s) for _, s in bench.seen if len(s) == len(schedule)} for _, schedule in bench.seen}
    assert [len(same) for same in by_rate.values()] == [1, 1]
    assert {r.schedule for r in report.of("a")} == {r.schedule for r in report.of("b")}
    assert bench.opened == bench.closed == ["a", "b"]  # one after the other, each taken down


def test_goodput_ranks_the_strategies() -> None:
    bench = Bench()
    search = GoodputSearch(tolerance=0.05, max_runs=12)
    report = compare(
        bench, [bench.strategy("fast", 0.05), bench.strategy("slow", 0.2)], rates=[1.0, 30.0], search=search
    )
    assert report.goodput["fast"].rate > 3 * report.goodput["slow"].rate > 0
    probed = [probe.rate for probe in report.goodput["slow"].probes]
    assert {1.0, 30.0} <= set(probed)
    assert len(bench.seen) == sum(len(g.probes) for g in report.goodput.values())  # the given rates ran once


class NoTime:
    """The real clock, on a server that works in no time."""

    def __call__(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        pass


def test_the_default_run_is_the_real_load() -> None:
    @contextmanager
    def open_target() -> Iterator[Target]:
        yield BlockingServer(NoTime(), 0.0, gap_s=0.0)  # type: ignore[arg-type]

    report = compare_strategies(
        [Strategy("instant", ONE_GPU, open_target)], schedules(Workload.fixed(4, 2), 0.2, 1), [50.0], slo=SLO(),
        vocab_size=10, search=None, use_tqdm=False,
    )  # fmt: skip
    assert report.results[0].summary.attainment == 1.0
    assert report.results[0].summary.counters.num_dropped == 0


# --- equal hardware --------------------------------------------------------------------------------------------


def test_hardware_of_places() -> None:
    assert Hardware.of_specs(["cuda:0"], 132) == Hardware(("cuda:0",), 132, "cuda:0")
    split = Hardware.of_specs(["cuda:0/sm=84", "cuda:0/sm=48"], 132)
    assert (split.num_gpus, split.sms) == (1, 132)
    assert Hardware.of_specs(["cuda:0", "cuda:0/sm=84", "cuda:0/sm=48"], 132).sms == 132  # parts of the whole
    assert Hardware.of_specs(["cuda:0", "cuda:1"], 132).sms == 264
    assert Hardware.of_specs(["cuda:0", "cuda:1"]).sms is None
    cpu = Hardware.of_specs(["cpu/cores=0", "cpu/cores=1"], None)
    assert (cpu.num_gpus, cpu.sms, cpu.cores) == (1, None, 2)
    assert Hardware.of_specs(["cpu", "cpu/cores=0"], all_cores=8).cores == 8  # parts of the whole
    assert Hardware.of_specs(["cpu/cores=0-3", "cpu/cores=2-5"]).cores == 6
    assert Hardware.of_specs(["cuda:0/cores=0-3"]).cores is None
    assert (Hardware.of_specs(["cpu"]).cores or 0) >= 1
    with pytest.raises(ConfigError):
        Hardware.of_specs([])
    with pytest.raises(ConfigError):
        Hardware.of_specs(["cuda:0/sm=many"])


@pytest.mark.parametrize(
    ("other", "says"),
    [(Hardware(("cuda:0", "cuda:1"), 264), "GPUs: .*'b': 2"), (Hardware(("cuda:0",), 48), "SMs: .*'b': 48")],
    ids=["gpus", "sms"],
)
def test_unequal_hardware_is_refused_before_anything_runs(other: Hardware, says: str) -> None:
    bench = Bench()
    strategies = [bench.strategy("a", 0.05), bench.strategy("b", 0.05, other)]
    with pytest.raises(UnequalHardwareError, match=says):
        compare(bench, strategies)
    assert bench.opened == []


def test_unequal_hardware_that_is_allowed_is_labelled_and_per_gpu() -> None:
    bench = Bench()
    two = Hardware(("cuda:0", "cuda:1"), 264)
    report = compare(bench, [bench.strategy("a", 0.05), bench.strategy("b", 0.05, two)], allow_unequal=True)
    assert report.per_gpu
    assert "UNEQUAL" in report.comparison
    assert report.goodput["b"].per_gpu == report.goodput["b"].rate / 2
    a, b = report.of("a")[0].summary, report.of("b")[0].summary
    assert b.attained_rate_per_gpu == pytest.approx(a.attained_rate_per_gpu / 2)
    assert not compare(bench, [bench.strategy("a", 0.05)]).per_gpu


def test_unknown_sm_counts_do_not_count() -> None:
    assert check_equal({"a": ONE_GPU, "b": Hardware(("cuda:0",), None)}) == "equal hardware"


@pytest.mark.parametrize(
    ("collocated", "equal"), [("cpu", True), ("cpu/cores=2-3", True), ("cpu/cores=0", False), ("cpu/cores=0-2", False)]
)
def test_strategies_on_a_cpu_use_equally_many_cores(collocated: str, equal: bool) -> None:
    hardware = {
        "a": Hardware.of_specs([collocated], all_cores=2),
        "b": Hardware.of_specs(["cpu/cores=0", "cpu/cores=1"], all_cores=2),
    }
    if equal:
        assert check_equal(hardware) == "equal hardware"
        return
    with pytest.raises(UnequalHardwareError, match=r"CPU cores: .*'b': 2.* compare per device"):
        check_equal(hardware)
    assert check_equal(hardware, allow_unequal=True).startswith("UNEQUAL hardware, compared per device (CPU cores: ")


def test_cores_are_in_the_report_and_reports_without_them_are_read(tmp_path: Path) -> None:
    bench = Bench()
    cpu = Hardware.of_specs(["cpu/cores=0", "cpu/cores=1"])
    report = compare(bench, [bench.strategy("a", 0.05, cpu)])
    assert load_report(report.save(tmp_path / "r.json")).hardware == {"a": cpu}
    row = report.to_json()
    del row["hardware"]["a"]["cores"]
    assert Report.from_json(row).hardware["a"].cores is None


# --- records ---------------------------------------------------------------------------------------------------


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, first, second = Bench(), Bench(), Bench()
    expected = compare(whole, [whole.strategy("a", 0.05), whole.strategy("b", 0.2)], raw=tmp_path / "whole")

    def stop(result) -> None:
        if (result.strategy, result.rate) == ("b", 2.0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(first, [first.strategy("a", 0.05), first.strategy("b", 0.2)], raw=tmp_path / "r", on_result=stop)
    assert first.closed == ["a", "b"]  # an interrupt takes the target down, too
    resumed = compare(second, [second.strategy("a", 0.05), second.strategy("b", 0.2)], raw=tmp_path / "r")
    assert resumed == expected
    assert second.opened == ["b"]  # "a" has all its runs
    assert len(second.seen) + len(first.seen) == len(whole.seen)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"options": LoadOptions(warmup_s=1.0)}, "options"),
        ({"vocab_size": 101}, "vocab_size"),
    ],
    ids=["options", "vocabulary"],
)
def test_records_of_another_run_are_not_taken_for_this_one(tmp_path: Path, change: dict, says: str) -> None:
    bench = Bench()
    compare(bench, [bench.strategy("a", 0.05)], raw=tmp_path, search=None)
    with pytest.raises(ReportError, match=f"another run: its {says}"):
        compare(bench, [bench.strategy("a", 0.05)], raw=tmp_path, search=None, **change)


def test_records_of_other_arrivals_are_not_taken(tmp_path: Path) -> None:
    bench = Bench()
    compare(bench, [bench.strategy("a", 0.05)], raw=tmp_path, search=None)
    with pytest.raises(ReportError, match="its schedule"):
        compare_strategies(
            [bench.strategy("a", 0.05)], schedules(named_workload("short"), 30.0, 2), [2.0], slo=SLO(),
            vocab_size=100, raw=tmp_path, run=bench.run, use_tqdm=False,
        )  # fmt: skip


def test_records_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records = single_server(schedules(named_workload("short"), 5.0, 1)(4.0), 0.1)
    write_records(path, {"rate": 4.0}, records)
    assert len(read_records(path, {"rate": 4.0})) == len(records)
    lines = path.read_text().splitlines(keepends=True)
    for cut in (lines[:-1], lines[1:], lines[:-3] + lines[-1:], [], ["{"]):
        path.write_text("".join(cut))
        with pytest.raises(ReportError):
            read_records(path)


# --- report ----------------------------------------------------------------------------------------------------


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    bench = Bench()
    report = compare(bench, [bench.strategy("a", 0.05), bench.strategy("b", 0.2)], environment={"gpu": "none"})
    path = report.save(tmp_path / "deep" / "report.json")
    loaded = load_report(path)
    assert loaded.save(tmp_path / "again.json").read_text() == path.read_text()
    assert loaded.strategies == ["a", "b"]
    assert loaded.environment == {"gpu": "none"}
    assert loaded.goodput["a"].rate == report.goodput["a"].rate
    assert loaded.of("b")[1].summary.counters == report.of("b")[1].summary.counters
    assert loaded.of("b")[1].summary.ttft.p99 == pytest.approx(report.of("b")[1].summary.ttft.p99, rel=1e-4)
    assert not list(path.parent.glob("*.partial"))
    plan = report.options["arrivals"]["2.0"]
    assert plan["offered"] == report.of("a")[0].summary.offered


def test_a_report_of_another_version_or_damaged_is_refused(tmp_path: Path) -> None:
    bench = Bench()
    path = compare(bench, [bench.strategy("a", 0.05)]).save(tmp_path / "r.json")
    data = json.loads(path.read_text())
    for name, text in {
        "version": json.dumps({**data, "schema": "nanopd-serving-benchmark/0"}),
        "cut": path.read_text()[:-50],
        "field": json.dumps({k: v for k, v in data.items() if k != "slo"}),
        "list": "[]",
    }.items():
        path.write_text(text)
        with pytest.raises(ReportError):
            load_report(path)
        assert name
    with pytest.raises(ReportError, match="nowhere"):
        load_report(tmp_path / "nowhere.json")


def test_a_report_of_different_arrivals_is_refused() -> None:
    bench = Bench()
    report = compare(bench, [bench.strategy("a", 0.05)], search=None)
    other = compare_strategies(
        [bench.strategy("b", 0.05)], schedules(named_workload("long"), 30.0, 1), [2.0, 8.0], slo=SLO(),
        vocab_size=100, run=bench.run, search=None, use_tqdm=False,
    )  # fmt: skip
    with pytest.raises(ReportError, match="other arrivals"):
        make_report(
            [*report.results, *other.results], {"a": ONE_GPU, "b": ONE_GPU}, allow_unequal=False,
            workload="?", note="", slo=SLO(), seed=0, options={},
        )  # fmt: skip


@pytest.mark.parametrize("case", ["none", "twice", "no-rate"])
def test_nothing_to_compare(case: str) -> None:
    bench = Bench()
    one = bench.strategy("a", 0.05)
    strategies, rates = {"none": ([], [1.0]), "twice": ([one, one], [1.0]), "no-rate": ([one], [])}[case]
    with pytest.raises(ConfigError, match="a comparison needs"):
        compare(bench, strategies, rates=rates)


def test_a_warm_up_that_leaves_nothing_is_refused_before_anything_runs() -> None:
    bench = Bench()
    with pytest.raises(ConfigError, match="leaves nothing"):
        compare(bench, [bench.strategy("a", 0.05)], options=LoadOptions(warmup_s=1e6))
    assert bench.opened == [] and bench.seen == []
