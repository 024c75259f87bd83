"""``nanopd route``: both estimates, the reason, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from router_cases import HALF, WHOLE

from nanopd.cli.app import run
from nanopd.costmodel.hardware_profile import preset
from nanopd.router.policies import POLICY_NAMES


@pytest.fixture
def measured(tmp_path: Path) -> str:
    """A profile with step-time models."""
    models = {"whole device": WHOLE, "sm=84": HALF}
    return str(replace(preset("h20"), device="imagined card", step_time=models).save(tmp_path / "profile.json"))


def rows(text: str) -> dict[str, list[str]]:
    """Lines of the table: term -> the last two columns."""
    return {" ".join(parts[:-2]): parts[-2:] for line in text.splitlines() if len(parts := line.split()) > 2}


@pytest.mark.parametrize(("load", "path"), [(2, "collocated"), (3, "disaggregated")])
def test_the_seeds_rule_on_a_4090(load: int, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["route", "--profile", "rtx-4090", "--policy", "seed-rule", "--load", str(load)]) == 0
    shown = capsys.readouterr().out
    assert f"\n{path}: load {load} is" in shown and "threshold 2.105" in shown
    table = rows(shown)
    assert table["prefill"] == ["124.72", "124.72"]
    assert table["transfer"] == ["-", "11.43"]
    assert table["interference"] == [f"{86.9146 * load / 16:.2f}", "-"]


PARTS = ["--prefill-place", "sm=84", "--decode-place", "sm=84"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "1 whole device for both phases, against 2: one for prefill, one for decode"),
        (["--policy", "slo", *PARTS], "1 whole device for both phases, against sm=84 for prefill and sm=84 for decode"),
        (
            ["--policy", "slo", *PARTS[:2]],
            "1 whole device for both phases, against sm=84 for prefill and a whole device for decode",
        ),
        (
            PARTS,
            "1 whole device for both phases, against sm=84 for prefill and sm=84 for decode (the estimates are of "
            "whole devices: only the policy slo has others)",
        ),
    ],
    ids=["whole", "parts", "one-part", "analytical"],
)
def test_it_says_which_hardware_is_compared(
    options: list[str], line: str, measured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["route", "--profile", measured, *options]) == 0
    assert f"Compared: {line}\n" in capsys.readouterr().out


def test_the_help_says_that_the_default_compares_one_device_with_two(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["route", "--help"]) == 0
    assert "which is twice the hardware" in " ".join(capfd.readouterr().out.split())


def test_brackets_in_a_profile_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = replace(preset("h20"), device="card [/bold]", model="m[red]").save(tmp_path / "odd.json")
    assert run(["route", "--profile", str(odd)]) == 0
    assert "card [/bold], m[red]. Policy" in capsys.readouterr().out


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_shows_both_estimates_and_says_why(
    policy: str, measured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["route", "--profile", measured, "--policy", policy, "--prompt-tokens", "4000", "--load", "20"]) == 0
    shown = capsys.readouterr().out
    assert "imagined card" in shown and f"Policy {policy}," in shown
    table = rows(shown)
    assert all(float(value.replace(",", "")) > 0 for value in table["in all"])
    assert ("its estimates" in shown) is (policy in ("seed-rule", "seed-estimate", "slo"))
    last = shown.strip().splitlines()[-1]
    assert last.startswith(("collocated: ", "disaggregated: ")) and len(last.split()) > 1
    assert ("TTFT (limit 1000)" in shown) is (policy == "slo")


def test_the_slo_policy_uses_the_model_of_each_place(measured: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["route", "--profile", measured, "--policy", "slo", "--prompt-tokens", "3000", "--load", "0"]
    assert run([*arguments, "--chunk-size", "2048", "--prefill-place", "sm=84", "--decode-place", "sm=84"]) == 0
    prefill = rows(capsys.readouterr().out)["prefill"]
    assert float(prefill[0]) == pytest.approx(WHOLE.prefill_ms(3000, chunk_size=2048), rel=0.02)
    assert float(prefill[1]) == pytest.approx(HALF.prefill_ms(3000, chunk_size=2048), rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--profile", "abacus"], "rtx-4090"),
        (["--profile", "h20", "--policy", "best"], "seed-estimate, threshold, slo"),
        (["--profile", "h20", "--policy", "slo"], "no step-time model"),
        (["--profile", "h20", "--load", "-1"], "load must be an int >= 0, got -1"),
        (["--profile", "h20", "--prompt-tokens", "0"], "prompt_tokens must be a finite number of tokens >= 1, got 0"),
        (["--profile", "h20", "--output-tokens", "0.5"], "output_tokens must be a finite number of tokens >= 1"),
        (["--profile", "h20", "--context", "-5"], "context must be an int >= 0, got -5"),
        (
            ["--profile", "h20", "--output-tokens", "inf"],
            "output_tokens must be a finite number of tokens >= 1, got inf",
        ),
        (["--profile", "h20", "--output-tokens", "1e300"], "output_tokens must be at most 16,777,216"),
        (["--profile", "h20", "--prompt-tokens", "1000000000"], "prompt_tokens must be at most 16,777,216"),
        (["--profile", "h20", "--load", "1000000000"], "load must be at most 16,777,216"),
        (
            ["--profile", "h20", "--policy", "adaptive"],
            "threshold, slo; `nanopd.router.adaptive.Adaptive` needs",
        ),
        (["--profile", "h20", "--ttft-ms", "nan"], "ttft_ms must be a finite number of ms > 0, got nan"),
        (["--profile", "h20", "--tpot-ms", "0"], "tpot_ms must be a finite number of ms > 0, got 0.0"),
        (["--profile", "h20", "--chunk-size", "0"], "chunk_size must be an int >= 1, got 0"),
        (["--profile", "h200", "--prefill-place", "sm=7"], "no step-time model for 'sm=7'"),
        (["--profile", "h20", "--decode-place", ""], "no step-time model for ''"),
    ],
    ids=[
        "profile",
        "policy",
        "no-model",
        "load",
        "prompt",
        "output",
        "context",
        "endless",
        "huge",
        "long",
        "busy",
        "adaptive",
        "ttft",
        "tpot",
        "chunk",
        "prefill-place",
        "decode-place",
    ],
)
def test_what_it_refuses_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["route", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1
