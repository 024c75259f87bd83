"""The simulator against the recorded runs of one card: nothing here was fitted to them but the host's time per step."""

from __future__ import annotations

import pytest

from nanopd.bench.cards import HEAVY
from nanopd.bench.records import Outcome, RequestRecord
from nanopd.bench.workload import poisson
from nanopd.costmodel.hardware_profile import preset
from nanopd.ops.measure import recorded
from nanopd.sim.fidelity import after_documents, compare_with_record, request_errors, table

PERCENTILES = [f"{metric}_{share}" for metric in ("ttft", "tpot", "e2e") for share in ("p50", "p90")]


@pytest.fixture(scope="module")
def runs():
    measured = recorded("one_card")
    assert measured is not None
    return compare_with_record(measured["values"], preset("h200"))


# rate -> how far a median or 90th percentile may be off: docs/en/simulator.md and notebook 10 say these
NAMED = {
    "chunked": {"12": 0.12, "17": 0.10, "22": 0.03, "27": 0.08, "32": 0.06, "37": 0.06},
    "partitions": {"12": 0.255, "17": 0.185, "22": 0.12, "27": 0.085, "32": 0.10, "37": 0.09},
}
WITHOUT_TPOT = {"22": 0.12, "27": 0.085, "32": 0.045, "37": 0.045}  # TTFT and E2E alone, in partitions


@pytest.mark.parametrize("strategy", NAMED)
def test_simulated_latencies_are_near_measured_ones(runs, strategy: str) -> None:
    for rate, row in runs[strategy].items():
        errors = {name: row[f"{name}_error"] for name in PERCENTILES}
        assert max(map(abs, errors.values())) <= NAMED[strategy][rate], (strategy, rate, errors)


def test_beyond_the_limit_of_partitions_the_queue_hides_the_error(runs) -> None:
    for rate, bound in WITHOUT_TPOT.items():
        errors = {name: runs["partitions"][rate][f"{name}_error"] for name in PERCENTILES if "tpot" not in name}
        assert max(map(abs, errors.values())) <= bound, (rate, errors)


def test_the_record_of_the_comparison_is_this_comparison(runs) -> None:
    stored, measured = recorded("simulated"), recorded("one_card")
    assert stored is not None and measured is not None
    heavy = compare_with_record(measured["values"], preset("h200"), workload=HEAVY)
    for group, found in (("runs", runs), ("heavy", heavy)):
        for strategy, by_rate in found.items():
            for rate, row in by_rate.items():
                assert stored["values"][group][strategy][rate] == pytest.approx(row, rel=1e-3), (strategy, rate)
    assert len(table(runs).splitlines()) == 1 + sum(map(len, runs.values()))


def test_documents_are_asked_about_once_for_each_card() -> None:
    schedule = poisson(HEAVY, 8.0, 3.0, seed=1)
    one, other = after_documents(schedule), after_documents(schedule, 2)
    assert other[1] == 2 * one[1] > 0
    first, second = other[0].arrivals[:2]
    assert first.prefix == second.prefix and first.time_s == second.time_s
    assert [a.index for a in other[0].arrivals] == list(range(len(schedule) + other[1]))


def test_errors_of_single_requests_by_hand() -> None:
    def run(*latencies: tuple[int, float, float | None]) -> list[RequestRecord]:
        return [
            RequestRecord(index, 0.0, 10, 5, Outcome.COMPLETED, ttft_s=ttft, tpot_s=tpot, e2e_s=1.0)
            for index, ttft, tpot in latencies
        ]

    measured = run((0, 1.0, 0.1), (1, 2.0, None), (2, 4.0, 0.1))
    simulated = run((2, 5.0, 0.08), (0, 1.1, 0.12), (1, 1.0, 0.3))  # +25 %, +10 %, -50 %; -20 %, +20 %
    errors = request_errors(measured, simulated)
    assert errors == pytest.approx({"requests": 3, "ttft": 0.25, "tpot": 0.2, "e2e": 0.0})
