"""Steps that are launched before they are planned change no token, whatever happens to the plan meanwhile.

The oracle is the same engine without running ahead, in float64, so that no batch's order of additions matters.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from engine_cases import check_clean, greedy, run_staggered, tokens_of

from nanopd import LLM, SamplingParams
from nanopd.engine.pending import PendingStep
from nanopd.engine.plan import ScheduledChunk, SchedulerConfig, StepPlan
from nanopd.engine.request import Request
from nanopd.engine.run_ahead import StepAhead, plan_ahead
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import NonFiniteLogitsError
from nanopd.kv.block_manager import BlockManager
from nanopd.model import LoadedModel, load_model


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("dummy:tiny", device="cpu", dtype=torch.float64)


def make_llm(loaded: LoadedModel, run_ahead: bool = True, **options) -> LLM:
    defaults = {"num_blocks": 200, "block_size": 8, "max_num_seqs": 8, "chunk_size": 32, "max_model_len": 400}
    llm = LLM(loaded, run_ahead=run_ahead, use_tqdm=False, **{**defaults, **options})
    llm.kv_cache.tensor.fill_(math.nan)
    return llm


def load(seed: int, count: int = 30) -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and seeded, long and short, n = 2 now and then, and stop tokens that come when nobody expects them."""
    draw = random.Random(seed)
    prompts, params = [], []
    for i in range(count):
        prompts.append([draw.randrange(1, 1000) for _ in range(draw.randint(1, 60))])
        params.append(
            SamplingParams(
                temperature=draw.choice([0.0, 0.0, 1.0]),
                top_p=draw.choice([1.0, 0.9]),
                seed=i,
                n=draw.choice([1, 1, 1, 2]),
                max_tokens=draw.randint(1, 40),
                stop_token_ids=draw.sample(range(1000), 30),
                ignore_eos=True,
            )
        )
    return prompts, params


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 24}, {"block_size": 16}, {"enable_prefix_caching": False}, {"max_num_seqs": 3}],
    ids=str,
)
def test_tokens_are_those_of_one_step_after_the_other(tiny: LoadedModel, options) -> None:
    prompts, params = load(seed=1)
    results = []
    for run_ahead in (False, True):
        llm = make_llm(tiny, run_ahead, **options)
        results.append(tokens_of(run_staggered(llm, prompts, params, per_step=1)))
        check_clean(llm)
        ahead = llm.runner.num_steps_ahead
        assert ahead > 10 if run_ahead else ahead == 0
    assert results[0] == results[1]


def test_hardly_any_step_of_a_steady_batch_waits_for_the_host(tiny: LoadedModel) -> None:
    llm = make_llm(tiny)
    llm.generate([[i] * (5 + i) for i in range(1, 9)], greedy(64), use_tqdm=False)  # borders of blocks one by one
    assert llm.runner.num_steps_ahead >= 60


def test_aborts_at_any_moment(tiny: LoadedModel) -> None:
    prompts, params = load(seed=2)
    expected = {}
    for run_ahead in (False, True):
        draw = random.Random(3)
        llm = make_llm(tiny, run_ahead, num_blocks=60)
        names = [llm.engine.add_request(p, q, request_id=f"r{i}") for i, (p, q) in enumerate(zip(prompts, params))]
        outputs = {}
        while llm.engine.has_unfinished:
            outputs |= {output.request_id: output for output in llm.engine.step()}
            victim = draw.choice(names)
            if draw.random() < 0.15 and llm.engine.is_unfinished(victim):
                llm.engine.abort(victim)
        check_clean(llm)
        found = {name: [sample.token_ids for sample in output.outputs] for name, output in outputs.items()}
        if not run_ahead:
            expected = found
    assert found == expected and len(found) == len(prompts)


def test_a_step_ahead_is_dropped_by_whoever_computes_something_else(tiny: LoadedModel) -> None:
    """Beam search uses the same runner between two steps, and a launch by hand may be anything."""
    alone = make_llm(tiny, False)
    expected = alone.generate([[5] * 20], greedy(30), use_tqdm=False)[0].outputs[0].token_ids
    beams = [beam.token_ids for beam in alone.beam_search([7] * 9, 3, 6)]
    llm = make_llm(tiny)
    llm.engine.add_request([5] * 20, greedy(30))
    outputs = []
    while llm.engine.has_unfinished:
        outputs += llm.engine.step()
        if llm.engine.num_steps == 10:
            assert [beam.token_ids for beam in llm.beam_search([7] * 9, 3, 6)] == beams
    assert outputs[0].outputs[0].token_ids == expected


def test_a_row_that_fails_ahead_of_its_plan_fails_by_name(tiny: LoadedModel) -> None:
    """The step after it runs all the same, on token 0 in place of none; nobody gets to see that."""
    llm = make_llm(tiny)
    prompts = [[3] * 10, [4] * 12]
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(prompt, greedy(40), request_id=f"r{i}")
    outputs = {}
    while llm.engine.has_unfinished:
        if llm.engine.num_steps == 8:
            (request,) = [r for r in llm.scheduler.running if r.request_id == "r1"]
            llm.kv_cache.tensor[:, :, request.table.block_ids[0]] = math.nan
        outputs |= {output.request_id: output for output in llm.engine.step()}
    assert isinstance(outputs["r1"].error.__cause__, NonFiniteLogitsError) and "r1" in str(outputs["r1"].error)
    check_clean(llm)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_error_of_the_step_ahead_ends_whom_that_step_is_planned_for(tiny: LoadedModel, run_ahead: bool) -> None:
    """Whoever ends with the step before it has its last token, and the others have theirs."""
    llm = make_llm(tiny, run_ahead)
    forward = llm.model.forward

    class Broken:
        def forward(self, batch, *rest):
            if batch.num_decodes and int(batch.positions.max()) == 30:
                raise RuntimeError("position 30")
            return forward(batch, *rest)

    llm.runner.model = Broken()
    for name, prompt, max_tokens in (("goes on", [1] * 20, 40), ("ends", [2] * 5, 11), ("too", [3] * 5, 12)):
        llm.engine.add_request(prompt, greedy(max_tokens), request_id=name)
    outputs = {}
    while llm.engine.has_unfinished:
        outputs |= {output.request_id: output for output in llm.engine.step()}
    assert {name: len(output.outputs[0].token_ids) for name, output in outputs.items()} == dict.fromkeys(outputs, 11)
    assert outputs["ends"].error is None
    assert "2 requests raised RuntimeError: position 30" in str(outputs["goes on"].error)
    assert outputs["too"].error is outputs["goes on"].error
    check_clean(llm)


def test_what_can_be_known_of_the_next_step() -> None:
    manager = BlockManager(20, 8, enable_prefix_caching=False)

    def request(name: str, tokens: int, slots: int, max_tokens: int = 10) -> Request:
        made = Request(name, [1] * tokens, SamplingParams(max_tokens=max_tokens))
        made.table = manager.match_prefix(())
        manager.append_slots(made.table, slots)
        made.append_token(2)
        return made

    a, b, ends = request("a", 5, 8), request("b", 6, 8), request("ends", 4, 8, max_tokens=2)

    def plan(*requests: Request, steady: bool = True) -> StepPlan:
        chunks = [ScheduledChunk(r, r.num_prompt_tokens, 1, (r,)) for r in requests]
        return StepPlan(chunks, num_decodes=len(chunks), steady=steady)

    found = plan_ahead(plan(a, ends, b))
    assert found is not None
    assert [(chunk.request, chunk.start) for chunk in found[0].chunks] == [(a, 6), (b, 7)]
    assert found[1] == [0, 2]
    assert plan_ahead(plan(a, b, steady=False)) is None
    assert plan_ahead(plan(ends)) is None
    assert plan_ahead(plan(a, request("no slot", 7, 8))) is None
    mixed = plan(a, b)
    mixed.num_decodes = 1
    assert plan_ahead(mixed) is None


def test_a_step_ahead_is_handed_out_for_its_own_plan_only() -> None:
    manager = BlockManager(20, 8, enable_prefix_caching=False)

    def running(name: str) -> Request:
        request = Request(name, [1] * 5, SamplingParams(max_tokens=10))
        request.table = manager.match_prefix(())
        manager.append_slots(request.table, 8)
        return request

    def plan(*chunks: tuple[Request, int], **options) -> StepPlan:
        return StepPlan([ScheduledChunk(r, at, 1, (r,)) for r, at in chunks], num_decodes=len(chunks), **options)

    a, b, c = (running(name) for name in "abc")
    ahead = StepAhead.of(PendingStep(plan((a, 5), (b, 6), (c, 7)), torch.tensor([1, 2, 3]), torch.device("cpu")))
    assert ahead.rows_of(plan((a, 5), (b, 6), (c, 7))) == [0, 1, 2]
    assert ahead.rows_of(plan((a, 5), (c, 7))) == [0, 2]
    assert ahead.rows_of(plan((a, 5), (b, 7))) is None, "b was computed at another position"
    assert ahead.rows_of(plan((a, 5), (running("d"), 6))) is None, "d is new"
    assert ahead.rows_of(plan((running("a"), 5))) is None, "another request of this name"
    assert ahead.rows_of(plan((a, 5), copies=[(0, 1)])) is None, "a block was copied meanwhile"
    assert ahead.rows_of(StepPlan(plan((a, 5)).chunks, num_decodes=0)) is None, "a chunk of a prompt"
    a.table = running("a").table
    assert ahead.rows_of(plan((a, 5))) is None, "a was preempted and has other blocks"


def test_slots_are_reserved_early_only_where_there_is_room() -> None:
    for early, blocks, expected in ((False, 9, 1), (True, 9, 2), (True, 1, 1)):
        manager = BlockManager(blocks, 8, enable_prefix_caching=False, watermark=0.0)
        scheduler = Scheduler(SchedulerConfig(4, 64), manager, early_slots=early)
        request = Request("a", [1] * 6, SamplingParams(max_tokens=2 if blocks == 1 else 9))
        scheduler.add(request)
        for _ in range(2):  # the prompt, then position 6; position 7 ends the block
            plan = scheduler.schedule()
            scheduler.update(plan, [[5]])
            if request.is_finished:
                break
        else:
            scheduler.schedule()
            assert request.table is not None and len(request.table.block_ids) == expected


def test_blocks_are_copied_after_a_step_ahead_has_ended(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, order = make_llm(tiny), []

    class Ahead(PendingStep):
        def end(self) -> None:
            order.append("the step ahead ended")

    runner = llm.engine.runner
    runner._ahead = StepAhead.of(Ahead(StepPlan(), None, torch.device("cpu")))
    monkeypatch.setattr(runner.ops, "copy_blocks", lambda *args: order.append("copied"))
    runner.launch(StepPlan(copies=[(0, 1)]))
    assert order == ["the step ahead ended", "copied"]
