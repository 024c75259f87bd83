"""Workloads: Poisson arrivals, length distributions, the same from the same seed, clipping that is counted."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopd.bench import Fixed, LogNormal, Part, Uniform, Workload, named_workload, poisson, schedules, workload_names
from nanopd.errors import ConfigError

ONE = Workload.fixed(8, 4)


def kolmogorov_smirnov(values: np.ndarray, cdf) -> float:
    """sqrt(n) * largest distance; above 1.95 with probability 0.001 if the values come from the distribution."""
    x = np.sort(values)
    n = len(x)
    expected = np.array([cdf(v) for v in x])
    steps = np.arange(n + 1) / n
    return math.sqrt(n) * max(np.max(steps[1:] - expected), np.max(expected - steps[:-1]))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gaps_are_exponential_and_independent(seed: int) -> None:
    schedule = poisson(ONE, 20.0, 300.0, seed)
    gaps = np.diff([0.0, *(a.time_s for a in schedule.arrivals)])
    assert kolmogorov_smirnov(gaps, lambda x: 1 - math.exp(-20.0 * x)) < 1.95
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / math.sqrt(len(gaps))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_counts_have_the_mean_and_variance_of_a_poisson_process(seed: int) -> None:
    schedule = poisson(ONE, 5.0, 1000.0, seed)
    counts = np.bincount([int(a.time_s) for a in schedule.arrivals], minlength=1000)
    assert abs(counts.mean() - 5.0) < 4 * math.sqrt(5.0 / 1000)
    # Var(sample variance) of a Poisson variable is about (2 λ² + λ) / n.
    assert abs(counts.var(ddof=1) - 5.0) < 4 * math.sqrt((2 * 25.0 + 5.0) / 1000)


def test_arrivals_lie_in_the_duration_and_in_order() -> None:
    schedule = poisson(ONE, 50.0, 7.0, 3)
    times = [a.time_s for a in schedule.arrivals]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 7.0
    assert [a.index for a in schedule.arrivals] == list(range(len(times)))


@pytest.mark.parametrize("name", workload_names())
def test_the_same_seed_gives_the_same_requests_and_prompts(name: str) -> None:
    first, again = (poisson(named_workload(name), 3.0, 10.0, 11) for _ in range(2))
    assert first == again
    assert first.fingerprint() == again.fingerprint()
    assert first.prompt(first.arrivals[0], 1000) == again.prompt(again.arrivals[0], 1000)
    other = poisson(named_workload(name), 3.0, 10.0, 12)
    assert other.fingerprint() != first.fingerprint()


def test_another_process_draws_the_same() -> None:
    """Nothing depends on the hash seed of a process."""
    code = (
        "from nanopd.bench import *; s = poisson(named_workload('mixed'), 3.0, 5.0, 4); "
        "print(s.fingerprint(), sum(s.prompt(s.arrivals[1], 999)))"
    )
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    here = poisson(named_workload("mixed"), 3.0, 5.0, 4)
    assert found == {f"{here.fingerprint()} {sum(here.prompt(here.arrivals[1], 999))}\n"}


def test_a_higher_rate_is_the_same_sequence_faster_with_other_tokens() -> None:
    at = schedules(named_workload("mixed"), 20.0, 5)
    slow, fast = at(2.0), at(4.0)
    assert len(fast) > len(slow)
    for a, b in zip(slow.arrivals, fast.arrivals):
        assert (a.prompt_tokens, a.output_tokens) == (b.prompt_tokens, b.output_tokens)
        assert a.time_s == pytest.approx(2 * b.time_s)
    # else a prefix cache that was filled at one rate would answer the next
    assert slow.prompt(slow.arrivals[0], 50_000) != fast.prompt(fast.arrivals[0], 50_000)


def test_prompts_have_their_length_and_stay_in_the_vocabulary() -> None:
    schedule = poisson(named_workload("short"), 5.0, 5.0, 0)
    prompts = [schedule.prompt(a, 77) for a in schedule.arrivals]
    assert [len(p) for p in prompts] == [a.prompt_tokens for a in schedule.arrivals]
    assert {token for p in prompts for token in p} == set(range(77))
    assert len({tuple(p) for p in prompts}) == len(prompts)


@pytest.mark.parametrize("lengths", [LogNormal(300.0, 0.8), LogNormal(50.0, 1.5)], ids=["narrow", "wide"])
def test_log_normal_lengths(lengths: LogNormal) -> None:
    workload = Workload("w", (Part(1.0, lengths, Fixed(1)),), max_prompt=10**9)
    logs = np.log([a.prompt_tokens for a in poisson(workload, 100.0, 100.0, 1).arrivals])
    assert abs(logs.mean() - math.log(lengths.median)) < 4 * lengths.sigma / math.sqrt(len(logs)) + 0.01
    assert logs.std() == pytest.approx(lengths.sigma, rel=0.05)


def test_a_fit_finds_the_parameters_again() -> None:
    rng = np.random.default_rng(0)
    found = LogNormal.fit([round(x) for x in rng.lognormal(math.log(800.0), 0.7, 20_000)])
    assert found.median == pytest.approx(800.0, rel=0.02)
    assert found.sigma == pytest.approx(0.7, rel=0.02)
    assert found.mean == pytest.approx(800.0 * math.exp(0.245), rel=0.03)


def test_uniform_lengths_reach_both_ends_equally() -> None:
    workload = Workload("w", (Part(1.0, Uniform(3, 6), Fixed(1)),))
    counts = np.bincount([a.prompt_tokens for a in poisson(workload, 100.0, 100.0, 1).arrivals])
    assert set(np.flatnonzero(counts)) == {3, 4, 5, 6}
    assert counts[3:].min() > 0.9 * counts[3:].max()


def test_parts_come_by_weight() -> None:
    workload = Workload("w", (Part(3.0, Fixed(1), Fixed(1)), Part(1.0, Fixed(2), Fixed(2))))
    arrivals = poisson(workload, 100.0, 100.0, 1).arrivals
    share = sum(a.prompt_tokens == 1 for a in arrivals) / len(arrivals)
    assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / len(arrivals))


def test_clipped_lengths_are_counted() -> None:
    free = Workload("w", (Part(1.0, LogNormal(100.0, 1.0), LogNormal(100.0, 1.0)),), 10**9, 10**9)
    tight = Workload("w", free.parts, max_prompt=120, max_output=80)
    drawn, clipped = poisson(free, 50.0, 20.0, 2), poisson(tight, 50.0, 20.0, 2)
    assert clipped.num_clipped_prompts == sum(a.prompt_tokens > 120 for a in drawn.arrivals) > 0
    assert clipped.num_clipped_outputs == sum(a.output_tokens > 80 for a in drawn.arrivals) > 0
    assert clipped.until(5.0).num_clipped_prompts == sum(a.prompt_tokens > 120 for a in drawn.until(5.0).arrivals)
    assert [a.prompt_tokens for a in clipped.arrivals] == [min(a.prompt_tokens, 120) for a in drawn.arrivals]
    assert drawn.num_clipped_prompts == drawn.num_clipped_outputs == 0


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(workload_names()), st.integers(2, 20_000), st.floats(0.01, 4.0))
def test_a_fitting_workload_fits(name: str, max_len: int, scale: float) -> None:
    fitted = named_workload(name).scaled(scale).fitting(max_len)
    for arrival in poisson(fitted, 20.0, 2.0, 0).arrivals:
        assert arrival.prompt_tokens >= 1
        assert arrival.output_tokens >= 1
        assert arrival.prompt_tokens + arrival.output_tokens <= max_len


def test_stretching_to_a_rate_keeps_the_requests() -> None:
    schedule = poisson(named_workload("short"), 5.0, 20.0, 1)
    double = schedule.at_rate(10.0)
    assert double.rate == pytest.approx(10.0)
    assert [a.prompt_tokens for a in double.arrivals] == [a.prompt_tokens for a in schedule.arrivals]
    assert "times multiplied" in double.note


def test_a_schedule_may_be_cut_short() -> None:
    schedule = poisson(Workload.fixed(8, 4), 5.0, 20.0, 1)
    cut = schedule.until(4.0)
    assert cut.arrivals == tuple(a for a in schedule.arrivals if a.time_s < 4.0)
    assert cut.duration_s == 4.0
    assert schedule.until(20.0) is schedule


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: poisson(ONE, 0.0, 1.0), "rate"),
        (lambda: poisson(ONE, math.nan, 1.0), "rate"),
        (lambda: poisson(ONE, 1.0, -2.0), "-2"),
        (lambda: poisson(ONE, 1e5, 1e5), "1,000,000"),
        (lambda: Uniform(5, 4), "5 and 4"),
        (lambda: Fixed(0), "got 0"),
        (lambda: LogNormal(-1.0, 1.0), "-1.0"),
        (lambda: LogNormal.fit([7]), "got 1"),
        (lambda: Workload("empty", ()), "empty"),
        (lambda: Workload("w", ONE.parts, max_prompt=0), "got 0"),
        (lambda: ONE.scaled(0.0), "0.0"),
        (lambda: ONE.fitting(1), "1"),
        (lambda: named_workload("wikipedia"), "sharegpt"),
    ],
    ids=[
        "rate-zero", "rate-nan", "duration", "too-many", "uniform", "fixed", "log-normal", "fit", "no-parts", "maximum",
        "scale", "model-length", "unknown-name",
    ],
)  # fmt: skip
def test_bad_values_are_named(make, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        make()
