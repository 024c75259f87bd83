"""Random workloads through the scheduler, held against the tokens of each sequence computed alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from fake_runner import EOS, VOCAB, FakeRunner, oracle
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanopd.engine.request import LEGAL_TRANSITIONS, FinishReason, Request, RequestState
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from nanopd.errors import PromptTooLongError
from nanopd.kv.block_manager import BlockManager


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams
    abort_step: int | None = None
    abort_in_flight: bool = False


@dataclass
class Workload:
    num_blocks: int
    block_size: int
    watermark: float
    prefix_caching: bool
    config: SchedulerConfig
    arrivals: list[Arrival]


PREFIXES = [[(7 * i + 3 * k) % VOCAB for i in range(24)] for k in range(2)]


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    shared = draw(st.sampled_from(PREFIXES))[: draw(st.integers(0, 24))]
    own = draw(st.lists(st.integers(1, VOCAB - 1), min_size=0 if shared else 1, max_size=8))
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        seed=draw(st.integers(0, 3)),
        max_tokens=draw(st.one_of(st.integers(0, 3), st.integers(4, 20))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (), (5,)])),
    )
    abort_step = draw(st.one_of(st.none(), st.none(), st.integers(0, 25)))
    return Arrival(draw(st.integers(0, 15)), shared + own, params, abort_step, draw(st.booleans()))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    seats = draw(st.integers(1, 6))
    budget = draw(st.one_of(st.integers(seats, seats + 12), st.just(200)))
    config = SchedulerConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        chunk_size=draw(st.one_of(st.none(), st.integers(1, 16))),
        max_model_len=draw(st.sampled_from([20, 64])),
    )
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    requests = draw(st.lists(arrivals(), min_size=1, max_size=8))
    largest = max(len(a.prompt) + max(a.params.max_tokens - 1, 0) for a in requests)
    # Mostly a pool that holds the largest request and little more: there the scheduler has decisions to make.
    exact = -(-min(largest, config.max_model_len) // block_size)
    num_blocks = draw(st.one_of(*[st.integers(exact, exact + 5)] * 3, st.integers(1, 12), st.integers(10, 60)))
    return Workload(
        num_blocks=num_blocks,
        block_size=block_size,
        watermark=draw(st.sampled_from([0.0, 0.01, 0.2])),
        prefix_caching=draw(st.booleans()),
        config=config,
        arrivals=requests,
    )


class Driver:
    """Runs a workload step by step and checks, after each, everything that must hold then."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.blocks = BlockManager(
            workload.num_blocks,
            workload.block_size,
            enable_prefix_caching=workload.prefix_caching,
            watermark=workload.watermark,
        )
        self.scheduler = Scheduler(workload.config, self.blocks)
        self.runner = FakeRunner(workload.num_blocks, workload.block_size)
        self.sequences: dict[int, list[Request]] = {}  # by arrival
        self.ended: list[Request] = []
        self.now = 0.0
        self.num_preempted = 0
        self.events: set[str] = set()

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def run(self) -> None:
        todo = sorted(range(len(self.workload.arrivals)), key=lambda i: self.workload.arrivals[i].step)
        # The oldest request advances by a token in each step and is never preempted; hence this bound.
        work = sum(len(a.prompt) + a.params.n * (len(a.prompt) + a.params.max_tokens) for a in self.workload.arrivals)
        step = 0
        while todo or self.scheduler.has_unfinished:
            while todo and self.workload.arrivals[todo[0]].step <= step:
                self.add(todo.pop(0))
            self.aborts(step, in_flight=False)
            plan = self.scheduler.schedule(self.tick())
            if plan.chunks:
                self.check_plan(plan)
                tokens = self.runner.execute(plan)
                self.aborts(step, in_flight=True)
                self.check_books()
                self.ended += self.scheduler.update(plan, tokens, self.tick())
            else:
                assert not self.scheduler.has_unfinished, "nobody can go on, and nobody outside holds blocks"
            self.check_books()
            step += 1
            assert step <= work + 40, "starved"
        self.check_end()

    def add(self, index: int) -> None:
        arrival, config = self.workload.arrivals[index], self.workload.config
        request = Request(f"r{index}", arrival.prompt, arrival.params, arrival_time=self.now, eos_token_ids=[EOS])
        slots = min(len(arrival.prompt) + arrival.params.max_tokens, config.max_model_len) - 1
        too_long = len(arrival.prompt) + (arrival.params.max_tokens > 0) > config.max_model_len
        too_large = max(slots, len(arrival.prompt)) > self.workload.num_blocks * self.workload.block_size
        try:
            self.sequences[index] = self.scheduler.add(request, self.tick())
            assert not (too_long or too_large), "a request that can never finish was accepted"
            self.ended += [r for r in self.sequences[index] if r.is_finished]
        except PromptTooLongError:
            assert too_long or too_large, "a request that fits was refused"

    def aborts(self, step: int, in_flight: bool) -> None:
        for index, sequences in self.sequences.items():
            arrival = self.workload.arrivals[index]
            if arrival.abort_step is None or arrival.abort_step > step or arrival.abort_in_flight != in_flight:
                continue
            if any(not request.is_finished for request in sequences):
                when = "in flight" if in_flight else "between steps"
                self.events |= {f"abort {request.state.value} {when}" for request in sequences}
                self.ended += self.scheduler.abort(f"r{index}", self.tick())

    def check_plan(self, plan: StepPlan) -> None:
        config = self.workload.config
        self.num_preempted += len(plan.preempted)
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert config.chunk_size is None or plan.num_prefill_tokens <= config.chunk_size
        joining = sum(len(chunk.samplers) - 1 for chunk in plan.chunks if chunk.samplers)
        assert len(self.scheduler.running) + len(self.scheduler.prefilling) + joining <= config.max_num_seqs
        unfinished = [r for sequences in self.sequences.values() for r in sequences if not r.is_finished]
        oldest = min(unfinished, key=lambda r: r.arrival_order)
        assert any(chunk.request is oldest for chunk in plan.chunks), "the oldest request stands still"
        assert oldest not in plan.preempted
        decodes = [chunk.request for chunk in plan.chunks[: plan.num_decodes]]
        assert decodes == self.scheduler.running, "a running request was left out of the step"

    def check_books(self) -> None:
        requests = [r for sequences in self.sequences.values() for r in sequences]
        scheduler = self.scheduler
        self.blocks.check_integrity([r.table for r in requests if r.table is not None])
        for queue, state in (
            (scheduler.waiting, RequestState.WAITING),
            (scheduler.prefilling, RequestState.PREFILLING),
            (scheduler.running, RequestState.RUNNING),
        ):
            assert all(r.state is state for r in queue)
            assert len(set(queue)) == len(queue)
            assert [r.arrival_order for r in queue] == sorted(r.arrival_order for r in queue)
        assert all(r.table is None and r.num_computed_tokens == 0 for r in scheduler.waiting)
        queued = [*scheduler.waiting, *scheduler.prefilling, *scheduler.running]
        pending = [s for r in queued for s in r.pending_siblings]
        assert set(queued + pending) == {r for r in requests if not r.is_finished}, "a request is lost"
        assert len(queued + pending) == len(set(queued + pending)), "a request is in two places"

    def check_end(self) -> None:
        assert self.blocks.num_free_blocks == self.workload.num_blocks
        assert sorted(r.request_id for r in self.ended) == sorted(
            r.request_id for sequences in self.sequences.values() for r in sequences
        ), "each ends exactly once"
        for index, sequences in self.sequences.items():
            arrival = self.workload.arrivals[index]
            assert len(sequences) == arrival.params.n
            for request in sequences:
                expected = oracle(
                    arrival.prompt, arrival.params, request.sample_index, self.workload.config.max_model_len
                )
                self.check_tokens(request, expected)
                check_stamps(request)
        self.events.add(f"preemptions: {min(self.num_preempted, 3)}")

    def check_tokens(self, request: Request, expected: list[int]) -> None:
        assert request.all_token_ids == request.prompt_token_ids + request.output_token_ids
        if request.finish_reason is FinishReason.ABORTED:
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
            return
        assert request.output_token_ids == expected
        stopped = bool(expected) and expected[-1] in request.stop_ids
        assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def check_stamps(request: Request) -> None:
    stamps = request.stamps
    assert [s.time for s in stamps] == sorted(s.time for s in stamps)
    assert stamps[0].event == "arrived" and stamps[1].event == "waiting"
    states = [RequestState("waiting" if s.event == "preempted" else s.event) for s in stamps if s.event in STATE_EVENTS]
    for before, after in itertools.pairwise(states):
        assert after in LEGAL_TRANSITIONS[before]
    assert states.count(RequestState.FINISHED) == 1 and stamps[-1].event == "finished"
    assert sum(s.event == "token" for s in stamps) == len(request.output_token_ids)
    computed = 0
    for stamp in stamps:
        if stamp.event == "prefilling":
            computed = stamp.num_tokens
        elif stamp.event == "chunk":
            computed += stamp.num_tokens
        elif stamp.event == "preempted":
            assert stamp.num_tokens >= computed


STATE_EVENTS = {*(state.value for state in RequestState), "preempted"}


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_every_token_equals_the_oracle(workload: Workload) -> None:
    driver = Driver(workload)
    driver.run()
    for name in sorted(driver.events):
        event(name)


def test_heavy_pressure_preempts_and_still_equals_the_oracle() -> None:
    """Forty requests in a pool that holds three: every step is short of blocks."""
    arrivals = [
        Arrival(i % 7, PREFIXES[i % 2][: 4 + i % 9] + [1 + i % 30], SamplingParams(n=1 + i % 2, seed=i, max_tokens=14))
        for i in range(40)
    ]
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24, chunk_size=6, max_model_len=64)
    driver = Driver(Workload(18, 4, 0.0, True, config, arrivals))
    driver.run()
    assert driver.num_preempted > 10
