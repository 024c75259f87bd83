"""The simulator against queueing theory: M/M/1, M/D/1, Lindley's recursion, Little's law, work conservation."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from nanopd.bench.records import RequestRecord
from nanopd.errors import SimulationError
from nanopd.sim.checks import check_littles_law, check_work_conserving
from nanopd.sim.driver import VirtualDriver
from nanopd.sim.load import run_virtual
from tests.sim_cases import check_rest, checked_run, cluster, schedule_of, single_server

NUM_ARRIVALS = 20_000


def exponentials(count: int, seed: int) -> list[float]:
    """Exponential variates of mean 1 by their quantiles, in random order: chance is in the order, not in the mean."""
    values = [-math.log1p(-(i + 0.5) / count) for i in range(count)]
    random.Random(seed).shuffle(values)
    return values


def waits_of(gaps: Sequence[float], service: Sequence[float]) -> tuple[VirtualDriver, list[RequestRecord], list[float]]:
    """Waiting times of a single server that a driver simulates."""
    times, now = [], 0.0
    for gap in gaps:
        now += gap
        times.append((now, 1, 1))
    driver = single_server(service)
    records = run_virtual(driver, schedule_of(times, now + 1.0))
    assert all(record.e2e_s is not None for record in records)
    return driver, records, [record.e2e_s - s for record, s in zip(records, service)]  # type: ignore[operator]


def lindley(gaps: Sequence[float], service: Sequence[float]) -> list[float]:
    """W[n + 1] = max(0, W[n] + S[n] - A[n + 1]) (Lindley 1952)."""
    waits = [0.0]
    for done, gap in zip(service, gaps[1:]):
        waits.append(max(0.0, waits[-1] + done - gap))
    return waits


@pytest.mark.parametrize(("kind", "rho"), [("M/M/1", 0.5), ("M/D/1", 0.6)])
def test_mean_waiting_time_is_the_one_of_theory(kind: str, rho: float) -> None:
    gaps = exponentials(NUM_ARRIVALS, 4)
    service = [rho * s for s in (exponentials(NUM_ARRIVALS, 104) if kind == "M/M/1" else [1.0] * NUM_ARRIVALS)]
    driver, records, waits = waits_of(gaps, service)
    assert waits == pytest.approx(lindley(gaps, service), abs=1e-6)  # each single one
    second_moment = 2.0 if kind == "M/M/1" else 1.0  # of the service time, over its squared mean
    expected = rho * rho * second_moment / (2 * (1 - rho))  # Pollaczek-Khinchine, arrivals at rate 1
    assert sum(waits) / len(waits) == pytest.approx(expected, rel=0.03)
    check_littles_law(driver, records)
    assert driver.busy_s["server"] == pytest.approx(math.fsum(service))  # nobody is served twice, or for free


def test_requests_leave_in_the_order_in_which_they_came() -> None:
    gaps, service = exponentials(500, 3), exponentials(500, 4)
    _, records, _ = waits_of(gaps, service)
    ends = [record.time_s + record.e2e_s for record in records]  # type: ignore[operator]
    assert all(a < b for a, b in pairwise(ends))


def test_a_single_server_never_idles_beside_a_waiting_request() -> None:
    """Busy time is the time from which the idle periods of the arrivals alone, without any server, are taken away."""
    gaps, service = exponentials(300, 5), exponentials(300, 6)
    driver, records, _ = waits_of(gaps, service)
    idle = sum(max(0.0, gap - wait - done) for gap, wait, done in zip(gaps[1:], lindley(gaps, service), service))
    end = records[-1].time_s + records[-1].e2e_s  # type: ignore[operator]
    assert end - gaps[0] - idle == pytest.approx(driver.busy_s["server"])


@pytest.mark.parametrize("policy", ["collocated", "disaggregated", "round-robin"])
def test_littles_law_and_work_conservation_hold_on_a_cluster(policy: str) -> None:
    draw = random.Random(7)
    arrivals, now = [], 0.0
    for _ in range(300):
        now += draw.expovariate(60.0)
        arrivals.append((now, draw.randint(1, 3000), draw.randint(1, 60)))
    made = cluster(1, 1, 2, num_blocks=700, max_num_seqs=16)
    driver, records = checked_run(made, schedule_of(arrivals, now), policy)
    assert all(record.outcome == "completed" for record in records)
    assert driver.num_steps > 100


def test_the_checks_can_fail() -> None:
    driver, records = checked_run(cluster(1), schedule_of([(0.0, 10, 5), (0.001, 10, 5)]))
    driver.request_s += 1.0
    with pytest.raises(SimulationError, match="Little"):
        check_littles_law(driver, records)
    lazy = cluster(1).driver(driver.central.policy)
    lazy._start_steps = lambda: None  # type: ignore[method-assign]
    lazy.add_request(bytes(5))
    with pytest.raises(SimulationError, match=r"idles .* although it could run"):
        check_work_conserving(lazy)
    with pytest.raises(SimulationError, match=r"stands still .* 1 unfinished"):
        lazy.drain()


def test_rest_is_rest() -> None:
    driver, _ = checked_run(cluster(1, 1, 1), schedule_of([(0.0, 100, 10)] * 4))
    check_rest(driver)
    before = driver.now
    driver.run()  # nothing is left that could happen
    assert driver.now == before and not driver.advance()
