"""The virtual driver: determinism, neighbours on a card, failures, overload, small pools, and who gets what."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanopd.bench.load import LoadOptions
from nanopd.bench.records import Outcome
from nanopd.bench.traces import load_trace
from nanopd.bench.workload import Arrival, Schedule, Workload, poisson
from nanopd.engine.plan import StepPlan
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import ConfigError, EmptyPromptError, EngineClosedError, UnknownRequestError
from nanopd.kv.block_manager import BlockManager
from nanopd.router.central import CentralConfig, CentralScheduler
from nanopd.router.policies import make_policy
from nanopd.router.records import WorkerStep
from nanopd.router.server import Server
from nanopd.sim.checks import check_littles_law
from nanopd.sim.driver import VirtualDriver
from nanopd.sim.load import Prompts, run_virtual
from nanopd.sim.steps import FlyingStep, Neighbours
from nanopd.workers.worker import CollocatedWorker, DecodeWorker, PrefillWorker
from tests.sim_cases import check_all, check_rest, checked_run, cluster, schedule_of

SMALL = Workload.fixed(200, 20)
TRACE = Path(__file__).parents[2] / "shared/data/mooncake_synthetic_trace.jsonl"


# --- the same code -------------------------------------------------------------------------------------------


def test_the_simulator_runs_the_classes_that_serve() -> None:
    """Identical objects, not copies of the code: what a server's workers are made of, and what drives them."""
    driver = cluster(1, 1, 1).driver(make_policy("round-robin"))
    assert type(driver.central) is CentralScheduler
    assert [type(w) for w in driver.central.workers.values()] == [CollocatedWorker, PrefillWorker, DecodeWorker]
    for worker in driver.central.workers.values():
        assert type(worker.scheduler) is Scheduler and type(worker.block_manager) is BlockManager
    server = Server(cluster(1, 1, 1).workers(), make_policy("round-robin"), links={})
    with server:
        assert type(server.central) is type(driver.central)
        for mine, theirs in zip(driver.central.workers.values(), server.central.workers.values(), strict=True):
            assert type(mine) is type(theirs) and type(mine.scheduler) is type(theirs.scheduler)


def test_same_seed_same_run() -> None:
    schedule = poisson(SMALL, 80.0, 3.0, seed=5)
    runs = [checked_run(cluster(2, 1, 2), schedule) for _ in range(2)]
    assert runs[0][1] == runs[1][1]  # every record to the last bit
    assert runs[0][0].num_events == runs[1][0].num_events
    assert checked_run(cluster(2, 1, 2), poisson(SMALL, 80.0, 3.0, seed=6))[1] != runs[0][1]


# --- times ----------------------------------------------------------------------------------------------------


def test_a_lone_request_takes_what_its_steps_take() -> None:
    _, (record,) = checked_run(cluster(1, collocated_chunk=100), schedule_of([(0.5, 250, 4)]), "collocated")
    chunks = [4.0 + 0.02 * n + 0.01 for n in (100, 100, 50)]  # ms
    decodes = [4.0 + 0.02 + 1e-5 * kv + 0.01 for kv in (251, 252, 253)]
    assert record.ttft_s == pytest.approx(sum(chunks) / 1e3)
    assert record.e2e_s == pytest.approx(sum(chunks + decodes) / 1e3)
    assert record.tpot_s == pytest.approx(sum(decodes) / 3e3)


def test_a_disaggregated_request_waits_for_its_last_layer() -> None:
    """The second token comes when the KV has arrived and a decode step has run."""
    made = cluster(0, 1, 1, link_gb_s=10.0, latency_s=0.001)
    _, (record,) = checked_run(made, schedule_of([(0.0, 320, 2)]), "disaggregated")
    prefill = (4.0 + 0.02 * 320 + 0.01) / 1e3
    num_bytes = 320 * 147_456
    first_layer, last_layer = prefill / 36 + num_bytes / 10e9, prefill + num_bytes / 36 / 10e9
    decode = (4.0 + 0.02 + 1e-5 * 321 + 0.01) / 1e3
    assert record.ttft_s == pytest.approx(prefill)
    assert record.second_token_gap_s == pytest.approx(max(first_layer, last_layer) + 0.001 - prefill + decode)


def test_without_streaming_the_whole_transfer_comes_after_the_prefill() -> None:
    made = cluster(0, 1, 1, link_gb_s=10.0)
    config = CentralConfig(stream_layers=False)
    _, (record,) = checked_run(made, schedule_of([(0.0, 320, 2)]), "disaggregated", config)
    decode = (4.0 + 0.02 + 1e-5 * 321 + 0.01) / 1e3
    assert record.second_token_gap_s == pytest.approx(320 * 147_456 / 10e9 + decode)


def split_driver(slowdown: float) -> VirtualDriver:
    made = replace(
        cluster(1, partition_slowdown=slowdown), collocated=(), prefill=["cuda:0/sm=84"], decode=["cuda:0/sm=48"]
    )
    return made.driver(make_policy("disaggregated"), audit=check_all)


def test_partitions_of_a_card_slow_each_other_down_exactly_while_both_compute() -> None:
    """A decode step is overtaken by a prefill half-way: the rest of it, and only that, goes at the slower pace."""
    quiet, alone, beside = split_driver(2.0), split_driver(1.0), split_driver(2.0)
    for driver in (quiet, alone, beside):
        driver.add_request(bytes(64), SamplingParams(max_tokens=50))
        if driver is quiet:
            driver.drain()
            continue
        driver.at(0.0530, lambda driver=driver: driver.add_request(bytes([7]) * 640, SamplingParams(max_tokens=1)))
        driver.drain()
        check_rest(driver)
    prefill_s = 5.0e-3 + 0.04e-3 * 640 + 0.01e-3  # on its own; twice that beside decodes that never pause
    assert beside.busy_s["prefill0"] - alone.busy_s["prefill0"] == pytest.approx(prefill_s, rel=1e-6)
    assert alone.now == pytest.approx(quiet.now, rel=1e-9)  # a neighbour that costs nothing does not show
    # While the prefill runs for 2 p, decodes get done what takes p alone: they lose p.
    assert beside.now - alone.now == pytest.approx(prefill_s, rel=1e-6)


def test_a_neighbour_slows_nobody_while_its_host_prepares() -> None:
    """A step of 10 ms on the card behind 4 ms of host; a step of the neighbour that takes twice as long beside it."""
    plan = StepPlan()
    first = FlyingStep(WorkerStep(split_driver(1.0).central.workers["decode0"], plan, 0.0), 0.010, 0.020)
    second = FlyingStep(WorkerStep(split_driver(1.0).central.workers["prefill0"], plan, 0.0), 0.010, 0.010, 0.004)
    cards, flying = Neighbours([("decode0", "prefill0")]), {"decode0": first, "prefill0": second}
    assert second.due == pytest.approx(0.014)
    assert cards.changed(flying) == ["prefill0"]  # the first one is on the card, and slows the second
    second.change_pace(0.0)
    second.launched = True
    assert cards.changed(flying) == ["decode0"]
    first.change_pace(0.004)  # 4 of its 10 ms are done, the others take twice as long
    assert first.due == pytest.approx(0.004 + 2 * 0.006)
    assert second.due == pytest.approx(0.014)


def test_workers_that_each_use_the_whole_card_take_turns() -> None:
    made = replace(cluster(1), collocated=["cuda:0", "cuda:0"])
    _, records = checked_run(made, schedule_of([(0.0, 100, 1), (0.0, 100, 1)]), "collocated")
    single = (4.0 + 0.02 * 100 + 0.01) / 1e3
    assert [record.ttft_s for record in records] == pytest.approx([2 * single] * 2)


# --- nothing hangs, nothing is lost -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["collocated", "disaggregated", "round-robin"])
def test_ten_times_overload(policy: str) -> None:
    """Completed and dropped add up to the offered ones, and what is left at the end is given back."""
    schedule = poisson(SMALL, 900.0, 1.0, seed=1)
    options = LoadOptions(timeout_s=2.0, drain_s=3.0)
    made = cluster(1, 1, 1, num_blocks=120, max_num_seqs=8)
    driver = made.driver(make_policy(policy), audit=check_all)
    records = run_virtual(driver, schedule, options=options)
    assert [record.index for record in records] == list(range(len(schedule)))
    outcomes = {record.outcome for record in records}
    assert {Outcome.COMPLETED, Outcome.TIMED_OUT} <= outcomes
    assert sum(r.outcome is Outcome.COMPLETED for r in records) < len(records) / 2
    check_rest(driver)


def test_what_is_in_flight_at_the_end_is_unfinished() -> None:
    driver = cluster(1).driver(make_policy("collocated"))
    records = run_virtual(driver, schedule_of([(0.0, 10, 10_000), (0.0, 10, 2)]), options=LoadOptions(drain_s=0.5))
    assert [record.outcome for record in records] == [Outcome.UNFINISHED, Outcome.COMPLETED]
    assert driver.now < 1.6
    check_rest(driver)


def test_pools_too_small_preempt_or_refuse() -> None:
    made = cluster(1, 1, 1, num_blocks=18, max_num_seqs=8)
    arrivals = [(0.01 * i, 100, 60) for i in range(30)] + [(0.4, 5000, 5)]
    driver, records = checked_run(made, schedule_of(arrivals))
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 30 + [Outcome.REFUSED]
    assert "5000" in records[-1].reason
    assert sum(record.preemptions for record in records) > 0
    assert driver.central.num_unfinished == 0


@pytest.mark.parametrize("gb_s", [0.0, -1.0, float("nan")])
def test_a_link_without_bandwidth_is_refused(gb_s: float) -> None:
    with pytest.raises(ConfigError, match="GB/s"):
        cluster(0, 1, 1, link_gb_s=gb_s)


@pytest.mark.parametrize("victim", ["collocated0", "prefill0", "decode0", "decode1"])
def test_a_worker_that_dies_in_the_middle_of_a_step(victim: str) -> None:
    schedule = poisson(SMALL, 100.0, 1.0, seed=2)
    driver = cluster(1, 1, 2, num_blocks=600).driver(make_policy("round-robin"), audit=check_all)
    driver.at(0.5, lambda: driver.fail_worker(victim))
    records = run_virtual(driver, schedule)
    assert len(records) == len(schedule)
    assert all(record.outcome is Outcome.COMPLETED for record in records)  # others took over
    assert not driver.central.workers[victim].alive
    assert driver.busy_s[victim] < 0.5
    check_littles_law(driver, records)
    check_rest(driver)


def test_the_last_worker_dies() -> None:
    driver = cluster(1).driver(make_policy("collocated"))
    driver.at(0.05, lambda: driver.fail_worker("collocated0"))
    records = run_virtual(driver, schedule_of([(0.0, 50, 100), (0.01, 50, 100), (0.1, 50, 100)]))
    assert [record.outcome for record in records] == [Outcome.FAILED, Outcome.FAILED, Outcome.REFUSED]
    assert "WorkerFailedError" in records[0].reason and "NoWorkerError" in records[2].reason


def test_a_link_that_stalls_costs_its_requests_a_lease() -> None:
    """The KV never arrives; the lease runs out, and the requests are computed anew where no link is needed."""
    driver = cluster(1, 1, 1).driver(make_policy("disaggregated"), config=CentralConfig(lease_s=2.0))
    driver.links["prefill0", "decode0"].stalled = True
    records = run_virtual(driver, schedule_of([(0.0, 100, 5)] * 3))
    assert all(record.outcome is Outcome.COMPLETED and record.e2e_s > 2.0 for record in records)  # type: ignore[operator]
    check_rest(driver)


def test_a_step_that_raises_is_taken_again() -> None:
    driver = cluster(1, 1, 1).driver(make_policy("disaggregated"))
    runner = driver.central.workers["prefill0"].runner
    execute, calls = runner.execute, []

    def fails_once(plan: object) -> object:
        calls.append(plan)
        if len(calls) == 1:
            raise RuntimeError("no power")
        return execute(plan)

    runner.execute = fails_once
    records = run_virtual(driver, schedule_of([(0.0, 100, 5)] * 3))
    assert all(record.outcome is Outcome.COMPLETED for record in records)
    check_rest(driver)


# --- the client's side ------------------------------------------------------------------------------------------


def test_outputs_and_errors_come_as_from_a_server() -> None:
    driver = cluster(1).driver(make_policy("collocated"))
    outputs = []
    name = driver.add_request([1, 2, 3], SamplingParams(max_tokens=3), on_output=outputs.append)
    with pytest.raises(EmptyPromptError):
        driver.add_request([])
    driver.drain()
    (output,) = outputs
    assert output.request_id == name and output.finished and len(output.outputs[0].token_ids) == 3
    with pytest.raises(UnknownRequestError):
        driver.abort(name)
    driver.add_request([1], on_output=outputs.append)
    driver.close()
    assert outputs[-1].outputs[0].finish_reason == "aborted"
    with pytest.raises(EngineClosedError):
        driver.add_request([1])


def test_a_callback_can_send_the_next_request() -> None:
    """A closed loop: the next request comes when the one before has ended."""
    driver, ends = cluster(1).driver(make_policy("collocated")), []

    def again(output: object) -> None:
        ends.append(driver.now)
        if len(ends) < 5:
            driver.add_request(bytes(10), SamplingParams(max_tokens=2), on_output=again)

    driver.add_request(bytes(10), SamplingParams(max_tokens=2), on_output=again)
    driver.drain()
    assert len(ends) == 5 and ends == sorted(set(ends))


def test_finished_requests_are_forgotten() -> None:
    """Memory is bounded by what is in flight, and the records: no request outlives its last output."""
    driver = cluster(2).driver(make_policy("collocated"))
    most, live = 0, lambda: sum(isinstance(found, Request) for found in gc.get_objects())
    gc.collect()
    before = live()

    def look() -> None:
        nonlocal most
        most = max(most, live() - before - driver.central.num_unfinished)
        driver.at(driver.now + 1.0, look)

    driver.at(1.0, look)
    records = run_virtual(driver, poisson(Workload.fixed(20, 5), 100.0, 5.0, seed=1))
    assert len(records) > 400 and most <= 2  # the one that is being submitted, or was just recorded
    gc.collect()
    assert live() == before


def calls_per_request(duration_s: float, rate: float, policy: str) -> float:
    """Function calls of a whole run, generators' turns included: work that no machine's speed can blur."""
    driver = cluster(1, 1, 1, collocated_chunk=512).driver(make_policy(policy))
    schedule = poisson(Workload.fixed(30, 4), rate, duration_s, seed=3)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        run_virtual(driver, schedule, options=LoadOptions(drain_s=1000.0))
    finally:
        sys.setprofile(None)
    return calls / len(schedule)


@pytest.mark.parametrize("policy", ["collocated", "disaggregated"])
@pytest.mark.parametrize("rate", [50.0, 5000.0], ids=["in time", "with a queue that grows"])
def test_the_work_grows_no_faster_than_the_requests(rate: float, policy: str) -> None:
    """Eight times as many requests need eight times as many calls, also if they pile up."""
    few, many = (calls_per_request(duration * 50.0 / rate, rate, policy) for duration in (3.0, 24.0))
    assert many <= 1.2 * few


@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not here")
def test_the_mooncake_trace_replays() -> None:
    """All 3,993 requests, their lengths divided by 16 (as long, they take ten times the time of a test)."""
    schedule = load_trace(TRACE, length_scale=1 / 16, max_prompt=8000)
    driver = cluster(4, num_blocks=2000, collocated_chunk=512).driver(make_policy("collocated"))
    records = run_virtual(driver, schedule, options=LoadOptions(drain_s=1000.0))
    assert len(records) == 3993 and all(record.outcome is Outcome.COMPLETED for record in records)
    assert sum(record.cached_tokens for record in records) > 0  # prefixes are shared
    check_littles_law(driver, records)


def test_prompts_share_what_the_schedule_says() -> None:
    first = Arrival(0, 0.0, 100, 5, prefix=(7, 8), prefix_block=30)
    second = Arrival(1, 0.0, 50, 5, prefix=(7, 9), prefix_block=30)
    prompts = Prompts(Schedule("x", (first, second), 1.0, 0))
    a, b = prompts.of(first), prompts.of(second)
    assert (len(a), len(b)) == (100, 50) and a[:30] == b[:30] and a[30:50] != b[30:50]
    assert prompts.of(first) == a
