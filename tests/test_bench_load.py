"""Open-loop load: sent on time whatever happens, counted from the schedule, and every request accounted for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from bench_cases import BlockingServer, VirtualClock, final_output
from fake_runner import VOCAB, FakeRunner

from nanopd.bench import SLO, EngineThread, LoadOptions, Outcome, Workload, named_workload, poisson, run_load
from nanopd.bench.load import LEAD_S
from nanopd.bench.metrics import Counters, summarize
from nanopd.bench.workload import Arrival, Schedule
from nanopd.engine.engine import Engine
from nanopd.engine.outputs import RequestOutput
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import ConfigError, UnknownRequestError
from nanopd.kv.block_manager import BlockManager


def evenly(count: int, gap_s: float, prompt: int = 4, output: int = 3) -> Schedule:
    arrivals = tuple(Arrival(i, i * gap_s, prompt, output) for i in range(count))
    return Schedule("even", arrivals, count * gap_s, seed=0)


# --- no coordinated omission -----------------------------------------------------------------------------------


def test_queueing_before_a_late_send_is_counted() -> None:
    """Each request keeps the pacer for 50 ms, and one is due every 10 ms: the k-th is sent 40 k ms late."""
    clock = VirtualClock()
    server = BlockingServer(clock, service_s=0.05)
    records = run_load(server, evenly(20, 0.01), vocab_size=50, wait=clock.wait, use_tqdm=False)
    assert [r.outcome for r in records] == [Outcome.COMPLETED] * 20
    assert [r.lateness_s for r in records] == pytest.approx([0.04 * k for k in range(20)])
    assert [r.ttft_s for r in records] == pytest.approx([0.04 * k + 0.05 for k in range(20)])
    # A client that counts from its own send would have seen a server that always answers within 50 ms.
    assert [r.ttft_s - r.lateness_s for r in records] == pytest.approx([0.05] * 20)
    assert server.arrivals == pytest.approx([100.0 + LEAD_S + 0.01 * k for k in range(20)])


def test_a_late_request_times_out_without_being_sent() -> None:
    clock = VirtualClock()
    server = BlockingServer(clock, service_s=0.05)
    options = LoadOptions(timeout_s=0.2)
    records = run_load(server, evenly(20, 0.01), vocab_size=50, options=options, wait=clock.wait, use_tqdm=False)
    assert len(server.prompts) < 20
    assert all((r.outcome is Outcome.COMPLETED) == (r.e2e_s is not None and r.e2e_s <= 0.2) for r in records)
    dropped = [r for r in records if r.outcome is Outcome.TIMED_OUT and r.e2e_s is None]
    assert dropped
    assert all(r.lateness_s > 0.2 for r in dropped)


# --- the same for everybody ------------------------------------------------------------------------------------


def test_targets_of_different_speed_see_the_same_requests() -> None:
    schedule = poisson(named_workload("short"), 20.0, 1.0, 3)
    seen = []
    for service_s in (0.001, 0.3):
        clock = VirtualClock()
        server = BlockingServer(clock, service_s)
        run_load(server, schedule, vocab_size=500, wait=clock.wait, use_tqdm=False)
        seen.append((server.prompts, server.arrivals))
    assert seen[0] == seen[1]


# --- every request is accounted for ----------------------------------------------------------------------------


def test_a_refusal_is_a_drop_with_its_reason() -> None:
    clock = VirtualClock()
    server = BlockingServer(clock, 0.001, max_prompt=100)
    schedule = poisson(named_workload("short"), 20.0, 2.0, 1)
    records = run_load(server, schedule, vocab_size=500, wait=clock.wait, use_tqdm=False)
    for record in records:
        assert (record.outcome is Outcome.REFUSED) == (record.prompt_tokens > 100)
    refused = [r for r in records if r.outcome is Outcome.REFUSED]
    assert refused[0].reason.startswith("PromptTooLongError: ")
    assert Counters.of(records, len(schedule)).dropped["refused"] == len(refused)


def test_an_error_that_is_no_refusal_is_the_callers() -> None:
    clock = VirtualClock()
    server = BlockingServer(clock, 0.001)
    server.add_request = lambda *a, **k: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        run_load(server, evenly(3, 0.01), vocab_size=50, wait=clock.wait, use_tqdm=False)


@dataclass
class SilentServer:
    """Takes everything; answers what it is told to, and what is aborted only if it is polite."""

    clock: Callable[[], float]
    polite: bool = True
    sent: dict[str, Callable[[RequestOutput], None]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_request(self, prompt, params, *, request_id, arrival_time, stream, on_output) -> str:
        with self.lock:
            self.sent[request_id] = on_output
        return request_id

    def abort(self, request_id: str) -> None:
        with self.lock:
            self.aborted.append(request_id)
            on_output = self.sent.pop(request_id, None)
        if on_output is None:
            raise UnknownRequestError(request_id)
        if self.polite:
            output = final_output(request_id, self.clock(), self.clock(), 0.0, 1)
            output.outputs[0].finish_reason = "aborted"  # type: ignore[assignment]
            on_output(output)


def real_clock() -> Callable[[], float]:
    import time

    return time.perf_counter


def test_what_never_ends_is_unfinished_and_aborted() -> None:
    server = SilentServer(real_clock())
    options = LoadOptions(drain_s=0.05)
    records = run_load(server, evenly(5, 0.001), vocab_size=50, options=options, use_tqdm=False)
    assert [r.outcome for r in records] == [Outcome.UNFINISHED] * 5
    assert sorted(server.aborted) == [f"bench-{r.index}" for r in records if r.lateness_s is not None]  # all sent


def test_a_target_that_ignores_aborts_does_not_hang_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanopd.bench.load.GRACE_S", 0.05)
    server = SilentServer(real_clock(), polite=False)
    records = run_load(
        server, evenly(3, 0.001), vocab_size=50, options=LoadOptions(timeout_s=0.02, drain_s=0.2), use_tqdm=False
    )
    assert [r.outcome for r in records] == [Outcome.TIMED_OUT] * 3
    assert all(len(r.reason) > 0 for r in records)


def test_a_slow_request_is_aborted_by_its_client() -> None:
    server = SilentServer(real_clock())
    options = LoadOptions(timeout_s=0.1, drain_s=60.0)
    records = run_load(server, evenly(4, 0.001), vocab_size=50, options=options, use_tqdm=False)
    assert [r.outcome for r in records] == [Outcome.TIMED_OUT] * 4
    # On a busy machine the pacer itself may be too late; then nothing was sent that could be aborted.
    assert sorted(server.aborted) == [f"bench-{r.index}" for r in records if r.reason == "over 0.1 s"]


def test_an_interrupt_aborts_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SilentServer(real_clock())

    def interrupt(*args: object) -> None:
        if len(server.sent) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("nanopd.bench.flights.Flights.wait_for_change", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_load(server, evenly(3, 0.001), vocab_size=50, options=LoadOptions(drain_s=60.0), use_tqdm=False)
    assert len(server.aborted) == 3


# --- a real engine ---------------------------------------------------------------------------------------------


def make_engine(num_blocks: int = 64) -> Engine:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), BlockManager(num_blocks, 8))
    return Engine(scheduler, FakeRunner(num_blocks, 8), vocab_size=VOCAB)


@pytest.mark.parametrize("stream", [False, True], ids=["final", "streamed"])
def test_an_engine_in_a_thread_serves_the_load(stream: bool) -> None:
    workload = named_workload("short").scaled(0.1)
    schedule = poisson(workload, 150.0, 0.4, 1)
    with make_engine() as engine, EngineThread(engine) as target:
        records = run_load(target, schedule, vocab_size=VOCAB, options=LoadOptions(stream=stream), use_tqdm=False)
    assert [r.outcome for r in records] == [Outcome.COMPLETED] * len(schedule)
    assert [r.tokens for r in records] == [a.output_tokens for a in schedule.arrivals]
    for r in records:
        assert 0 < r.ttft_s <= r.e2e_s
        assert r.lateness_s >= 0
        if stream:
            assert len(r.itls_s) == r.tokens - 1
            assert min(r.itls_s, default=0.0) >= 0  # seen by the client: after the stamps, by however much
    summary = summarize(records, SLO(), offered=len(schedule), duration_s=schedule.duration_s)
    assert summary.attainment == 1.0
    assert engine.scheduler.block_manager.num_free_blocks == 64


def test_an_engines_refusals_and_failures_are_told_apart() -> None:
    engine = make_engine(num_blocks=8)  # 64 tokens
    engine.runner.execute = lambda plan: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    arrivals = (Arrival(0, 0.0, 20, 4), Arrival(1, 0.0, 100, 4))
    with engine, EngineThread(engine) as target:
        records = run_load(target, Schedule("two", arrivals, 0.1, 0), vocab_size=VOCAB, use_tqdm=False)
    assert [r.outcome for r in records] == [Outcome.FAILED, Outcome.REFUSED]
    assert "ZeroDivisionError" in records[0].reason


def test_the_engines_thread_reports_a_broken_callback_and_goes_on() -> None:
    with make_engine() as engine:
        target = EngineThread(engine)
        done = threading.Event()
        target.add_request([1, 2], on_output=lambda output: 1 / 0)
        target.add_request([1, 2], on_output=lambda output: done.set())
        assert done.wait(30)
        with pytest.raises(ZeroDivisionError):
            target.close()


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    clock = VirtualClock()
    run_load(BlockingServer(clock, 0.01), evenly(5, 0.01), vocab_size=50, wait=clock.wait, label="fast @ 100/s")
    shown = capsys.readouterr().err
    assert "fast @ 100/s: 100%" in shown
    assert "0 in flight, 0 dropped" in shown


@pytest.mark.parametrize("name", ["timeout_s", "drain_s", "warmup_s"])
def test_negative_times_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LoadOptions(**{name: -1.0})


def test_an_empty_schedule_is_an_empty_run() -> None:
    records = run_load(SilentServer(real_clock()), Schedule("none", (), 0.01, 0), vocab_size=5, use_tqdm=False)
    assert records == []
    assert Workload.fixed(1, 1).name == "fixed-1-1"
