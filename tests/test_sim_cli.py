"""``nanopd simulate`` from the command line."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nanopd.bench.report import load_report
from nanopd.cli.app import run
from nanopd.cli.simulate import Counts, parse_split
from nanopd.errors import ConfigError
from nanopd.sim.layouts import Layout
from nanopd.sim.speed import main, measure
from tests.sim_cases import profile

QUICK = ["--rate", "4", "--duration", "5", "--workload", "200:8", "--no-goodput"]


def test_the_seeds_machines_are_compared_on_equal_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert run(["simulate", "--hardware", "rtx-4090", "--gpus", "4", *QUICK, "--out", str(out)]) == 0
    report = load_report(out)
    assert report.strategies == ["collocated", "disaggregated"] and report.comparison == "equal hardware"
    assert {h.num_gpus for h in report.hardware.values()} == {4}
    assert all(result.summary.counters.completed == result.summary.offered > 10 for result in report.results)
    assert report.environment["simulated"] == "NVIDIA GeForce RTX 4090"
    assert "disaggregated" in capsys.readouterr().out


def test_the_same_command_gives_the_same_numbers(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        assert run(["simulate", "--hardware", "h20", "--gpus", "2", *QUICK, "--out", str(file)]) == 0
    assert load_report(files[0]).results == load_report(files[1]).results


def test_a_split_card_and_a_policy_that_uses_all_of_it(tmp_path: Path) -> None:
    file = profile().save(tmp_path / "card.json")
    out = tmp_path / "report.json"
    options = ["--split", "48/84", "--strategy", "collocated", "--strategy", "disaggregated", "--strategy", "threshold"]
    assert run(["simulate", "--hardware", str(file), *options, *QUICK, "--out", str(out)]) == 0
    assert {h.devices for h in load_report(out).hardware.values()} == {("cuda:0",)}


def test_search_prints_every_layout_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = profile().save(tmp_path / "card.json")
    command = ["simulate", "--hardware", str(file), "--search", "--gpus", "2", "--duration", "2", "--workload", "300:4"]
    out = tmp_path / "new" / "search.json"
    assert run([*command, "--slo-ttft", "50", "--slo-tpot", "8", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(out.read_text())
    assert {trial["name"] for trial in written["trials"]} == {"2 collocated", "1 prefill : 1 decode"}
    assert all(trial["verdict"] for trial in written["trials"])
    rates = [trial["per_gpu"] for trial in written["trials"]]
    assert rates[0] == max(rates) > 0 and f"{written['trials'][0]['name']}: {rates[0]:.4g} requests/s" in printed
    assert written["slo"] == {"ttft_s": 0.05, "tpot_s": 0.008} and written["environment"]["simulated"] == "NVIDIA H200"
    assert "2 collocated" in printed and "1 prefill : 1 decode" in printed
    assert "requests/s per GPU, after" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "1", "--strategy", "disaggregated"], "need two GPUs, or --split"),
        (["--prefill", "1"], "need two GPUs, or --split"),
        (["--memory", "nan"], "--memory must be above 0"),
        (["--memory", "1e30"], "at most 100,000, got 1e+30"),
        (["--gpus", "4", "--prefill", "1", "--decode", "1", "--strategy", "disaggregated"], "2 of 4 GPUs"),
        (["--gpus", "2", "--link", "0"], "--link of a simulated link must be a finite number of GB/s > 0, got 0.0"),
        (["--hardware", "abacus"], "neither a file nor a hardware profile"),
        (["--split", "48/64"], "no step-time model for 'sm=64'"),
        (["--split", "84/84"], "84 + 84 SMs were asked for on cuda:0, which has 128"),
        (["--split", "٤٨/84"], "a split is SMS_FOR_DECODE"),
        (["--split", "9" * 5000 + "/84"], "a split is SMS_FOR_DECODE"),
        (["--gpus", "10000"], "collocated devices of a layout must be at most 1,024, got 10000"),
        (["--gpus", "9" * 30], "at most 1,024"),
        (["--strategy", "fly"], "no policy is called 'fly'"),
        (["--strategy", "adaptive"], "no policy is called 'adaptive'"),
        (["--policy", "x=1"], "--policy x=1: collocated have no options"),
        (["--link", "0"], "--link of a simulated link must be a finite number of GB/s > 0, got 0.0"),
        (["--bus", "nan"], "--bus of a simulated link must be a finite number of GB/s > 0, got nan"),
        (["--latency", "-1"], "latency_s of a simulated link"),
        (["--num-blocks", "999999999999"], "--num-blocks must be at most 16,777,216"),
        (["--num-blocks", "9" * 30], "--num-blocks must be at most 16,777,216"),
        (["--rate", "1e9"], "above 0 and below 1,000,000 requests per second, got '1e9'"),
        (["--rate", "1e-9"], "at 1e-09 requests/s none arrives between 0 s and 5 s"),
        (["--warmup", "4.999"], "none arrives between 4.999 s and 5 s"),
        (["--warmup", "5"], "a warm-up of 5 s leaves nothing of 5 s"),
        (["--drain", "inf"], "drain_s must be a finite number of seconds >= 0, got inf"),
        (["--slo-ttft", "inf"], "ttft_s of an SLO must be a finite number of seconds > 0, got inf"),
        (["--workload", "1000000:5"], "1,000,000 and 5 tokens are more than the 40,960"),
        (["--workload", "5:" + "9" * 5000], "is none of"),
        (["--max-model-len", "100"], "200 and 8 tokens are more than the 100"),
        (["--limit", "3"], "--limit 3 cuts a trace, and '200:8' is none"),
        (["--search", "--duration", "0"], "the duration must be a finite number of seconds > 0, got 0.0"),
        (["--search", "--strategy", "slo", "--figures", "f"], "drop --strategy, --figures"),
        (["--search", "--warmup", "1"], "drop --timeout, --warmup or --drain"),
        (["--search", "--rate", "nan"], "rates must be above 0"),
        (["--workload", "nothing"], "is none of"),
        (
            ["--hardware", "h200", "--strategy", "slo", "--collocated", "1", "--policy", "ttft_ms=5"],
            "use --profile, --slo-ttft",
        ),
        (["--gpus", "2", "--collocated", "5", "--strategy", "collocated"], "all of 2 GPUs, and --collocated 5 are 5"),
        (["--gpus", "3", "--collocated", "5"], "all of 3 GPUs, and --collocated 5 are 5"),
        (["--gpus", "3", "--collocated", "5", "--strategy", "disaggregated"], "all of 3 GPUs, and --collocated 5 are"),
        (["--gpus", "4", "--collocated", "2", "--strategy", "disaggregated"], "all of 4 GPUs, and --collocated 2 are"),
        (["--gpus", "2", "--collocated", "0", "--strategy", "collocated"], "all of 2 GPUs, and --collocated 0 are 0"),
        (["--gpus", "2", "--prefill", "7"], "all of 2 GPUs, and --prefill 7 are 7"),
        (["--gpus", "4", "--prefill", "0", "--strategy", "disaggregated"], "0 collocated, 0 prefill, 4 decode"),
        (
            ["--gpus", "2", "--split", "48/84", "--prefill", "7", "--decode", "9"],
            "a split GPU has one worker of each role: 2 of them cannot be --prefill 7, --decode 9",
        ),
        (["--split", "48/84", "--prefill", "0", "--strategy", "disaggregated"], "1 of them cannot be --prefill 0"),
        (["--gpus", "2", "--collocated", "5", "--search"], "every ratio of 2 GPUs, and the counts of the roles are 5"),
        (["--out", "."], "--out . is a folder"),
        (["--out", __file__ + "/x.json"], "cannot be written: "),
        (["--out", "a.records"], "the folder of a run's raw records"),
        (["--figures", __file__ + "/x"], "cannot be written: "),
        (["--figures", __file__], "is a file: name a folder"),
    ],
)
def test_mistakes_are_said(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *QUICK, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_figures_below_the_report_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nanopd.cli.simulate.compare_strategies", lambda *_, **__: pytest.fail("it ran first"))
    for figures in ("x", "x/f"):
        assert run(["simulate", *QUICK, "--out", str(tmp_path / "x"), "--figures", str(tmp_path / figures)]) == 2
        assert "needs a folder in its place" in capsys.readouterr().err and not os.listdir(tmp_path)


@pytest.mark.parametrize("search", [[], ["--search"]], ids=["compare", "search"])
def test_a_profile_without_a_bandwidth_needs_the_option(
    search: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = profile(bandwidth_gb_s=None).save(tmp_path / "card.json")
    command = ["simulate", "--hardware", str(file), "--prefill", "1", "--decode", "1", *QUICK, *search]
    assert run(command) == 2
    assert capsys.readouterr().err.endswith("no bandwidth is known between devices of 'NVIDIA H200': give --link\n")
    assert run([*command, "--link", "10"]) == 0


def test_a_pipe_is_not_replaced_by_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run(["simulate", *QUICK, "--out", str(pipe)]) == 2
    assert "no regular file" in capsys.readouterr().err and pipe.is_fifo()


def test_why_requests_were_dropped_is_shown_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert run(["simulate", *QUICK, "--num-blocks", "5", "--out", str(out)]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "First refused: " in shown and "200 tokens" in shown.split("First refused: ")[1][:200]
    (result,) = load_report(out).results
    assert list(result.drops) == ["refused"] and result.summary.counters.dropped["refused"] == result.summary.offered


def test_requests_that_were_cut_are_counted_on_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--hardware", "h20", "--duration", "5", "--rate", "4", "--no-goodput"]
    assert run(["simulate", *options, "--workload", "long", "--max-model-len", "1000"]) == 0
    assert "prompts and 0 outputs of" in " ".join(capfd.readouterr().out.split())
    assert run(["simulate", *options, "--workload", "200:8"]) == 0
    assert "were cut" not in capfd.readouterr().out


def test_no_number_is_broken_on_80_columns(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Under overload, where times to first token have six digits."""
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--gpus", "2", "--workload", "long", "--rate", "0.25,20", "--duration", "60", "--no-goodput"]
    assert run(["simulate", *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    lines = lines[[line.split()[2:4] for line in lines].index(["TTFT", "ms"]) :]
    first = [line.split() for line in lines[1:] if line.startswith(("collocated", "disaggregated"))]
    assert [len(words) for words in first] == [7] * 4 and not any("/" in words[2] for words in first)
    below = [line.split() for line in lines if line.startswith(" ")]  # p90 and p99, of TTFT, TPOT and E2E
    assert [len(words) for words in below] == [3] * 8 and all(w.startswith("/") for words in below for w in words)
    assert max(len(words[0]) for words in below[1::2]) == len("/123456")


def test_a_search_in_which_nobody_is_served_well_has_no_winner(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--search", "--hardware", "h20", "--gpus", "2", "--duration", "1", "--workload", "300:4"]
    assert run([*command, "--slo-ttft", "0.001"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "No layout met the SLO at any rate" in shown and "the highest goodput per device" not in shown


def test_brackets_in_the_name_of_a_trace_are_shown_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "a[red].jsonl"
    rows = [{"timestamp": 500 * i, "input_length": 100, "output_length": 3} for i in range(10)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert run(["simulate", "--trace", str(trace), "--rate", "2", "--duration", "3", "--no-goodput"]) == 0
    assert "a[red]: trace a[red].jsonl; " in capfd.readouterr().out


def test_counts() -> None:
    assert Counts(8, None, 3, None, None).of("disaggregated") == Layout(prefill=3, decode=5)
    assert Counts(8, None, None, None, None).of("disaggregated") == Layout(prefill=2, decode=6)
    assert Counts(None, 2, 1, 1, None).of("slo") == Layout(2, 1, 1)
    assert Counts(None, 2, 1, 1, None).of("collocated") == Layout(collocated=4)
    assert Counts(4, 0, 2, 2, None).of("collocated") == Counts(4, None, 1, None, None).of("collocated")
    assert Counts(4, 4, None, None, None).of("disaggregated") == Counts(4, 0, 1, None, None).of("disaggregated")
    split = Layout(prefill=2, decode=2, split=(48, 84))
    assert Counts(None, 0, 2, 2, (48, 84)).of("disaggregated") == split  # the two are on the same cards
    assert Counts(2, None, None, None, (48, 84)).of("disaggregated") == split
    assert parse_split("48/84") == (48, 84) and parse_split(None) is None
    with pytest.raises(ConfigError, match="48/84"):
        parse_split("48-84")


def test_the_speed_report_says_what_was_simulated() -> None:
    speed = measure(20, Layout(collocated=2), rate=4.0)
    assert 5 < speed.requests < 40 and speed.tokens >= 64 * speed.requests and speed.steps > 64
    assert "µs per token" in str(speed) and "peak memory" in str(speed)
    assert "1 requests" in str(replace(speed, requests=1)) and "0 requests" in str(replace(speed, requests=0))


@pytest.mark.parametrize("text", ["0", "-5", "many", "1e3", "9" * 30])
def test_the_speed_report_takes_counts_only(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([text]) == 2
    assert capsys.readouterr().err.startswith("usage: ")


@pytest.mark.parametrize(("ttft_ms", "hopeless"), [("1", True), ("100000", False)])
def test_a_comparison_in_which_nobody_is_served_well_says_what_to_change(
    ttft_ms: str, hopeless: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--hardware", "rtx-4090", "--collocated", "1", "--workload", "64:4", "--rate", "1", "--duration", "3"]
    assert run(["simulate", *options, "--no-goodput", "--slo-tpot", "100000", "--slo-ttft", ttft_ms]) == 0
    assert ("lower --rate" in " ".join(capfd.readouterr().out.split())) is hopeless
