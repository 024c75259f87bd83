"""``nanopd simulate`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanopd.bench.report import load_report
from nanopd.cli.app import run
from nanopd.cli.simulate import Counts, parse_split
from nanopd.errors import ConfigError
from nanopd.sim.layouts import Layout
from nanopd.sim.speed import measure
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
        (["--memory", "nan"], "memory_gb must be above 0"),
        (["--memory", "1e30"], "at most 100,000, got 1e+30"),
        (["--gpus", "4", "--prefill", "1", "--decode", "1", "--strategy", "disaggregated"], "2 of 4 GPUs"),
        (["--gpus", "2", "--link", "0"], "above 0 GB/s"),
        (["--hardware", "abacus"], "neither a file nor a hardware profile"),
        (["--split", "48/84"], "no step-time model for 'sm=84'"),
        (["--workload", "nothing"], "is none of"),
        (
            ["--hardware", "h200", "--strategy", "slo", "--collocated", "1", "--policy", "ttft_ms=5"],
            "use --profile, --slo-ttft",
        ),
        (["--out", "."], "--out . is a folder"),
        (["--figures", __file__], "is a file: name a folder"),
    ],
)
def test_mistakes_are_said(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *QUICK, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_counts() -> None:
    assert Counts(8, None, 3, None, None).of("disaggregated") == Layout(prefill=3, decode=5)
    assert Counts(8, None, None, None, None).of("disaggregated") == Layout(prefill=2, decode=6)
    assert Counts(None, 2, 1, 1, None).of("slo") == Layout(2, 1, 1)
    assert Counts(None, 2, 1, 1, None).of("collocated") == Layout(collocated=4)
    assert parse_split("48/84") == (48, 84) and parse_split(None) is None
    with pytest.raises(ConfigError, match="48/84"):
        parse_split("48-84")


def test_the_speed_report_says_what_was_simulated() -> None:
    speed = measure(20, Layout(collocated=2), rate=4.0)
    assert 5 < speed.requests < 40 and speed.tokens >= 64 * speed.requests and speed.steps > 64
    assert "µs per token" in str(speed) and "peak memory" in str(speed)


@pytest.mark.parametrize(("ttft_ms", "hopeless"), [("1", True), ("100000", False)])
def test_a_comparison_in_which_nobody_is_served_well_says_what_to_change(
    ttft_ms: str, hopeless: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--hardware", "rtx-4090", "--collocated", "1", "--workload", "64:4", "--rate", "1", "--duration", "3"]
    assert run(["simulate", *options, "--no-goodput", "--slo-tpot", "100000", "--slo-ttft", ttft_ms]) == 0
    assert ("lower --rate" in " ".join(capfd.readouterr().out.split())) is hopeless
