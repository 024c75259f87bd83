"""``nanopd bench``: options become strategies, arrivals and limits; results come as tables, JSON and figures."""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench_cases import BlockingServer
from rich.console import Console

from nanopd.bench import Hardware, Outcome, Strategy, load_report
from nanopd.bench.raw import read_records
from nanopd.cli.app import run
from nanopd.cli.serve_bench import Places, _latencies, arrivals, parse_rates, policy_maker
from nanopd.errors import ConfigError
from nanopd.workers.spec import DeviceSpec

TINY = [
    "bench",
    "--model",
    "dummy:tiny",
    "--rate",
    "30",
    "--duration",
    "0.4",
    "--workload",
    "8:4",
    "--num-blocks",
    "64",
]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Strategies without workers: what they were asked for, and a server that answers at once."""
    import time

    made: list[dict] = []

    class NoTime:
        def __call__(self) -> float:
            return time.perf_counter()

        def wait(self, seconds: float) -> None:
            pass

    def strategy(name, model, policy, **options) -> Strategy:
        made.append({"name": name, "policy": policy(), **options})

        @contextmanager
        def open_target():
            yield BlockingServer(NoTime(), 0.0, gap_s=0.0)  # type: ignore[arg-type]

        specs = [*options["collocated"], *options["prefill"], *options["decode"]]
        return Strategy(name, Hardware.of_specs(specs, options["sms_per_device"]), open_target)

    monkeypatch.setattr("nanopd.bench.serve.serving_strategy", strategy)
    return made


def test_each_strategy_gets_its_workers_and_policy(fakes: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--collocated", "cpu/cores=0-1", "--prefill", "cpu/cores=0", "--decode", "cpu/cores=1"]
    names = ["--strategy", "collocated", "--strategy", "disaggregated", "--strategy", "threshold"]
    settings = ["--policy", "max_local_prefill_length=7", "--no-goodput", "--prefill-chunk", "5"]
    assert run([*TINY, *places, *names, *settings]) == 0
    assert [f["policy"].name for f in fakes] == ["collocated", "disaggregated", "threshold"]
    assert [(len(f["collocated"]), len(f["prefill"]), len(f["decode"])) for f in fakes] == [
        (1, 0, 0),
        (0, 1, 1),
        (1, 1, 1),
    ]
    assert fakes[2]["policy"].max_local_prefill_length == 7
    assert fakes[0]["num_blocks"] == 64
    assert [f.get("prefill_chunk") for f in fakes] == [5, 5, 5]
    assert "collocated_chunk" not in fakes[0]
    shown = capsys.readouterr().out
    assert "equal hardware" in shown
    for name in ("collocated", "disaggregated", "threshold"):
        assert name in shown


@pytest.mark.parametrize(("width", "stacked"), [(60, True), (80, True), (120, False)])
def test_percentiles_stand_below_each_other_where_a_line_is_too_short(width: int, stacked: bool) -> None:
    row = ("seed-estimate", "0.333", "107381/107382/107383", "63.2/69.6/17000", "1000/1001/1002", "96123", "96456")
    console = Console(width=width, file=(shown := io.StringIO()))
    console.print(_latencies([row], console))
    lines = [line.split() for line in shown.getvalue().splitlines()[1:]]
    if stacked:
        first = ["seed-estimate", "0.333", "107381", "63.2", "1000", "96123", "96456"]
        assert lines == [first, ["/107382", "/69.6", "/1001"], ["/107383", "/17000", "/1002"]]
    else:
        assert lines == [list(row)]


def test_one_core_against_two_is_refused_or_labelled(fakes: list[dict], capfd: pytest.CaptureFixture[str]) -> None:
    command = [*TINY, "--collocated", "cpu/cores=0", "--prefill", "cpu/cores=0", "--decode", "cpu/cores=1"]
    assert run(command) == 2
    assert "CPU cores: {'collocated': 1, 'disaggregated': 2}" in capfd.readouterr().err
    assert run([*command, "--allow-unequal"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "UNEQUAL hardware, compared per device (CPU cores:" in shown
    assert "requests/s per device (" in shown and "per GPU" not in shown


def test_results_are_written_and_taken_up_again(
    fakes: list[dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figures = tmp_path / "r.json", tmp_path / "figures"
    command = [*TINY, "--collocated", "cpu", "--out", str(out), "--figures", str(figures), "--no-goodput"]
    assert run(command) == 0
    report = load_report(out)
    assert report.of("collocated")[0].summary.attainment == 1.0
    assert report.environment["command"] == "nanopd bench"
    assert report.options["model"] == "tiny"
    assert {path.suffix for path in figures.iterdir()} == {".png"}
    records = tmp_path / "r.records" / "collocated-30.0.jsonl"
    assert {r.outcome for r in read_records(records)} == {Outcome.COMPLETED}
    before = json.loads(out.read_text())["results"]
    assert run(command) == 0
    assert "not repeated" in capsys.readouterr().out
    assert json.loads(out.read_text())["results"] == before
    assert run([*command, "--seed", "1"]) == 2  # other arrivals: the records are not of this run
    assert "another run" in capsys.readouterr().err


@pytest.mark.parametrize("how", [["--stream"], []], ids=["streamed", "final"])
def test_a_tiny_model_is_really_served(how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers, links, server and load as they are, on the CPU."""
    out = tmp_path / "r.json"
    places = ["--collocated", "cpu", "--prefill", "cpu", "--decode", "cpu"]
    assert run([*TINY, *places, *how, "--no-goodput", "--out", str(out)]) == 0
    report = load_report(out)
    assert report.strategies == ["collocated", "disaggregated"]
    for result in report.results:
        assert result.summary.counters.completed == result.summary.offered > 0
        assert result.summary.itl.count == 3 * result.summary.offered
        assert result.summary.token_throughput > 0
    assert "goodput" not in capsys.readouterr().out


def test_places() -> None:
    cpu = DeviceSpec.parse("cpu")
    assert Places.parse("", "", "", "cpu").of("collocated") == {"collocated": [cpu], "prefill": [], "decode": []}
    split = Places.parse("", "cuda:0/sm=84", "cuda:0/sm=48", "cpu")
    assert split.strategies() == ["disaggregated"]
    assert [str(s) for s in split.of("slo")["prefill"]] == ["cuda:0/sm=84"]
    with pytest.raises(ConfigError, match="no place"):
        split.of("collocated")
    with pytest.raises(ConfigError, match="need each other"):
        Places.parse("", "cpu", "", "cpu")


def test_arrivals_by_name_by_lengths_and_from_a_file(tmp_path: Path) -> None:
    options = {"scale": 1.0, "limit": None, "max_model_len": 2048}
    named = arrivals("mixed", 5.0, 3, **options)(4.0)
    assert max(a.prompt_tokens + a.output_tokens for a in named.arrivals) <= 2048
    fixed = arrivals("100:7", 5.0, 3, **options)(4.0)
    assert {(a.prompt_tokens, a.output_tokens) for a in fixed.arrivals} == {(100, 7)}
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 500 * i, "input_length": 100 + i, "output_length": 3} for i in range(10)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    replayed = arrivals(str(trace), 5.0, 3, **options)(8.0)
    assert [a.prompt_tokens for a in replayed.arrivals] == list(range(100, 110))
    assert replayed.rate == pytest.approx(8.0)
    assert len(arrivals(str(trace), 1.0, 3, **options)(8.0)) == 8  # all rates run for the same time
    with pytest.raises(ConfigError, match="sharegpt"):
        arrivals("chat", 5.0, 3, **options)


@pytest.mark.parametrize("text", ["", "1,,2", "fast", "0", "-1", "nan", "inf"])
def test_rates_are_positive_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="rates"):
        parse_rates(text)
    assert parse_rates("1, 2.5") == [1.0, 2.5]


@pytest.mark.parametrize(
    ("strategy", "settings", "says"),
    [
        ("fly", [], "fly"),
        ("slo", [], "--profile"),
        ("threshold", ["size"], "KEY=VALUE"),
        ("threshold", ["size=3"], "size"),
        ("threshold", ["max_prefill_queue_size=0"], "got 0"),
        ("seed-rule", [], "--profile"),
        ("threshold", ["max_prefill_queue_size=" + "(" * 10_000], "max_prefill_queue_size"),
    ],
    ids=["name", "profile", "form", "option", "value", "seed-profile", "nested"],
)
def test_policies_are_checked_before_anything_runs(strategy: str, settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        policy_maker(None, settings, 500.0, 50.0)(strategy)()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rate", "0"], "rates"),
        (["--workload", "chat"], "workload"),
        (["--prefill", "cpu"], "need each other"),
        (["--slo-tpot", "-1"], "tpot"),
        (["--timeout", "-1"], "timeout"),
        (["--strategy", "fly"], "fly"),
        (["--duration", "-3"], "duration"),
        (["--policy", "x=1"], "--policy x=1: collocated have no options"),
        (["--profile", "nope"], "'nope' is neither a file"),
        (["--strategy", "slo", "--profile", "rtx-4090"], "no step-time model"),
        (["--warmup", "60"], "a warm-up of 60 s leaves nothing of 60 s"),
        (["--scale", "inf"], "the scale of a workload must be a finite number > 0, got inf"),
        (["--scale", "1e300", "--workload", "20:3"], "a length in tokens must be at most 10,000,000"),
        (["--workload", "5000:1"], "5,000 and 1 tokens are more than the 4,096"),
        (["--limit", "0"], "--limit must be an int >= 1, got 0"),
        (["--timeout", "inf"], "timeout_s must be a finite number of seconds >= 0, got inf"),
        (["--rate", "1e-9"], "none arrives"),
        (["--out", __file__ + "/x.json"], "cannot be written"),
    ],
    ids=lambda value: "-".join(value)[2:20] if isinstance(value, list) else "",
)
def test_wrong_options_are_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "--model", "dummy:tiny", "--num-blocks", "64", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("nanopd: ")
    assert says in error
    assert len(error.splitlines()) == 1


def test_what_is_wrong_with_the_times_is_said_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--model", "dummy:none", "--warmup", "9", "--duration", "3"]) == 2
    assert "warm-up of 9 s" in capsys.readouterr().err
    assert run(["bench", "--model", "dummy:none", "--strategy", "fly"]) == 2
    assert "'fly'" in capsys.readouterr().err


def test_a_policy_that_needs_a_profile_gets_the_one_that_was_given() -> None:
    made = policy_maker("h20", [], 500.0, 50.0)("seed-rule")()
    assert made.model.profile.device == "NVIDIA H20"
