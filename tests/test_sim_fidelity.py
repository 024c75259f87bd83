"""The simulator against the recorded runs of one card: nothing here was fitted to them but the host's time per step."""

from __future__ import annotations

import pytest

from nanopd.bench.records import Outcome, RequestRecord
from nanopd.costmodel.hardware_profile import preset
from nanopd.ops.measure import recorded
from nanopd.sim.fidelity import compare_with_record, request_errors, table

PERCENTILES = [f"{metric}_{share}" for metric in ("ttft", "tpot", "e2e") for share in ("p50", "p90")]


@pytest.fixture(scope="module")
def runs():
    measured = recorded("one_card")
    assert measured is not None
    return compare_with_record(measured["values"], preset("h200"))


@pytest.mark.parametrize(("strategy", "rates"), [("chunked", ("12", "17")), ("partitions", ("22", "27", "32", "37"))])
def test_simulated_latencies_are_near_measured_ones(runs, strategy: str, rates: tuple[str, ...]) -> None:
    """Within 12 % at the rates that prose names; at the others within 60 %, since waiting magnifies each error."""
    for rate, row in runs[strategy].items():
        errors = {name: row[f"{name}_error"] for name in PERCENTILES}
        assert max(map(abs, errors.values())) <= (0.12 if rate in rates else 0.60), (strategy, rate, errors)


def test_the_record_of_the_comparison_is_this_comparison(runs) -> None:
    stored = recorded("simulated")
    assert stored is not None
    for strategy, by_rate in runs.items():
        for rate, row in by_rate.items():
            assert stored["values"]["runs"][strategy][rate] == pytest.approx(row, rel=1e-3), (strategy, rate)
    assert len(table(runs).splitlines()) == 1 + sum(map(len, runs.values()))


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
