"""Goodput search on curves whose answer is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from bench_cases import single_server
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopd.bench import SLO, Probe, Workload, find_goodput, poisson, summarize
from nanopd.errors import ConfigError


@dataclass(frozen=True)
class Run:
    attained: int
    offered: int = 100_000


class Curve:
    """attainment(rate), and a count of how often it was asked."""

    def __init__(self, attainment: Callable[[float], float], offered: int = 100_000) -> None:
        self.attainment, self.offered = attainment, offered
        self.rates: list[float] = []

    def __call__(self, rate: float) -> Run:
        self.rates.append(rate)
        return Run(round(self.attainment(rate) * self.offered), self.offered)


def step(edge: float) -> Curve:
    return Curve(lambda rate: 1.0 if rate <= edge else 0.0)


@settings(max_examples=200, deadline=None)
@given(st.floats(1.0, 64.0), st.floats(0.01, 0.5))
def test_the_edge_is_found_to_the_tolerance(edge: float, tolerance: float) -> None:
    curve = step(edge)
    found = find_goodput(curve, low=1.0, high=64.0, tolerance=tolerance, max_runs=30)
    assert found.rate <= edge
    assert found.rate * (1 + tolerance) >= min(edge, 64.0) * (1 - 1e-12)
    assert len(curve.rates) == len(set(curve.rates))
    assert len(curve.rates) <= 2 + math.ceil(math.log2(math.log(64.0) / math.log1p(tolerance)) + 1e-9) + 1


def test_a_smooth_curve() -> None:
    found = find_goodput(Curve(lambda rate: math.exp(-rate / 50)), low=1, high=20, tolerance=0.001, max_runs=30)
    assert found.rate == pytest.approx(-50 * math.log(0.9), rel=0.001)
    assert found.upper is not None
    assert found.rate < found.upper


def test_per_gpu() -> None:
    found = find_goodput(step(8.0), low=1, high=16, num_gpus=4)
    assert found.per_gpu == found.rate / 4


def test_the_lowest_rate_fails() -> None:
    curve = step(0.5)
    found = find_goodput(curve, low=1, high=16)
    assert found.rate == found.per_gpu == 0.0
    assert curve.rates == [1]
    assert "already 1/s" in found.reason
    assert "attains only 0%, where 90% are asked" in found.reason


def test_no_rate_fails() -> None:
    found = find_goodput(step(100.0), low=1, high=16)
    assert (found.rate, found.upper) == (16, None)
    assert "at least" in found.reason


def test_known_results_prune_the_search() -> None:
    curve = step(8.0)
    known = [Probe(4.0, 95, 100), Probe(10.0, 10, 100), Probe(1.0, 100, 100), Probe(16.0, 0, 100), Probe(99.0, 9, 9)]
    found = find_goodput(curve, low=1, high=16, known=known, tolerance=0.05)
    assert all(4.0 < rate < 10.0 for rate in curve.rates)
    assert 8.0 / 1.05 <= found.rate <= 8.0
    assert {probe.rate for probe in found.probes} == {1.0, 4.0, 10.0, 16.0, *curve.rates}


def test_an_island_beyond_a_failure_is_left_out_and_named() -> None:
    curve = Curve(lambda rate: 0.5 if 5.0 < rate < 9.0 else 1.0)
    known = [Probe(4.0, 100, 100), Probe(6.0, 50, 100), Probe(12.0, 100, 100)]
    found = find_goodput(curve, low=1, high=16, known=known, tolerance=0.01, max_runs=20)
    assert 5.0 / 1.01 <= found.rate <= 5.0
    assert "not monotonic: 12/s attains again" in found.reason


def test_the_runs_may_be_used_up() -> None:
    curve = step(8.0)
    found = find_goodput(curve, low=1, high=1000, max_runs=4, tolerance=0.001)
    assert len(curve.rates) == 4
    assert found.rate <= 8.0 < found.upper
    assert "used up" in found.reason


def test_borderline_probes_are_repeated_and_pooled() -> None:
    rng = random.Random(1)
    curve = Curve(lambda rate: 1.0 if rate < 7 else 0.0 if rate > 9 else rng.choice([0.85, 0.93, 0.94]), offered=100)
    found = find_goodput(curve, low=1, high=16, repeats=3, max_runs=40, tolerance=0.02)
    repeated = [probe for probe in found.probes if probe.runs > 1]
    assert repeated
    assert all(probe.offered == 100 * probe.runs for probe in found.probes)
    assert all(probe.runs == 1 for probe in found.probes if probe.attainment in (0.0, 1.0))


def test_chance_at_the_edge_is_admitted() -> None:
    found = find_goodput(Curve(lambda rate: 0.95 if rate < 5 else 0.86, offered=40), low=1, high=16)
    assert "with 40 requests a run" in found.reason
    assert "chance" not in find_goodput(step(5.0), low=1, high=16).reason


def test_an_answer_is_repeatable() -> None:
    assert find_goodput(step(7.3), low=1, high=16) == find_goodput(step(7.3), low=1, high=16)


def test_a_queue_saturates_where_it_must() -> None:
    """One server of 50 ms: above 20/s the queue grows without end; TTFT <= 0.5 s holds up to little below that."""

    def run(rate: float):
        schedule = poisson(Workload.fixed(4, 2), rate, 200.0, 7)
        records = single_server(schedule, 0.05)
        return summarize(records, SLO(0.5), offered=len(schedule), duration_s=200.0)

    found = find_goodput(run, low=2.0, high=40.0, tolerance=0.02)
    assert 15.0 < found.rate < 20.0


@pytest.mark.parametrize(
    "options",
    [{"low": 0}, {"low": 9, "high": 9}, {"target": 1.0}, {"tolerance": 0.0}, {"max_runs": 0}, {"num_gpus": 0}],
    ids=str,
)
def test_bad_arguments(options: dict) -> None:
    with pytest.raises(ConfigError):
        find_goodput(step(1.0), **{"low": 1, "high": 8, **options})
