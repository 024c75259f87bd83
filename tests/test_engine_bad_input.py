"""What callers get wrong: each mistake is refused by name, before anything is queued, and costs nobody else a token."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import check_clean, greedy
from test_engine_policy_loop import BLOCK, WAIT, HookedRunner, make_engine

from nanopd import LLM, SamplingParams
from nanopd.engine.detokenizer import _overlap
from nanopd.engine.engine import Engine
from nanopd.engine.plan import SchedulerConfig, StepPlan
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    InvalidTokenError,
    ModelLoadError,
    StepFailedError,
)
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.prefix_cache import chain_hash
from nanopd.model import LoadedModel

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def llm(tiny: LoadedModel) -> LLM:
    return LLM(tiny, num_blocks=8, max_num_seqs=4, max_num_batched_tokens=64)


def run(engine: Engine) -> list[Any]:
    outputs = engine.poll()
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


# --- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [np.array(PROMPT), torch.tensor(PROMPT), [np.int64(t) for t in PROMPT], tuple(PROMPT), iter(PROMPT), range(1, 4)],
    ids=lambda prompt: type(prompt).__name__,
)
def test_any_integers_make_one_prompt(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, greedy(2), use_tqdm=False)
    assert output.prompt_token_ids == PROMPT
    assert all(type(token) is int for token in output.prompt_token_ids)


@pytest.mark.parametrize("prompt", [np.array([PROMPT, PROMPT]), torch.tensor([[1], [2]]), [np.array([1]), [2]]])
def test_rows_of_an_array_are_prompts_of_their_own(llm: LLM, prompt: Any) -> None:
    assert len(llm.generate(prompt, greedy(1), use_tqdm=False)) == 2


BAD_PROMPTS = [
    None, 3, 1.5, b"abc", {1, 2}, {"prompt": "x"}, np.array(3), [True, 2], [1.5], [[1.5]], ["a", 1], [None], [[[1]]],
    [1, [2]], [[np.bool_(True)]], [b"abc"], [-1], [1024], [2**70], [{"prompt_token_ids": [1]}],
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: llm.generate(prompt, greedy(1), use_tqdm=False),
        lambda: llm.generate([PROMPT, prompt], greedy(1), use_tqdm=False),
        lambda: llm.stream(prompt, greedy(1)),
        lambda: llm.beam_search(prompt, 1, 1),
    )
    for call in calls:
        with pytest.raises(InvalidRequestError):
            call()
    assert not llm.engine.has_unfinished
    check_clean(llm)


def test_a_bool_among_token_ids_is_pointed_at(llm: LLM) -> None:
    with pytest.raises(InvalidTokenError, match="bool at index 1"):
        llm.generate([[1, True]], use_tqdm=False)


# --- parameters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [3, "x", [None], {"n": 1}, [3], SamplingParams, iter([SamplingParams()])])
def test_what_are_no_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidSamplingParamsError, match="expected SamplingParams"):
        llm.generate([PROMPT], params, use_tqdm=False)
    with pytest.raises(InvalidSamplingParamsError, match="expected SamplingParams"):
        llm.engine.add_request(PROMPT, params)
    check_clean(llm)


@pytest.mark.parametrize(
    "wrong",
    [{"n": 65537}, {"n": 10**30}, {"top_k": 2**31}, {"top_k": 2**63}, {"temperature": 10**400}, {"top_p": 10**400}],
    ids=repr,
)
def test_numbers_beyond_what_a_step_can_hold_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_extreme_but_legal_parameters_can_be_sampled(llm: LLM) -> None:
    extremes = [
        SamplingParams(temperature=5e-324, top_p=5e-324, top_k=2**31 - 1, seed=2**64 - 1, max_tokens=2),
        SamplingParams(temperature=1e308, max_tokens=2, stop="x" * 100_000, stop_token_ids=[2**70]),
    ]
    for output in llm.generate([PROMPT, PROMPT], extremes, use_tqdm=False):
        assert output.error is None
    check_clean(llm)


@pytest.mark.parametrize("request_id", [3, 1.5, b"x", ["x"]], ids=repr)
def test_a_request_id_is_text(request_id: Any) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="request_id must be a str"):
        engine.add_request(PROMPT, request_id=request_id)
    assert not engine.has_unfinished


@pytest.mark.parametrize("time", [float("nan"), float("inf"), "x", True, 2**2000], ids=lambda time: f"{time!r:.10}")
def test_an_arrival_time_is_finite(time: Any) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="arrival_time must be a finite number"):
        engine.add_request(PROMPT, arrival_time=time)
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 1.5}, {"beam_width": "2"}, {"beam_width": True}, {"max_tokens": None}, {"max_tokens": 1.5},
        {"length_penalty": float("nan")}, {"length_penalty": float("inf")}, {"length_penalty": "x"},
        {"length_penalty": 1e9}, {"length_penalty": -1e9},
        {"end_token_ids": 5}, {"end_token_ids": "ab"}, {"end_token_ids": [-1]}, {"end_token_ids": [1.5]},
    ],
    ids=repr,
)  # fmt: skip
def test_beam_search_names_what_is_wrong(llm: LLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=next(iter(wrong))):
        llm.beam_search(**{"prompt": PROMPT, "beam_width": 2, "max_tokens": 3, **wrong})
    check_clean(llm)


# --- construction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 16.0}, {"block_size": "16"}, {"block_size": None}, {"block_size": 12},
        {"num_blocks": 0}, {"num_blocks": 2.5}, {"num_blocks": "16"}, {"num_blocks": True},
        {"max_model_len": "16"}, {"max_model_len": [1]}, {"max_model_len": 0}, {"max_num_seqs": None},
        {"gpu_memory_utilization": "1", "num_blocks": None}, {"gpu_memory_utilization": 2.0, "num_blocks": None},
        {"enable_prefix_caching": "no"}, {"enforce_eager": None}, {"seed": [1]}, {"seed": 1.5},
        {"clock": None}, {"on_step": 3},
    ],
    ids=repr,
)  # fmt: skip
def test_a_wrong_option_is_a_config_error(tiny: LoadedModel, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LLM(tiny, **{"num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, **wrong})


@pytest.mark.parametrize("model", [None, 3, b"smollm2", ["smollm2"]], ids=repr)
def test_a_model_is_a_name_or_a_path(model: Any) -> None:
    with pytest.raises(ModelLoadError, match="a model is a name or the path of a folder"):
        LLM(model, device="cpu")


def test_a_budget_without_limit_takes_no_memory_without_limit(tiny: LoadedModel) -> None:
    unlimited = LLM(tiny, num_blocks=8, max_num_seqs=4, max_num_batched_tokens=1 << 40)
    prompts = [[i] * 30 for i in range(8)]
    want = LLM(tiny, num_blocks=64, max_num_batched_tokens=4096).generate(prompts, greedy(4), use_tqdm=False)
    got = unlimited.generate(prompts, greedy(4), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    check_clean(unlimited)


# --- the loop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [None, 5, "x", [], [[]], [[1, 2]], [[None]], [[1.5]], [["a"]], [[[1]]]], ids=repr)
def test_a_runner_that_returns_junk_fails_its_step_only(junk: Any) -> None:
    class Junk:
        def execute(self, plan: StepPlan) -> Any:
            return junk

    engine = make_engine(runner=Junk())
    engine.add_request(PROMPT)
    (output,) = run(engine)
    assert isinstance(output.error, StepFailedError)
    assert output.outputs[0].token_ids == []
    engine.scheduler.block_manager.check_integrity([])
    assert engine.scheduler.in_flight is None


def test_an_exit_in_the_middle_of_a_step_leaves_the_engine_usable() -> None:
    runner = HookedRunner(64, BLOCK)
    engine = make_engine(runner=runner)
    engine.add_request(PROMPT, SamplingParams(max_tokens=3, seed=1, ignore_eos=True))

    def leave(plan: StepPlan) -> None:
        raise SystemExit(3)

    runner.hook = leave
    with pytest.raises(SystemExit):
        engine.step()
    runner.hook = lambda plan: None
    (output,) = run(engine)
    other = make_engine()
    other.add_request(PROMPT, SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
    assert output.outputs[0].token_ids == run(other)[0].outputs[0].token_ids


def test_a_made_up_id_avoids_those_that_users_chose() -> None:
    engine = make_engine()
    for name in ("0", "1#1", "2#2"):
        engine.add_request(PROMPT, request_id=name)
    assert engine.add_request(PROMPT, SamplingParams(n=2)) == "2"
    assert engine.add_request(PROMPT, SamplingParams(n=3)) == "3"
    assert len(run(engine)) == 5


def test_a_closed_engine_refuses_an_empty_list_too() -> None:
    engine = make_engine()
    assert engine.generate([], use_tqdm=False) == []
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.generate([], use_tqdm=False)


def test_threads_that_read_one_stream_share_its_outputs() -> None:
    stream = make_engine().stream(PROMPT, SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    got: list[int] = []

    def read() -> None:
        for output in stream:
            got.append(len(output.outputs[0].token_ids))

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(got) == list(range(1, 21))


def test_a_stream_collected_in_the_middle_of_a_step_ends_with_the_next_one() -> None:
    """The garbage collector may run at any line, also while the scheduler goes through its lists."""
    streams: list[object] = []

    def hash_and_collect(parent: int, tokens: tuple[int, ...]) -> int:
        streams.clear()  # drops the last reference, in the middle of `update`
        return chain_hash(parent, tokens)

    blocks = BlockManager(64, BLOCK, hash_function=hash_and_collect)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=80), blocks)
    engine = Engine(scheduler, HookedRunner(64, BLOCK))
    params = SamplingParams(max_tokens=6, seed=1)
    for name in ("a", "b"):
        engine.add_request([9, 9], params, request_id=name)
    streams.append(engine.stream([7], params, request_id="left"))
    engine.add_request([9, 9], params, request_id="c")
    abort, busy = scheduler.abort, []
    scheduler.abort = lambda *args: busy.append(scheduler.in_flight) or abort(*args)  # type: ignore[method-assign]
    update = scheduler.update

    def watched(*args: Any) -> Any:
        before = len(busy)
        finished = update(*args)
        assert len(busy) == before, "aborted in the middle of an update"
        return finished

    scheduler.update = watched  # type: ignore[method-assign]
    assert sorted(output.request_id for output in run(engine)) == ["a", "b", "c"]
    assert len(busy) == 1
    blocks.check_integrity([])


def test_the_end_that_may_begin_a_stop_string_is_found_as_by_definition() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        text, stop = ("".join(rng.choice("ab") for _ in range(rng.randint(low, 8))) for low in (0, 1))
        ends = (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n]))
        assert _overlap(text, stop) == next(ends, 0), (text, stop)
