"""Numbers that are none, in everything a benchmark or a simulation is made of: refused by name, at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanopd.bench.compare import Strategy, compare_strategies
from nanopd.bench.goodput import find_goodput
from nanopd.bench.hardware import Hardware
from nanopd.bench.lengths import MOST_TOKENS, Fixed, LogNormal, Uniform
from nanopd.bench.load import LoadOptions
from nanopd.bench.metrics import SLO, percentile, summarize
from nanopd.bench.raw import read_records
from nanopd.bench.records import RequestRecord
from nanopd.bench.report import load_report
from nanopd.bench.traces import load_trace, read_azure, read_mooncake
from nanopd.bench.workload import Documents, Part, Schedule, Workload, poisson
from nanopd.cli.app import run
from nanopd.costmodel.hardware_profile import preset
from nanopd.errors import ConfigError, NanoPDError, RecordingError, ReportError, TraceError
from nanopd.router.policies import make_policy
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.layouts import Layout, ratios
from nanopd.sim.link import SimulatedLink
from nanopd.sim.recording import load_recording
from nanopd.sim.search import search_layouts

WORKLOAD = Workload.fixed(10, 3)
SCHEDULE = poisson(WORKLOAD, 5.0, 2.0)
ROW = {"timestamp": 0, "input_length": 20, "output_length": 3}
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def sim(**changes: Any) -> SimulatedCluster:
    return SimulatedCluster(**{"profile": preset("h200"), "collocated": ["cuda:0"], **changes})


def trace(tmp_path: Path, **options: Any) -> Schedule:
    (tmp_path / "t.jsonl").write_text(json.dumps(ROW))
    return load_trace(tmp_path / "t.jsonl", **options)


def search(**options: Any) -> Any:
    return search_layouts(
        [Layout(1)], sim(), lambda r, s: poisson(WORKLOAD, r, s), SLO(1, 1), use_tqdm=False, **options
    )


# What takes the value -> the words of the message that name it. Every one takes a finite number above 0.
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "ttft_s": lambda v: SLO(ttft_s=v),
    "tpot_s": lambda v: SLO(tpot_s=v),
    "median": lambda v: LogNormal(v, 1.0),
    "sigma": lambda v: LogNormal(5.0, v),
    "the scale": WORKLOAD.scaled,
    "the weight": lambda v: Workload("w", (Part(v, Fixed(1), Fixed(1)),)),
    "the rate": lambda v: poisson(WORKLOAD, v, 1.0),
    "the duration": lambda v: poisson(WORKLOAD, 1.0, v),
    "the duration of a schedule": lambda v: Schedule("s", (), v, 0),
    "duration_s": lambda v: summarize([], SLO(), offered=0, duration_s=v),
    "tolerance": lambda v: find_goodput(lambda rate: pytest.fail(), low=1.0, high=2.0, tolerance=v),
    "target": lambda v: find_goodput(lambda rate: pytest.fail(), low=1.0, high=2.0, target=v),
    "link_gb_s": lambda v: sim(link_gb_s=v),
    "bus_gb_s": lambda v: sim(bus_gb_s=v),
    "memory_gb": lambda v: sim(memory_gb=v),
    "bandwidth of a simulated link": lambda v: SimulatedLink(v, 5),
    "bytes_per_block": lambda v: SimulatedLink(1.0, v),
    "the duration of a search": lambda v: search(duration_s=v),
    "target ": lambda v: search(target=v),
}
# The same for ints of at least 1.
COUNTS: dict[str, Callable[[Any], Any]] = {
    "a length in tokens": Fixed,
    "low": lambda v: Uniform(v, 5),
    "high": lambda v: Uniform(1, v),
    "documents": lambda v: Documents(v, 5),
    "tokens of a document": lambda v: Documents(5, v),
    "max_prompt": lambda v: Workload("w", WORKLOAD.parts, max_prompt=v),
    "max_output": lambda v: Workload("w", WORKLOAD.parts, max_output=v),
    "max_model_len": WORKLOAD.fitting,
    "vocab_size": lambda v: SCHEDULE.prompt(SCHEDULE.arrivals[0], v),
    "max_runs": lambda v: find_goodput(lambda rate: pytest.fail(), low=1.0, high=2.0, max_runs=v),
    "num_gpus": lambda v: summarize([], SLO(), offered=0, duration_s=1.0, num_gpus=v),
    "num_blocks": lambda v: sim(num_blocks=v),
    "block_size": lambda v: sim(block_size=v),
    "num_layers": lambda v: SimulatedLink(1.0, 5, v),
    "SMs of a split": lambda v: Layout(prefill=1, decode=1, split=(48, v)),
    "devices to search": lambda v: list(ratios(v)),
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0, True, "1", [], 10**400], ids=lambda v: str(v)[:5])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.strip()):
        NUMBERS[name](value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0, True, "1", [], 1.5], ids=lambda v: str(v)[:5])
@pytest.mark.parametrize("name", COUNTS)
def test_what_is_no_count_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{'must be an int'}"):
        COUNTS[name](value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, True, "1", 10**400], ids=lambda v: str(v)[:5])
@pytest.mark.parametrize("name", ["timeout_s", "drain_s", "warmup_s"])
def test_times_of_a_load_are_finite(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a finite number of seconds >= 0"):
        LoadOptions(**{name: value})


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: LoadOptions(drain_s=None), "drain_s .* got None"),  # type: ignore[arg-type]
        (lambda: LoadOptions(stream=1), "stream .* got 1"),  # type: ignore[arg-type]
        (lambda: Workload("w", [1]), "tuple of parts"),  # type: ignore[arg-type]
        (lambda: LogNormal(5.0, 800.0), "sigma .* at most 10"),
        (lambda: SCHEDULE.at_rate(1e-320), "cannot be stretched"),
        (lambda: poisson(WORKLOAD, 1e-9, 1.0).at_rate(1.0), "cannot be stretched"),
        (lambda: percentile([1.0], math.nan), "got 1 values and nan"),
        (lambda: sim(num_blocks=10**12), "num_blocks must be at most 16,777,216"),
        (lambda: sim(elastic=1), "elastic .* got 1"),
        (lambda: sim(profile="h200"), "profile .* got 'h200'"),
        (lambda: sim(prefill=["cuda:0/sm=84"], decode=["cuda:0/sm=84"]), "84 . 84 SMs .* has 132"),
        (lambda: Layout(2000), "at most 1,024"),
        (lambda: Layout(prefill=1, decode=1, split=5), "a split is a pair"),  # type: ignore[arg-type]
        (lambda: search_layouts(5, sim(), None, SLO()), "at least one layout, got 5"),  # type: ignore[arg-type]
    ],
    ids=[
        "drain", "stream", "parts", "sigma", "slow", "empty", "percentile", "blocks", "elastic", "profile", "sms",
        "devices", "split", "layouts",
    ],
)  # fmt: skip
def test_other_junk_is_named(act: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        act()


def test_draws_are_never_longer_than_the_longest() -> None:
    wide = Workload("w", (Part(1.0, LogNormal(1e6, 10.0), Fixed(1)),), max_prompt=10**9)
    assert max(a.prompt_tokens for a in poisson(wide, 100.0, 2.0).arrivals) == MOST_TOKENS


@pytest.mark.parametrize("name", ["limit", "max_prompt", "max_output", "speed", "length_scale", "jitter_s"])
@pytest.mark.parametrize("value", [math.nan, -1, True, "1"], ids=str)
def test_options_of_a_trace_are_checked(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        trace(tmp_path, **{name: value})


def test_lengths_of_a_trace_are_scaled_up_to_the_longest(tmp_path: Path) -> None:
    (arrival,) = trace(tmp_path, length_scale=1e300).arrivals
    assert (arrival.prompt_tokens, arrival.prompt_clipped) == (32_768, True)


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(json.dumps(ROW), encoding="utf-8-sig")
    assert [a.prompt_tokens for a in read_mooncake(path)] == [20]
    path.write_text(HEADER + "2023-11-16 18:17:03,10,3\n", encoding="utf-8-sig")
    assert [a.prompt_tokens for a in read_azure(path)] == [10]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEADER + "0001-01-01 00:00:00+14:00,10,3\n", ":2: field 'TIMESTAMP'.*0001"),
        (HEADER + "2023-11-16 18:17:03,10,3,4\n", ":2: more values"),
        ("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n", ":1: field 'ContextTokens' is there twice"),
    ],
    ids=["year-one", "long-row", "column-twice"],
)
def test_more_broken_azure_lines_are_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        list(read_azure(path))


@pytest.mark.parametrize("read", [read_mooncake, read_azure, load_report, load_recording])
def test_a_number_is_no_file(read: Callable[[Any], Any]) -> None:
    """`open(1)` would read, and close, this process's own output."""
    with pytest.raises(NanoPDError, match="True"):
        list(read(True))


@pytest.mark.parametrize(
    ("read", "error"), [(load_report, ReportError), (read_records, ReportError), (load_recording, RecordingError)]
)
def test_endless_nesting_is_damage(read: Callable[[Path], Any], error: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[" * 100_000)
    with pytest.raises(error, match="cannot read"):
        read(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("index", "1"), ("time_s", None), ("e2e_s", "x"), ("tokens", -1), ("itls_s", [1, "x"]), ("reason", 5)],
)
def test_a_damaged_record_is_refused(field: str, value: object) -> None:
    row = {"index": 0, "time_s": 0.0, "prompt_tokens": 1, "output_tokens": 1, "outcome": "completed"}
    assert RequestRecord.from_json(row).index == 0
    with pytest.raises(ReportError, match=f"{'gap of ' * (field == 'itls_s')}{field}"):
        RequestRecord.from_json({**row, field: value})


def test_a_damaged_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--rate", "2", "--duration", "3", "--workload", "20:3", "--no-goodput", "--out", str(path)]
    assert run(["simulate", "--hardware", "h20", *options]) == 0
    good = json.loads(path.read_text())
    for change in (
        lambda result: result.update(rate="2"),
        lambda result: result["samples"].update(ttft_s=None),
        lambda result: result["samples"].update(e2e_s=[1.0, "x"]),
        lambda result: result.update(samples=5),
        lambda result: result["summary"].update(span_s=None),
        lambda result: result["summary"]["ttft"].update(p99="x"),
    ):
        broken = json.loads(json.dumps(good))
        change(broken["results"][0])
        path.write_text(json.dumps(broken))
        with pytest.raises(ReportError, match=r"r\.json|not a summary"):
            load_report(path)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda driver: driver.at(math.nan, print), "time in seconds, got nan"),
        (lambda driver: driver.at("1", print), "time in seconds, got '1'"),
        (lambda driver: driver.run(math.inf), "until .* got inf"),
        (lambda driver: driver.fail_worker("x"), "no worker 'x'; there are collocated0"),
    ],
    ids=["nan", "text", "endless", "worker"],
)
def test_a_virtual_driver_refuses_what_is_no_time_and_no_worker(act: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        act(sim().driver(make_policy("collocated")))


def test_what_has_no_decide_is_no_policy() -> None:
    with pytest.raises(ConfigError, match=r"a policy has a method `decide`.* got 5"):
        sim().driver(5)


@pytest.mark.parametrize("slo", [None, 5], ids=str)
def test_a_search_and_a_comparison_need_an_slo(slo: Any) -> None:
    with pytest.raises(ConfigError, match="must be an SLO"):
        search_layouts([Layout(1)], sim(), lambda r, s: poisson(WORKLOAD, r, s), slo, use_tqdm=False)
    with pytest.raises(ConfigError, match="must be an SLO"):
        strategy = Strategy("a", sim().hardware, lambda: pytest.fail("opened"))
        compare_strategies([strategy], lambda r: poisson(WORKLOAD, r, 2.0), [5.0], slo=slo, vocab_size=5)


@pytest.mark.parametrize("specs", [5, "cuda:0", None], ids=str)
def test_places_are_a_list(specs: Any) -> None:
    with pytest.raises(ConfigError, match="places of a strategy are a list"):
        Hardware.of_specs(specs)
