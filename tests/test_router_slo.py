"""SloAware: its forecasts against the engine's scheduler run on the step-time model; objectives; choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_cases import HALF, MODELS, WHOLE, request, snapshot, trio, worker

from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.hardware_profile import BUSY as BESIDE
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import ConfigError
from nanopd.kv.block_manager import BlockManager
from nanopd.router.decision import Path
from nanopd.router.forecast import Place, admission_wait_ms, forecast_decode, forecast_prefill
from nanopd.router.path_forecast import PathForecast, forecast_collocated
from nanopd.router.slo import SloAware
from nanopd.router.snapshot import Snapshot, WorkerSnapshot
from nanopd.workers.worker import Role

BUDGET = 2048


# --- a queue simulation: the real scheduler, on virtual time ------------------------------------------------------


class Simulation:
    """One collocated worker. ``decodes`` sequences of ``context`` tokens run; then time starts at 0."""

    def __init__(self, decodes: int, context: int, chunk: int | None, seats: int = 256) -> None:
        config = SchedulerConfig(seats, BUDGET, chunk, max_model_len=10**6)
        self.scheduler = Scheduler(config, BlockManager(60_000, 16, enable_prefix_caching=False))
        self.now = 0.0
        self.token_times: dict[str, list[float]] = {}
        self.running = [request(context, 10**5, f"old{i}") for i in range(decodes)]
        for old in self.running:
            self.scheduler.add(old)
        while len(self.scheduler.running) < decodes:
            self.step()
        self.now, self.token_times = 0.0, {}

    def step(self) -> None:
        """One whole step, timed by the model."""
        plan = self.scheduler.schedule(self.now)
        self.finish(plan, self.now + WHOLE.step_ms(StepFeatures.of(plan)) / 1e3)

    def finish(self, plan: Any, end: float) -> None:
        self.now = end
        for chunk in plan.chunks:
            for sampler in chunk.samplers:
                self.token_times.setdefault(sampler.request_id, []).append(end)
        self.scheduler.update(plan, [[7] * len(chunk.samplers) for chunk in plan.chunks], end)

    def until_tokens(self, name: str, count: int) -> None:
        while len(self.token_times.get(name, ())) < count:
            self.step()

    def snapshot(self, started: float | None = None) -> Snapshot:
        queues, blocks = self.scheduler, self.scheduler.block_manager
        return snapshot(
            worker(
                Role.COLLOCATED,
                num_waiting=len(queues.waiting),
                waiting_tokens=queues.uncomputed_tokens,
                num_running=len(queues.running),
                running_tokens=sum(r.num_tokens for r in queues.running),
                free_blocks=blocks.num_free_blocks,
                total_blocks=blocks.num_blocks,
                free_seats=queues.num_free_seats,
                step_started=started,
            ),
            now=self.now,
        )


@dataclass
class Outcome:
    forecast: PathForecast
    ttft_ms: float
    steps_delay_ms: float  # by which each old decode is later at the time of the newcomer's first token


def compare(decodes: int, context: int, chunk: int | None, queue: Sequence[int], prompt: int) -> Outcome:
    """A newcomer behind ``queue``, forecast and simulated; and the same without it."""
    with_it, without = (Simulation(decodes, context, chunk) for _ in range(2))
    for index, length in enumerate(queue):
        for simulation in (with_it, without):
            simulation.scheduler.add(request(length, 10**5, f"queued{index}"))
    situation = with_it.snapshot()
    place = Place(situation.workers[0], WHOLE, BUDGET, chunk)
    forecast = forecast_collocated(place, prompt, 100.0, situation)
    with_it.scheduler.add(request(prompt, 10**5, "new"))
    with_it.until_tokens("new", 1)
    delay = 0.0
    if decodes:
        steps = len(with_it.token_times["old0"])
        without.until_tokens("old0", steps)
        delay = (with_it.now - without.now) * 1e3
    return Outcome(forecast, with_it.now * 1e3, delay)


LOADS = [
    pytest.param(0, 1, 512, (), 3000, id="idle"),
    pytest.param(0, 1, None, (), 300, id="one-step"),
    pytest.param(16, 1000, 512, (), 3000, id="decodes"),
    pytest.param(16, 1000, 512, (), 200, id="short"),
    pytest.param(64, 500, 256, (1000, 1000), 1000, id="decodes-and-queue"),
    pytest.param(0, 1, 512, (700, 700, 700), 700, id="queue-shares-steps"),
    pytest.param(8, 2000, None, (4000,), 100, id="behind-a-long-prompt"),
    pytest.param(32, 800, 512, (300,) * 12, 300, id="many-short"),
]


@pytest.mark.parametrize(("decodes", "context", "chunk", "queue", "prompt"), LOADS)
def test_the_time_to_first_token_is_the_schedulers(
    decodes: int, context: int, chunk: int | None, queue: Sequence[int], prompt: int
) -> None:
    """Not exact: the old decodes' KV grows, those queued decode while the newcomer waits, chunks pack differently."""
    outcome = compare(decodes, context, chunk, queue, prompt)
    assert outcome.forecast.ttft_ms == pytest.approx(outcome.ttft_ms, rel=0.06)


@pytest.mark.parametrize(("decodes", "context", "chunk", "queue", "prompt"), [p for p in LOADS if p.values[0]])
def test_the_delay_of_running_decodes_is_the_schedulers(
    decodes: int, context: int, chunk: int | None, queue: Sequence[int], prompt: int
) -> None:
    """Each decode's delay times their number is the term, which counts nobody twice."""
    outcome = compare(decodes, context, chunk, queue, prompt)
    term = outcome.forecast.others["others wait for the prefill"]
    assert term == pytest.approx(outcome.steps_delay_ms * decodes, rel=0.1, abs=6.0 * decodes)


@settings(max_examples=25, deadline=None)
@given(
    decodes=st.integers(0, 24),
    chunk=st.sampled_from([128, 512, None]),
    queue=st.lists(st.integers(50, 1500), max_size=5),
    prompt=st.integers(50, 3000),
)
def test_any_queue_is_forecast_to_a_step(decodes: int, chunk: int | None, queue: list[int], prompt: int) -> None:
    outcome = compare(decodes, 400, chunk, queue, prompt)
    assert outcome.forecast.ttft_ms == pytest.approx(outcome.ttft_ms, rel=0.15, abs=12.0)


@pytest.mark.parametrize("queue", [(), (900,)], ids=["decode-step", "mixed-step"])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_rest_of_the_step_in_flight_is_waited_for(queue: tuple[int, ...], share: float) -> None:
    """The newcomer arrives when ``share`` of the step is over, and cannot ride in it."""
    simulation = Simulation(16, 1000, 512)
    for length in queue:
        simulation.scheduler.add(request(length, 10**5, "queued"))
    plan = simulation.scheduler.schedule(0.0)
    step = WHOLE.step_ms(StepFeatures.of(plan)) / 1e3
    simulation.now = arrival = share * step
    place = Place((situation := simulation.snapshot(started=0.0)).workers[0], WHOLE, BUDGET, 512)
    forecast = forecast_collocated(place, 1000, 100.0, situation)
    simulation.scheduler.add(request(1000, 10**5, "new"))
    simulation.finish(plan, step)
    simulation.until_tokens("new", 1)
    assert forecast.to_first["step in flight"] == pytest.approx((1 - share) * step * 1e3, rel=0.05, abs=0.5)
    assert forecast.ttft_ms == pytest.approx((simulation.now - arrival) * 1e3, rel=0.05)


def test_the_time_per_token_and_the_larger_batch_are_the_schedulers() -> None:
    with_it, without = (Simulation(20, 3000, 512) for _ in range(2))
    situation = with_it.snapshot()
    forecast = forecast_collocated(Place(situation.workers[0], WHOLE, BUDGET, 512), 2000, 50.0, situation)
    with_it.scheduler.add(request(2000, 10**5, "new"))
    with_it.until_tokens("new", 50)
    times = with_it.token_times["new"]
    assert forecast.tpot_ms == pytest.approx((times[-1] - times[0]) / 49 * 1e3, rel=0.03)
    without.until_tokens("old0", len(with_it.token_times["old0"]))
    delay = (with_it.now - without.now) * 1e3 * 20
    both = forecast.others["others wait for the prefill"] + forecast.others["others decode in a larger batch"]
    assert both == pytest.approx(delay, rel=0.05)


def test_a_seat_is_waited_for_as_long_as_the_scheduler_makes_one_wait() -> None:
    """16 decodes of 160 tokens, evenly spread over their lengths, hold all seats: one ends every ten steps."""
    simulation = Simulation(16, 500, 512, seats=16)
    for index, old in enumerate(simulation.running):
        old.token_limit = old.num_tokens + 10 * (index + 1)
    situation = simulation.snapshot()
    assert situation.workers[0].free_seats == 0
    forecast = forecast_collocated(Place(situation.workers[0], WHOLE, BUDGET, 512), 100, 160.0, situation)
    simulation.scheduler.add(request(100, 10**5, "new"))
    simulation.until_tokens("new", 1)
    assert forecast.to_first["seat and blocks"] > 5 * forecast.to_first["prefill"]
    assert forecast.ttft_ms == pytest.approx(simulation.now * 1e3, rel=0.15)


# --- waiting for seats and blocks --------------------------------------------------------------------------------


def busy(**fields: Any) -> WorkerSnapshot:
    full: dict[str, Any] = {"num_running": 10, "running_tokens": 8000, "free_blocks": 500, "total_blocks": 1000}
    return worker(Role.DECODE, **{**full, **fields})


@pytest.mark.parametrize(
    ("fields", "ahead", "ahead_tokens", "endings"),
    [
        ({}, 0, 0, 0),
        ({"free_seats": 1}, 0, 0, 0),
        ({"free_seats": 0}, 0, 0, 1),
        ({"free_seats": 1}, 3, 0, 3),
        ({"free_blocks": 7}, 0, 0, 0),  # 7 blocks of 16 hold 101 tokens
        ({"free_blocks": 6}, 0, 0, 1),  # one block is missing; each decode holds 99
        ({"free_blocks": 0}, 0, 1600, 2),  # 107 missing, each holds 100
        ({"free_seats": 0, "num_running": 0, "running_tokens": 0}, 0, 0, 0),  # nobody ends, nothing is known
    ],
)
def test_endings_that_are_waited_for(fields: dict[str, Any], ahead: int, ahead_tokens: int, endings: int) -> None:
    place = Place(busy(**fields), HALF, BUDGET)
    step = HALF.step_ms(StepFeatures.decode(10, 8000))
    wait = admission_wait_ms(place, 100, 50.0, ahead, ahead_tokens)
    assert wait == pytest.approx(endings * 50 / 10 * step)


# --- the disaggregated path --------------------------------------------------------------------------------------


def slo(**options: Any) -> SloAware:
    return SloAware(MODELS, **{"ttft_ms": 500.0, "tpot_ms": 50.0, **options})


def apart(
    *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **fields: Any
) -> PathForecast:
    workers = (
        worker(Role.PREFILL, profile="half", **(prefill or {})),
        worker(Role.DECODE, profile="half", **(decode or {})),
    )
    return slo().forecasts(request(1000), snapshot(*workers, **fields), 101.0)[Path.DISAGGREGATED]


def test_an_idle_disaggregated_path_is_prefill_transfer_and_decode() -> None:
    forecast = apart(link_gb_s=20.0)
    assert forecast.ttft_ms == pytest.approx(HALF.prefill_ms(1000))
    transfer = 1000 * 147_456 / 20e9 * 1e3
    assert forecast.after["transfer"] == pytest.approx(transfer)
    step = HALF.step_ms(StepFeatures.decode(1, 1000 + 50))
    assert forecast.tpot_ms == pytest.approx((transfer + 100 * step) / 100)
    assert forecast.estimate.total_ms == pytest.approx(forecast.ttft_ms + transfer + 100 * step)


def test_bytes_on_the_link_are_waited_for() -> None:
    assert apart(link_gb_s=20.0, transfer_bytes=10**9).after["link queue"] == pytest.approx(50.0)
    assert apart(link_gb_s=None, transfer_bytes=10**9).after["link queue"] == 0.0


def test_the_backlog_and_the_queue_are_ahead() -> None:
    idle, queued = apart(), apart(prefill={"num_waiting": 2, "waiting_tokens": 2 * BUDGET})
    backlog = apart(backlog_requests=2, backlog_tokens=2 * BUDGET)
    assert queued.ttft_ms > idle.ttft_ms + 2 * HALF.step_ms(StepFeatures(BUDGET, num_prefills=1))
    assert backlog.ttft_ms == pytest.approx(queued.ttft_ms, rel=0.05)
    assert backlog.prefill.behind == queued.prefill.behind == 2


def test_no_seat_on_the_decode_worker_delays_the_prefill_unless_the_queue_takes_as_long() -> None:
    full = {"free_seats": 0, "num_running": 10, "running_tokens": 5000}
    waits = apart(decode=full)
    wait = 101 / 10 * HALF.step_ms(StepFeatures.decode(10, 5000))
    assert waits.to_first["seat and blocks"] == pytest.approx(wait)
    hidden = apart(decode=full, prefill={"num_waiting": 9, "waiting_tokens": 20 * BUDGET})
    assert hidden.to_first["seat and blocks"] == 0.0


def test_a_single_output_token_needs_no_transfer_in_its_latency() -> None:
    workers = (worker(Role.PREFILL, profile="half"), worker(Role.DECODE, profile="half"))
    forecast = slo().forecasts(request(1000, max_tokens=1), snapshot(*workers, link_gb_s=1.0))[Path.DISAGGREGATED]
    assert sum(forecast.after.values()) == 0.0 == forecast.tpot_ms


def test_disaggregated_prefill_disturbs_no_decode() -> None:
    forecast = apart(decode={"num_running": 30, "running_tokens": 60_000})
    assert forecast.others["others wait for the prefill"] == 0.0
    assert forecast.others["others decode in a larger batch"] > 0.0


def test_partitions_that_share_memory_slow_each_other() -> None:
    """The model of company is the prefill's while anybody decodes, and the decodes lose time while prompts run."""
    slower = replace(HALF, base_ms=9.0, kv_token_ms=7e-5)
    policy = SloAware({**MODELS, f"half{BESIDE}": slower}, 500.0, 50.0)
    queue = {"num_waiting": 1, "waiting_tokens": BUDGET}
    prefill, decode = worker(Role.PREFILL, profile="half", **queue), worker(Role.DECODE, profile="half")
    alone = policy.forecasts(request(1000), snapshot(prefill, decode), 101.0)[Path.DISAGGREGATED]
    assert alone.to_first["prefill"] == pytest.approx(HALF.prefill_ms(1000))
    decode = replace(decode, num_running=20, running_tokens=40_000)
    company = policy.forecasts(request(1000), snapshot(prefill, decode), 101.0)[Path.DISAGGREGATED]
    assert company.to_first["prefill"] == pytest.approx(slower.prefill_ms(1000))
    step = StepFeatures.decode(20, 40_000)
    loss = 1 - HALF.step_ms(step) / slower.step_ms(step)
    assert company.others["others wait for the prefill"] == pytest.approx(20 * loss * slower.prefill_ms(1000))
    assert company.after["mixed with prefill"] == pytest.approx(loss * company.prefill.before_ms)


def test_the_profiler_names_places_in_company_as_expected() -> None:
    from nanopd.costmodel import places

    assert places.BUSY == BESIDE


@pytest.mark.parametrize("waiting", [0, 300, 3000])
def test_prefill_that_is_present_inflates_the_steps_of_a_collocated_worker(waiting: int) -> None:
    busy = worker(Role.COLLOCATED, num_running=8, running_tokens=8000, num_waiting=waiting > 0, waiting_tokens=waiting)
    decode = forecast_decode(Place(busy, WHOLE, BUDGET, 512), 100, 1001.0)
    chunk = min(waiting, 512)
    mixed = StepFeatures.decode(decode.others + 1, 8000 + waiting + 100 + 500).with_chunk(chunk) if chunk else None
    expected = max(waiting / 512, 1) * WHOLE.interference_ms(mixed) if mixed else 0.0
    assert decode.mixing_ms == pytest.approx(expected)


# --- objectives and choices --------------------------------------------------------------------------------------


def test_a_limit_is_missed_with_the_probability_that_the_uncertainty_gives() -> None:
    policy = slo(uncertainty=0.2)
    forecast = apart()
    at_limit = SloAware(MODELS, forecast.ttft_ms, 1e9, uncertainty=0.2)
    assert at_limit.own_miss(forecast) == pytest.approx(0.5)
    one_deviation = SloAware(MODELS, forecast.ttft_ms * math.exp(0.2), 1e9, uncertainty=0.2)
    assert one_deviation.own_miss(forecast) == pytest.approx(0.1587, abs=1e-4)
    both = SloAware(MODELS, forecast.ttft_ms, forecast.tpot_ms, uncertainty=0.2)
    assert both.own_miss(forecast) == pytest.approx(0.75)
    assert policy.own_miss(forecast) < 1e-6


def test_misses_count_before_cost() -> None:
    forecast, policy = apart(), slo(ttft_ms=500.0)
    late = replace(forecast, to_first={"queue": 5000.0})
    costly = replace(forecast, others={"others queue behind": 1e6})
    assert policy.misses(late) > 0.99 > 0.01 > policy.misses(costly)
    assert policy.better(late, costly) is policy.better(costly, late) is costly
    assert policy.better(forecast, costly) is policy.better(costly, forecast) is forecast


def test_those_who_queue_behind_can_miss_too() -> None:
    forecast = apart()
    prefill = replace(forecast.prefill, in_flight=0.0, queue=300.0, prefill=300.0, behind=4)
    crowded = replace(forecast, prefill=prefill)
    assert slo(ttft_ms=720.0, uncertainty=0.05).misses_of_others(crowded) == pytest.approx(4.0, abs=0.01)
    assert slo(ttft_ms=2000.0, uncertainty=0.05).misses_of_others(crowded) == pytest.approx(0.0, abs=0.01)


def test_an_idle_system_collocates_since_the_whole_card_is_faster() -> None:
    collocated, prefill, decode = trio()
    situation = snapshot(collocated, replace(prefill, profile="half"), replace(decode, profile="half"))
    decision = slo().decide(request(1000), situation, 100.0)
    assert decision.path is Path.COLLOCATED
    assert decision.collocated is not None and decision.disaggregated is not None
    assert decision.collocated.total_ms < decision.disaggregated.total_ms
    assert "equal SLO misses" in decision.reason and "decode" in decision.reason


def test_equal_forecasts_collocate() -> None:
    """The same models, a shared pool and nobody there: both paths cost the same to the last bit."""
    decision = slo(chunk_size=BUDGET).decide(request(1000), snapshot(*trio()), 100.0)
    assert decision.collocated is not None and decision.disaggregated is not None
    assert decision.collocated.total_ms == decision.disaggregated.total_ms
    assert decision.path is Path.COLLOCATED


def test_decodes_that_a_long_prefill_would_push_over_their_limit_keep_it_away() -> None:
    collocated, prefill, decode = trio(num_running=40, running_tokens=40_000)
    decode = replace(decode, num_running=0, running_tokens=0)
    step = WHOLE.step_ms(StepFeatures.decode(40, 40_000))
    policy = slo(tpot_ms=step * 1.25, ttft_ms=5000.0, chunk_size=512)
    decision = policy.decide(request(16_000), snapshot(collocated, prefill, decode), 100.0)
    assert decision.path is Path.DISAGGREGATED
    assert "expected SLO misses" in decision.reason and "others wait for the prefill" in decision.reason


def test_a_long_prefill_queue_sends_a_request_back_to_the_collocated_worker() -> None:
    collocated, prefill, decode = trio(num_running=8, running_tokens=8_000)
    quiet, loaded = (
        snapshot(collocated, replace(prefill, num_waiting=n, waiting_tokens=n * 4000), decode) for n in (0, 10)
    )
    policy = slo(chunk_size=512, tpot_ms=12.0)
    assert policy.decide(request(4000), quiet, 100.0).path is Path.DISAGGREGATED
    back = policy.decide(request(4000), loaded, 100.0)
    assert back.path is Path.COLLOCATED
    assert "queue (0 ms against" in back.reason


def test_the_best_worker_of_each_path_is_compared() -> None:
    workers = [worker(Role.COLLOCATED, f"c{i}", num_waiting=3 - i, waiting_tokens=4000 * (3 - i)) for i in range(3)]
    workers += [worker(Role.PREFILL, f"p{i}", num_waiting=i, waiting_tokens=4000 * i) for i in range(2)]
    workers += [worker(Role.DECODE, f"d{i}", num_running=9 - 8 * i, running_tokens=90_000 * (1 - i)) for i in range(2)]
    best = slo().forecasts(request(1000), snapshot(*workers), 100.0)
    assert best[Path.COLLOCATED].workers == ("c2",)
    assert best[Path.DISAGGREGATED].workers == ("p0", "d1")


@pytest.mark.parametrize("contention", [0.0, 0.7])
def test_sharing_a_card_costs_both_sides(contention: float) -> None:
    collocated = worker(Role.COLLOCATED, num_running=12, running_tokens=12_000)
    situation = snapshot(collocated, worker(Role.PREFILL, profile="half"), worker(Role.DECODE, profile="half"))
    best = slo(contention=contention).forecasts(request(1000), situation, 100.0)
    there = best[Path.DISAGGREGATED]
    own = there.prefill.prefill + there.after["decode"]
    assert there.others.get("others share the card", 0.0) == pytest.approx(contention * 12 * own)
    assert there.to_first.get("sharing the card, prefill", 0.0) == pytest.approx(contention * there.prefill.prefill)
    assert "sharing the card, prefill" not in best[Path.COLLOCATED].to_first, "the other path has nobody"
    step = WHOLE.step_ms(StepFeatures.decode(12, 12_000))
    tight = slo(contention=contention, tpot_ms=step * 1.2)
    added = tight.misses(there) - tight.own_miss(there)
    assert added == pytest.approx(0.0, abs=1e-6) if not contention else added > 5


@given(
    decodes=st.integers(0, 200), context=st.integers(1, 4000), waiting=st.integers(0, 30), seats=st.integers(0, 256),
    free=st.integers(0, 50_000), prompt=st.integers(1, 30_000), output=st.floats(0, 5000),
    link=st.sampled_from([None, 0.5, 400.0]), backlog=st.integers(0, 20),
    started=st.sampled_from([None, -1.0, -0.001, 0.0]),
)  # fmt: skip
def test_no_situation_breaks_it(
    decodes: int, context: int, waiting: int, seats: int, free: int, prompt: int, output: float, link: float | None,
    backlog: int, started: float | None,
) -> None:  # fmt: skip
    fields = {
        "num_running": decodes, "running_tokens": decodes * context, "num_waiting": waiting,
        "waiting_tokens": waiting * 700, "free_seats": seats, "free_blocks": free, "step_started": started,
    }  # fmt: skip
    situation = snapshot(
        *(worker(role, **fields) for role in Role),
        backlog_requests=backlog,
        backlog_tokens=backlog * 900,
        link_gb_s=link,
    )
    decision = slo(contention=0.3, chunk_size=512).decide(request(prompt, 5000), situation, output)
    for estimate in (decision.collocated, decision.disaggregated):
        assert estimate is not None
        assert all(value >= -1e-9 for value in estimate.terms.values()), estimate


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ttft_ms": 0}, "ttft_ms.*0"),
        ({"tpot_ms": math.nan}, "tpot_ms.*nan"),
        ({"chunk_size": 0}, "chunk_size.*0"),
        ({"prefill_chunk_size": -1}, "prefill_chunk_size.*-1"),
        ({"uncertainty": 0.0}, "uncertainty.*0"),
        ({"tolerance": -1.0}, "tolerance.*-1"),
        ({"contention": math.inf}, "contention.*inf"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        slo(**options)


def test_a_worker_without_a_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'c' needs a step-time model for 'sm=84'.*half.*whole device"):
        slo().decide(request(), snapshot(worker(Role.COLLOCATED, "c", profile="sm=84")))


def test_the_forecast_of_a_prefill_needs_no_decodes() -> None:
    """The bare function: an idle prefill worker computes the prompt in steps of its budget."""
    forecast = forecast_prefill(Place(worker(Role.PREFILL), HALF, BUDGET, 512), 1300, now=0.0)
    assert forecast.prefill == pytest.approx(HALF.prefill_ms(1300, chunk_size=512), rel=0.01)
    assert (forecast.in_flight, forecast.queue, forecast.interference, forecast.behind) == (0.0, 0.0, 0.0, 0)
