"""The scheduler's rules one by one, and each way in which a request can be wrong or end early."""

from __future__ import annotations

import itertools

import pytest
from fake_runner import EOS, FakeRunner, next_token, oracle

from nanopd.engine.request import LEGAL_TRANSITIONS, FinishReason, Request, RequestState
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from nanopd.errors import (
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    IllegalTransitionError,
    PromptTooLongError,
    StepFailedError,
    UnknownRequestError,
)
from nanopd.kv.block_manager import BlockManager, BlockTable

BLOCK = 4


class Lab:
    """A scheduler, a pool and a runner, with a clock that counts calls."""

    def __init__(self, num_blocks: int = 32, watermark: float = 0.0, caching: bool = True, **config: int) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK, watermark=watermark, enable_prefix_caching=caching)
        self.config = SchedulerConfig(
            **{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100} | config
        )
        self.scheduler = Scheduler(self.config, self.blocks)
        self.runner = FakeRunner(num_blocks, BLOCK)
        self.now = 0.0
        self.all: list[Request] = []
        self.foreign: list[BlockTable] = []  # tables that are not the scheduler's

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def add(self, name: str, prompt: int | list[int], max_tokens: int = 8, **params: object) -> Request:
        tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        hand_off = bool(params.pop("hand_off", False))
        settings = SamplingParams(**{"seed": 1, "max_tokens": max_tokens, "ignore_eos": True} | params)
        request = Request(name, tokens, settings, arrival_time=self.now, eos_token_ids=[EOS], hand_off=hand_off)
        self.all += self.scheduler.add(request, self.tick())
        return request

    def begin(self) -> StepPlan:
        return self.scheduler.schedule(self.tick())

    def end(self, plan: StepPlan) -> list[Request]:
        finished = self.scheduler.update(plan, self.runner.execute(plan), self.tick())
        self.check()
        return finished

    def step(self) -> StepPlan:
        plan = self.begin()
        if plan.chunks:
            self.end(plan)
        return plan

    def run(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished
        assert self.blocks.num_free_blocks == self.blocks.num_blocks

    def hold(self, num_blocks: int) -> None:
        """Take blocks as somebody outside of the scheduler would."""
        self.foreign.append(self.blocks.match_prefix([0]))
        self.blocks.append_slots(self.foreign[-1], num_blocks * BLOCK)

    def check(self) -> None:
        self.blocks.check_integrity([*self.foreign, *(r.table for r in self.all if r.table is not None)])

    def check_oracle(self) -> None:
        for request in self.all:
            expected = oracle(request.prompt_token_ids, request.params, request.sample_index, self.config.max_model_len)
            assert request.output_token_ids == expected


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


# --- what is refused, and what is not ------------------------------------------------------------------------------


def test_empty_prompt_is_refused() -> None:
    lab = Lab()
    with pytest.raises(EmptyPromptError, match="'a'"):
        lab.add("a", [])
    assert not lab.scheduler.has_unfinished


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(100, 1, False), (101, 0, False), (100, 0, True), (99, 1, True), (99, 50, True), (5, 95, True), (5, 200, True)],
)
def test_prompt_above_the_models_length_is_refused(prompt: int, max_tokens: int, fits: bool) -> None:
    lab = Lab(num_blocks=25)
    if not fits:
        with pytest.raises(PromptTooLongError, match="100"):
            lab.add("a", prompt, max_tokens)
        return
    request = lab.add("a", prompt, max_tokens)
    lab.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.output_token_ids) == min(max_tokens, 100 - prompt)
    lab.check_oracle()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    # A pool of 3 blocks of 4. The last token sampled needs no slot.
    [(12, 1, True), (12, 2, False), (13, 1, False), (5, 8, True), (5, 9, False), (13, 0, False), (12, 0, True)],
)
def test_a_pool_too_small_refuses_and_a_pool_exactly_full_runs(prompt: int, max_tokens: int, fits: bool) -> None:
    for watermark in (0.0, 0.5):  # the watermark must not lock out a request that is alone
        lab = Lab(num_blocks=3, watermark=watermark)
        if fits:
            for name in "ab":  # the second finds most of the pool cached
                lab.add(name, prompt, max_tokens)
                lab.run()
            lab.check_oracle()
        else:
            with pytest.raises(PromptTooLongError, match=r"3 blocks of 4"):
                lab.add("a", prompt, max_tokens)
            assert not lab.scheduler.has_unfinished


def test_ids_in_use_are_refused_until_they_are_free() -> None:
    lab = Lab()
    lab.add("a", 4, n=2)
    for name in ("a", "a#1"):
        with pytest.raises(DuplicateRequestError, match=name):
            lab.add(name, 4)
    lab.add("b#1", 3)
    with pytest.raises(DuplicateRequestError, match="b#1"):
        lab.add("b", 4, n=2)
    lab.run()
    lab.add("a", 4, n=2)
    lab.run()
    lab.check_oracle()


def test_unknown_id() -> None:
    lab = Lab()
    with pytest.raises(UnknownRequestError, match="nobody"):
        lab.scheduler.abort("nobody")
    lab.add("a", 3)
    lab.run()
    with pytest.raises(UnknownRequestError):
        lab.scheduler.abort("a")


def test_max_tokens_zero_finishes_at_once() -> None:
    lab = Lab()
    request = lab.add("a", 5, max_tokens=0, n=3)
    assert len(lab.all) == 3
    for sample in lab.all:
        assert sample.finish_reason is FinishReason.LENGTH and sample.output_token_ids == []
    assert not lab.begin().chunks and not lab.scheduler.has_unfinished
    assert [s.event for s in request.stamps] == ["arrived", "waiting", "finished"]


@pytest.mark.parametrize("n", [1, 3])
def test_first_token_ends_the_sequence(n: int) -> None:
    prompt = next([3, t] for t in range(1, 999) if next_token([3, t], 1, 0) == EOS)
    lab = Lab()
    request = lab.add("a", prompt, n=n, ignore_eos=False)
    lab.run()
    assert request.output_token_ids == [EOS] and request.finish_reason is FinishReason.STOP
    lab.check_oracle()
    longer = lab.add("b", prompt, ignore_eos=True)
    lab.run()
    assert len(longer.output_token_ids) == 8


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_seqs": 0},
        {"chunk_size": 0},
        {"max_model_len": -1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 8},
        {"max_num_seqs": True},
        {"max_num_seqs": 10**12, "max_num_batched_tokens": 10**12},
    ],
    ids=lambda values: "-".join(f"{name}={str(value)[:5]}" for name, value in values.items()),
)
def test_bad_limits(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SchedulerConfig(**values)


# --- who goes when -------------------------------------------------------------------------------------------------


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    lab = Lab(max_num_batched_tokens=10, max_num_seqs=4)
    lab.add("a", 6)
    assert shape(lab.step()) == [("a", 0, 6)]
    lab.add("b", 15)
    lab.add("c", [30 + i for i in range(7)])
    first, second, third = lab.step(), lab.step(), lab.step()
    assert (shape(first), first.num_decodes) == ([("a", 6, 1), ("b", 4, 9)], 1)  # one block of b was cached by a
    assert (shape(second), second.num_decodes) == ([("a", 7, 1), ("b", 13, 2), ("c", 0, 7)], 1)
    assert (shape(third), third.num_decodes) == ([("a", 8, 1), ("b", 15, 1), ("c", 7, 1)], 3)
    lab.run()
    lab.check_oracle()


def test_chunk_size_limits_the_prefill_tokens_of_a_step() -> None:
    lab = Lab(chunk_size=5)
    lab.add("a", 7)
    lab.add("b", [20, 21, 22, 23, 24, 25])
    assert [shape(lab.step()) for _ in range(3)] == [
        [("a", 0, 5)],
        [("a", 5, 2), ("b", 0, 3)],
        [("a", 7, 1), ("b", 3, 3)],
    ]


def test_seats_limit_who_starts() -> None:
    lab = Lab(max_num_seqs=2)
    for name in "abc":
        lab.add(name, 3, max_tokens=3)
    lab.step()
    assert [r.request_id for r in lab.scheduler.waiting] == ["c"]
    lab.run()
    lab.check_oracle()


def test_admission_keeps_the_watermark_free() -> None:
    lab = Lab(num_blocks=10, watermark=0.3)  # 3 blocks
    lab.add("a", 16, max_tokens=1)
    lab.add("b", [50 + i for i in range(16)], max_tokens=1)  # 4 blocks of the 6 that are left
    assert shape(lab.step()) == [("a", 0, 16)]
    lab.add("c", 4, max_tokens=1)  # would fit, but nobody overtakes
    assert shape(lab.step())[0] == ("b", 0, 16)
    lab.run()


def test_prefix_is_cached_after_the_step_that_computed_it_not_before() -> None:
    lab = Lab(max_num_batched_tokens=100)
    lab.add("a", 9)
    lab.add("b", 9)
    plan = lab.begin()
    assert shape(plan) == [("a", 0, 9), ("b", 0, 9)]
    assert lab.blocks.peek_prefix(list(range(1, 10))) == 0
    lab.end(plan)
    late = lab.add("c", 9)
    assert ("c", 8, 1) in shape(lab.step())
    assert next(s for s in late.stamps if s.event == "prefilling").num_tokens == 8
    lab.run()
    lab.check_oracle()


def test_outputs_are_cached_too() -> None:
    lab = Lab()
    request = lab.add("a", 3, max_tokens=10)
    lab.run()
    assert lab.blocks.peek_prefix([*request.all_token_ids, 1]) == 12  # the 13th token was never computed


def test_a_refused_head_is_asked_again_when_its_prefix_was_computed() -> None:
    lab = Lab(num_blocks=8)
    lab.add("a", 24, max_tokens=4)
    lab.add("b", 24, max_tokens=1)
    assert shape(lab.step()) == [("a", 0, 24)]  # b wants 6 blocks, and 2 are free
    assert shape(lab.step()) == [("a", 24, 1), ("b", 20, 4)]  # now 1 is free, and b wants no more
    lab.run()
    lab.check_oracle()


# --- short of blocks -----------------------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted_and_keeps_its_tokens() -> None:
    lab = Lab(num_blocks=8)
    for name, first in (("a", 10), ("b", 20), ("c", 30)):
        lab.add(name, [first + i for i in range(7)], max_tokens=12)
    lab.step()
    lab.add("d", 3, max_tokens=2)
    a, b, c, d = lab.all
    preempted: list[Request] = []
    while not preempted:
        kept = list(c.output_token_ids)
        preempted = lab.step().preempted
    assert preempted == [d, c] and c.state is RequestState.WAITING and c.table is None
    assert c.output_token_ids == kept and len(kept) > 0
    assert list(lab.scheduler.waiting) == [c, d], "it waits in front of those who arrived later"
    assert a.state is b.state is RequestState.RUNNING
    lab.run()
    lab.check_oracle()


def test_a_preempted_request_finds_what_is_left_of_its_blocks_in_the_prefix_cache() -> None:
    lab = Lab(num_blocks=6)
    a = lab.add("a", [50 + i for i in range(7)], max_tokens=4)
    b = lab.add("b", 15, max_tokens=4)
    while a.is_finished is False:
        lab.step()
    lab.run()
    lab.check_oracle()
    first, second = (s.num_tokens for s in b.stamps if s.event == "prefilling")
    # Of b's four full blocks a took the last one.
    assert (first, second) == (0, 12)


def test_a_half_prefilled_request_gives_way_to_decodes() -> None:
    lab = Lab(num_blocks=7, chunk_size=4, caching=False)
    a = lab.add("a", 4, max_tokens=20)
    lab.step()
    b = lab.add("b", [60 + i for i in range(20)], max_tokens=2)
    states = []
    while not a.is_finished:
        plan = lab.step()
        assert ("a", a.num_computed_tokens - 1, 1) in shape(plan) or a.is_finished
        states.append(b.state)
    assert RequestState.PREFILLING in states
    lab.run()
    lab.check_oracle()


def test_blocks_held_by_others_stall_the_engine_only_as_long_as_they_are_held() -> None:
    lab = Lab(num_blocks=4)
    lab.hold(3)
    request = lab.add("a", 4, max_tokens=8)
    lab.step()
    assert not lab.begin().chunks and request.state is RequestState.RUNNING
    lab.blocks.free(lab.foreign.pop())
    lab.run()
    lab.check_oracle()


def test_a_chunk_is_cut_to_the_blocks_that_are_there() -> None:
    lab = Lab(num_blocks=4)
    lab.hold(2)
    lab.add("a", 12, max_tokens=2)
    assert shape(lab.step()) == [("a", 0, 8)]
    assert not lab.begin().chunks
    lab.blocks.free(lab.foreign.pop())
    assert shape(lab.step()) == [("a", 8, 4)]
    lab.run()
    lab.check_oracle()


# --- several samples -----------------------------------------------------------------------------------------------


def test_samples_share_the_prompt_and_copy_on_write() -> None:
    lab = Lab(num_blocks=20)
    parent = lab.add("a", 10, n=3)
    lab.step()
    tables = [sample.table for sample in lab.all]
    assert all(t is not None and t.block_ids == parent.table.block_ids for t in tables)
    assert lab.runner.num_computed == 10
    plan = lab.begin()
    assert len(plan.copies) == 2  # the last of the three writes in place
    lab.end(plan)
    assert len({sample.table.block_ids[2] for sample in lab.all}) == 3
    lab.run()
    lab.check_oracle()
    assert len({tuple(sample.output_token_ids) for sample in lab.all}) == 3


def test_samples_that_find_no_seat_wait_and_give_the_same_tokens() -> None:
    lab = Lab(max_num_seqs=2)
    lab.add("a", 6, n=4)
    lab.add("b", 5)
    plan = lab.step()
    assert [r.request_id for r in plan.chunks[0].samplers] == ["a", "a#1"]
    assert [r.request_id for r in lab.scheduler.waiting] == ["a#2", "a#3", "b"]
    lab.run()
    lab.check_oracle()


def test_samples_that_find_no_block_wait_and_give_the_same_tokens() -> None:
    lab = Lab(num_blocks=4)
    lab.add("a", 6, n=4, max_tokens=11)
    lab.run()
    lab.check_oracle()


def test_samples_whose_parent_ends_before_the_fork_compute_the_prompt_themselves() -> None:
    lab = Lab(chunk_size=4)
    parent = lab.add("a", 10, n=3)
    lab.step()
    lab.scheduler.finish(parent, FinishReason.ABORTED, lab.tick())
    lab.run()
    for sample in lab.all[1:]:
        assert sample.output_token_ids == oracle(sample.prompt_token_ids, sample.params, sample.sample_index, 100)


# --- ends before the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("state", ["waiting", "preempted", "prefilling", "running", "transferring", "forking"])
def test_abort_in_each_state(state: str, in_flight: bool) -> None:
    lab = Lab(num_blocks=8, chunk_size=6, caching=False)
    other = lab.add("other", [40 + i for i in range(6)], max_tokens=20)
    lab.step()
    victim = lab.add("victim", 10, max_tokens=16, n=3 if state == "forking" else 1, hand_off=state == "transferring")
    steps = {"waiting": 0, "prefilling": 1, "running": 2, "transferring": 2, "forking": 1}.get(state, 0)
    for _ in range(steps):
        lab.step()
    while state == "preempted" and not any(s.event == "preempted" for s in victim.stamps):
        lab.step()
    assert victim.state.value == {"preempted": "waiting", "forking": "prefilling"}.get(state, state)
    had = list(victim.output_token_ids)
    plan = lab.begin() if in_flight else None
    ended = lab.scheduler.abort("victim", lab.tick())
    assert len(ended) == (3 if state == "forking" else 1)
    lab.check()
    if plan is not None:
        assert victim not in lab.end(plan)
    assert all(r.finish_reason is FinishReason.ABORTED and r.table is None for r in ended)
    assert victim.output_token_ids == had, "a token sampled while the request was aborted is dropped"
    with pytest.raises(UnknownRequestError):
        lab.scheduler.abort("victim")
    lab.run()
    assert other.output_token_ids == oracle(other.prompt_token_ids, other.params, 0, 100)


def test_blocks_of_an_aborted_request_stay_until_its_step_has_ended() -> None:
    lab = Lab(num_blocks=4)
    lab.add("a", 9)
    plan = lab.begin()
    free = lab.blocks.num_free_blocks
    lab.scheduler.abort("a")
    assert lab.blocks.num_free_blocks == free, "the step still writes there"
    lab.end(plan)
    assert lab.blocks.num_free_blocks == 4


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    lab = Lab(max_num_seqs=2)
    a = lab.add("a", 6, max_tokens=4)
    lab.step()
    b = lab.add("b", 5, n=2, max_tokens=4)
    c = lab.add("c", 7, max_tokens=4)
    error = RuntimeError("boom")
    ended = lab.scheduler.fail(lab.begin(), error, lab.tick())
    lab.check()
    assert {r.request_id for r in ended} == {"a", "b"}  # b#1 had found no seat in this step
    assert a.finish_reason is b.finish_reason is FinishReason.FAILED and a.error is b.error is error
    assert lab.blocks.num_free_blocks == lab.blocks.num_blocks
    assert not c.is_finished
    lab.run()
    assert c.output_token_ids == oracle(c.prompt_token_ids, c.params, 0, 100)


def test_a_failed_step_takes_the_samples_along_that_depend_on_it() -> None:
    lab = Lab(chunk_size=3)
    lab.add("a", 5, n=3)
    ended = lab.scheduler.fail(lab.begin(), RuntimeError("boom"), lab.tick())
    assert len(ended) == 3 and not lab.scheduler.has_unfinished


def test_a_cancelled_step_is_recomputed() -> None:
    lab = Lab(chunk_size=9)
    lab.add("a", 10, n=3, max_tokens=6)
    lab.add("b", 12, max_tokens=6)
    for cancelled in range(8):
        plan = lab.begin()
        if cancelled % 2:
            lab.end(plan)
        else:
            lab.runner.execute(plan)  # it wrote, but nobody knows
            lab.scheduler.cancel(plan, lab.tick())
            assert not lab.scheduler.running and not lab.scheduler.prefilling
        lab.check()
    lab.run()
    lab.check_oracle()


def test_tokens_of_the_wrong_shape_change_nothing() -> None:
    lab = Lab()
    lab.add("a", 6, n=2)
    plan = lab.begin()
    for wrong in ([], [[1]], [[1, 2, 3]], [[1, 2], [3]]):
        with pytest.raises(StepFailedError, match="2"):
            lab.scheduler.update(plan, wrong, lab.tick())
    lab.end(plan)
    lab.run()
    lab.check_oracle()


def test_steps_out_of_order_are_refused() -> None:
    lab = Lab()
    lab.add("a", 6)
    plan = lab.begin()
    with pytest.raises(IllegalTransitionError, match="in flight"):
        lab.begin()
    with pytest.raises(IllegalTransitionError, match="not the step in flight"):
        lab.scheduler.update(StepPlan(list(plan.chunks)), [[1]], 0.0)
    lab.end(plan)
    for late in (lambda: lab.scheduler.update(plan, [[1]], 0.0), lambda: lab.scheduler.cancel(plan)):
        with pytest.raises(IllegalTransitionError):
            late()
    with pytest.raises(IllegalTransitionError):
        lab.scheduler.fail(plan, RuntimeError())
    lab.run()
    lab.check_oracle()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RequestState, RequestState)))
def test_state_machine(before: RequestState, after: RequestState) -> None:
    request = Request("a", [1], SamplingParams())
    request.state = before
    stamps = list(request.stamps)
    if after in LEGAL_TRANSITIONS[before]:
        request.transition(after, 2.0)
        assert request.state is after and request.stamps[-1] == (2.0, after.value, 0)
    else:
        with pytest.raises(IllegalTransitionError, match=f"from {before.value} to {after.value}"):
            request.transition(after, 2.0)
        assert request.state is before and request.stamps == stamps


def test_the_states_end() -> None:
    assert not LEGAL_TRANSITIONS[RequestState.FINISHED]
    assert all(RequestState.FINISHED in LEGAL_TRANSITIONS[s] for s in RequestState if s is not RequestState.FINISHED)


# --- prefill here, decode there ------------------------------------------------------------------------------------


def transfer(source: Lab, request: Request, target: Lab) -> None:
    """Move the KV of a prefilled request: reserve there, copy, run there, free here."""
    old = source.scheduler.detach(request)
    new = target.blocks.match_prefix([0])
    target.blocks.append_slots(new, old.num_tokens)
    for position in range(old.num_tokens):
        there = new.block_ids[position // BLOCK] * BLOCK + position % BLOCK
        here = old.block_ids[position // BLOCK] * BLOCK + position % BLOCK
        target.runner.slots[there] = source.runner.slots[here]
    target.blocks.commit(new, request.all_token_ids[: old.num_tokens])
    source.blocks.free(old)
    request.table = new
    target.scheduler.attach(request, target.tick())
    source.all.remove(request)
    target.all.append(request)


def test_prefill_and_decode_in_two_places_give_the_same_tokens() -> None:
    prefill, decode = Lab(chunk_size=7), Lab(num_blocks=12, max_num_seqs=3)
    requests = [prefill.add(f"r{i}", [i + 1] * (3 + 2 * i), max_tokens=9, n=1 + i % 2, hand_off=True) for i in range(5)]
    sequences = list(prefill.all)
    for _ in range(200):
        prefill.step()
        for request in list(prefill.scheduler.transferring.values()):
            free = decode.scheduler.num_free_seats > 0 and decode.blocks.num_free_blocks >= 6
            if free and not decode.scheduler.waiting:
                transfer(prefill, request, decode)
        decode.step()
    assert all(r.is_finished for r in sequences) and len(sequences) == 7
    decode.check_oracle()
    assert prefill.blocks.num_free_blocks == 32 and decode.blocks.num_free_blocks == 12
    events = [s.event for s in requests[0].stamps if s.event not in ("token", "chunk", "chunk_start")]
    assert events == ["arrived", "waiting", "prefilling", "transferring", "running", "finished"]


def test_requests_that_arrive_by_transfer_cannot_starve_an_older_one() -> None:
    """Preempted in the decode pool, it must come back although transfers keep filling the pool."""
    prefill, decode = Lab(num_blocks=400, max_num_seqs=60), Lab(num_blocks=10, max_num_seqs=8)
    for i in range(30):
        prefill.add(f"r{i}", [i + 1] * 7, max_tokens=20, hand_off=True)
    for _ in range(40):
        prefill.step()
    preempted_at: dict[str, int] = {}
    for step in range(600):
        for request in list(prefill.scheduler.transferring.values()):
            if decode.scheduler.num_free_seats > 0 and decode.blocks.num_free_blocks >= 2:  # greedy: asks nothing else
                transfer(prefill, request, decode)
        unfinished = [r for r in decode.all if not r.is_finished]
        plan = decode.step()
        if unfinished:
            oldest = min(unfinished, key=lambda r: r.arrival_order)
            assert any(chunk.request is oldest for chunk in plan.chunks), f"step {step}: {oldest} stands still"
        preempted_at |= {r.request_id: step for r in plan.preempted}
    assert preempted_at and len(decode.all) == 30 and all(r.is_finished for r in decode.all)
    decode.check_oracle()


def test_an_older_request_gets_its_blocks_before_later_transfers_grow() -> None:
    prefill, decode = Lab(), Lab(num_blocks=7)
    for name, length in (("a", 3), ("c", 4)):
        prefill.add(name, [length] * length, max_tokens=20, hand_off=True)
    prefill.step()
    a, c = prefill.scheduler.transferring.values()
    transfer(prefill, a, decode)
    decode.hold(2)
    decode.hold(2)
    decode.add("b", 12, max_tokens=2)  # 3 blocks; 2 are free
    assert shape(decode.step()) == [("a", 3, 1)]
    transfer(prefill, c, decode)
    decode.blocks.free(decode.foreign.pop())
    # 3 blocks are free: enough for b, were it not that a and c need one each. c came last.
    plan = decode.step()
    assert shape(plan) == [("a", 4, 1), ("b", 0, 12)] and plan.preempted == [c]
    decode.blocks.free(decode.foreign.pop())
    decode.run()
    decode.check_oracle()


def test_an_older_prefill_gets_its_block_before_later_transfers_grow() -> None:
    prefill, decode = Lab(), Lab(num_blocks=4, chunk_size=4)
    prefill.add("c", [4] * 4, max_tokens=6, hand_off=True)
    prefill.step()
    (c,) = prefill.scheduler.transferring.values()
    decode.add("b", 12, max_tokens=2)
    assert shape(decode.step()) == [("b", 0, 4)]
    transfer(prefill, c, decode)
    decode.hold(1)
    plan = decode.step()  # one block is free; both want it
    assert shape(plan) == [("b", 4, 4)] and plan.preempted == [c]
    decode.blocks.free(decode.foreign.pop())
    decode.run()
    decode.check_oracle()


def test_attach_refuses_what_it_cannot_run() -> None:
    prefill, decode = Lab(), Lab(max_num_seqs=1)
    for name in "ab":
        prefill.add(name, 6, hand_off=True)
    prefill.step()
    first, second = list(prefill.scheduler.transferring.values())
    with pytest.raises(IllegalTransitionError, match="7 tokens have no KV"):
        decode.scheduler.attach(Request("c", list(range(7)), SamplingParams()))
    transfer(prefill, first, decode)
    with pytest.raises(UnknownRequestError):
        prefill.scheduler.detach(first)
    with pytest.raises(IllegalTransitionError, match="all 1 seats"):
        decode.scheduler.attach(second)
    prefill.scheduler.abort("b")
    assert prefill.blocks.num_free_blocks == 32
    decode.run()
