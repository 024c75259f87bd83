"""Metrics: percentiles against NumPy, counters that add up, attainment, summaries and their JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from bench_cases import final_output, single_server
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopd.bench import SLO, Counters, Outcome, Percentiles, RequestRecord, Summary, Workload, percentile, poisson
from nanopd.bench.metrics import summarize
from nanopd.bench.records import DROPS, finished_record
from nanopd.bench.workload import Arrival
from nanopd.engine.request import FinishReason
from nanopd.errors import ConfigError, CounterError, ReportError

finite = st.floats(0, 1e6)
ARRIVAL = Arrival(3, 2.0, 10, 4)


def record(index: int, outcome: Outcome = Outcome.COMPLETED, **times: float) -> RequestRecord:
    defaults = {"ttft_s": 0.1, "tpot_s": 0.01, "e2e_s": 0.5, "tokens": 4} if outcome is Outcome.COMPLETED else {}
    return RequestRecord(index, float(index), 10, 4, outcome, **{**defaults, **times})


@settings(max_examples=200, deadline=None)
@given(st.lists(finite, min_size=1, max_size=60), st.sampled_from([0, 1, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-9)


def test_percentiles_say_what_they_cover() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, 1000)
    found = Percentiles.of(values, requests=10)
    assert (found.count, found.requests) == (1000, 10)
    assert (found.p50, found.p90, found.p99) == pytest.approx(np.percentile(values, [50, 90, 99]))
    assert (found.mean, found.max) == pytest.approx((values.mean(), values.max()))
    assert Percentiles.of([]) == Percentiles(0, 0)
    with pytest.raises(ConfigError):
        percentile([], 50)


# --- counters --------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(list(Outcome)), max_size=50))
def test_counters_add_up(outcomes: list[Outcome]) -> None:
    records = [record(i, outcome) for i, outcome in enumerate(outcomes)]
    counters = Counters.of(records, len(records))
    assert counters.offered == counters.completed + sum(counters.dropped.values())
    assert set(counters.dropped) == {drop.value for drop in DROPS}
    assert counters.num_dropped == sum(outcome is not Outcome.COMPLETED for outcome in outcomes)


@given(st.lists(st.sampled_from(list(Outcome)), max_size=20), st.integers(-5, 5).filter(bool))
def test_lost_or_invented_requests_are_an_error(outcomes: list[Outcome], wrong: int) -> None:
    records = [record(i, outcome) for i, outcome in enumerate(outcomes)]
    with pytest.raises(CounterError, match="offered"):
        Counters.of(records, len(records) + wrong)


def test_a_request_that_is_there_twice_is_an_error() -> None:
    with pytest.raises(CounterError, match="2 records of 1"):
        summarize([record(1), record(1)], SLO(), offered=2, duration_s=5.0)


# --- attainment ------------------------------------------------------------------------------------------------


def test_both_limits_must_be_met_together_and_drops_miss() -> None:
    records = [
        record(0, ttft_s=0.1, tpot_s=0.01),
        record(1, ttft_s=0.3, tpot_s=0.01),
        record(2, ttft_s=0.1, tpot_s=0.03),
        record(3, Outcome.TIMED_OUT),
        record(4, Outcome.REFUSED),
    ]
    summary = summarize(records, SLO(0.2, 0.02), offered=5, duration_s=5.0, num_gpus=2)
    assert summary.attained == 1
    assert summary.attainment == 0.2
    assert summary.attained_rate_per_gpu == pytest.approx(1 / 5 / 2)
    assert summarize(records, SLO(0.2), offered=5, duration_s=5.0).attained == 2
    assert summarize(records, SLO(None, 0.02), offered=5, duration_s=5.0).attained == 2
    assert summarize(records, SLO(), offered=5, duration_s=5.0).attained == 3


def test_limits_are_inclusive_and_one_token_has_no_tpot() -> None:
    assert SLO(0.1, 0.01).met_by(record(0, ttft_s=0.1, tpot_s=0.01))
    single = RequestRecord(0, 0.0, 10, 1, Outcome.COMPLETED, ttft_s=0.1, e2e_s=0.1, tokens=1)
    assert SLO(0.1, 1e-9).met_by(single)
    with pytest.raises(ConfigError, match="-1"):
        SLO(-1.0)


def test_a_timed_out_request_with_good_latencies_does_not_attain() -> None:
    late = RequestRecord(0, 0.0, 10, 4, Outcome.TIMED_OUT, ttft_s=0.01, tpot_s=0.001, e2e_s=0.02)
    assert not SLO(1.0, 1.0).met_by(late)


# --- summaries -------------------------------------------------------------------------------------------------


def test_a_summary_against_numpy() -> None:
    schedule = poisson(Workload.fixed(7, 5), 20.0, 30.0, 1)
    records = single_server(schedule, 0.03)
    offered = sum(a.time_s >= 10.0 for a in schedule.arrivals)
    s = summarize(records, SLO(0.1), offered=offered, duration_s=30.0, warmup_s=10.0)
    measured = [r for r in records if r.time_s >= 10.0]
    ttft = np.array([r.ttft_s for r in measured])
    assert (s.ttft.p50, s.ttft.p90, s.ttft.p99) == pytest.approx(np.percentile(ttft, [50, 90, 99]))
    assert s.ttft.requests == s.offered == len(measured)
    assert s.attainment == pytest.approx((ttft <= 0.1).mean())
    assert s.window_s == 20.0
    end = max(30.0, max(r.time_s + r.e2e_s for r in measured))
    assert s.span_s == pytest.approx(end - 10.0)
    assert s.request_throughput == pytest.approx(len(measured) / (end - 10.0))
    assert s.token_throughput == pytest.approx(5 * len(measured) / (end - 10.0))
    assert s.offered_rate == pytest.approx(len(measured) / 20.0)


def test_percentiles_leave_drops_out_and_say_so() -> None:
    records = [record(0, ttft_s=0.1), record(1, ttft_s=0.2), record(2, Outcome.TIMED_OUT, ttft_s=9.0, lateness_s=0.5)]
    s = summarize(records, SLO(), offered=3, duration_s=5.0)
    assert (s.ttft.requests, s.ttft.max) == (2, 0.2)
    assert s.lateness.requests == 1
    assert s.itl.count == 0


def test_gaps_between_tokens_are_pooled() -> None:
    records = [record(0, itls_s=(0.1, 0.2)), record(1, itls_s=(0.3,)), record(2)]
    s = summarize(records, SLO(), offered=3, duration_s=5.0)
    assert (s.itl.count, s.itl.requests, s.itl.p50) == (3, 2, 0.2)


def test_an_empty_run_has_no_numbers_and_no_nan() -> None:
    s = summarize([], SLO(0.1, 0.1), offered=0, duration_s=5.0)
    assert s.attainment == s.request_throughput == s.cached_share == 0.0
    assert s.e2e.p99 is None
    json.dumps(s.to_json(), allow_nan=False)


@pytest.mark.parametrize("warmup", [-1.0, 5.0, math.nan])
def test_a_warm_up_must_leave_a_window(warmup: float) -> None:
    with pytest.raises(ConfigError, match=r"warm.?up"):
        summarize([], SLO(), offered=0, duration_s=5.0, warmup_s=warmup)


def test_a_summary_survives_json() -> None:
    records = single_server(poisson(Workload.fixed(7, 5), 9.0, 9.0, 1), 0.03)
    s = summarize(records, SLO(0.1, 0.2), offered=len(records), duration_s=9.0)
    assert Summary.from_json(json.loads(json.dumps(s.to_json()))) == s
    with pytest.raises(ReportError, match="summary"):
        Summary.from_json({"offered_rate": 1.0})


# --- records ---------------------------------------------------------------------------------------------------


def test_a_record_of_a_last_output() -> None:
    output = final_output("bench-3", 102.0, 102.25, 0.5, 4)
    made = finished_record(ARRIVAL, output, lateness_s=0.05, timeout_s=10.0)
    assert made.outcome is Outcome.COMPLETED
    assert (made.ttft_s, made.tpot_s, made.second_token_gap_s, made.e2e_s, made.tokens) == (0.25, 0.5, 0.5, 1.75, 4)
    assert made.lateness_s == 0.05
    gaps = finished_record(ARRIVAL, output, token_times_s=[1.0, 1.5, 1.6]).itls_s
    assert gaps == pytest.approx((0.5, 0.1))


def test_why_a_request_did_not_complete() -> None:
    output = final_output("bench-3", 102.0, 102.25, 0.5, 4)
    assert finished_record(ARRIVAL, output, timeout_s=1.0).outcome is Outcome.TIMED_OUT
    output.outputs[0].finish_reason = FinishReason.ABORTED
    assert finished_record(ARRIVAL, output).outcome is Outcome.FAILED
    unfinished = (Outcome.UNFINISHED, "the end")
    assert finished_record(ARRIVAL, output, aborted_as=unfinished).outcome is Outcome.UNFINISHED
    output.error = RuntimeError("no luck")
    failed = finished_record(ARRIVAL, output, aborted_as=unfinished)
    assert (failed.outcome, failed.reason) == (Outcome.FAILED, "RuntimeError: no luck")


@settings(deadline=None)
@given(
    st.builds(
        RequestRecord,
        index=st.integers(0, 9), time_s=st.floats(0, 9), prompt_tokens=st.integers(1, 9),
        output_tokens=st.integers(1, 9), outcome=st.sampled_from(list(Outcome)), reason=st.text(max_size=5),
        lateness_s=st.sampled_from([None, 0.0, 0.25]), ttft_s=st.sampled_from([None, 0.0, 0.5]),
        tpot_s=st.sampled_from([None, 0.125]), e2e_s=st.sampled_from([None, 4.0]),
        itls_s=st.sampled_from([(), (0.5, 0.25)]), tokens=st.integers(0, 3), cached_tokens=st.integers(0, 3),
        preemptions=st.integers(0, 2),
    )
)  # fmt: skip
def test_a_record_survives_json(made: RequestRecord) -> None:
    assert RequestRecord.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize("row", [{}, {"outcome": "lost"}, {"outcome": "completed", "colour": 1}], ids=str)
def test_a_damaged_record_is_refused(row: dict) -> None:
    with pytest.raises(ReportError):
        RequestRecord.from_json(row)
