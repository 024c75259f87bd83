"""The engine's loop: outputs and who gets them, text, failures, threads, clocks."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

import pytest
from fake_runner import EOS, VOCAB, FakeRunner, oracle
from test_engine_policy_text import ByteTokenizer

from nanopd.engine.engine import Engine, StepRecord
from nanopd.engine.outputs import RequestOutput
from nanopd.engine.plan import StepPlan
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler, SchedulerConfig
from nanopd.errors import (
    DuplicateRequestError,
    EmptyPromptError,
    EngineClosedError,
    IllegalTransitionError,
    InvalidRequestError,
    InvalidTokenError,
    OutOfBlocksError,
    PromptTooLongError,
    StepFailedError,
    UnknownRequestError,
)
from nanopd.kv.block_manager import BlockManager

BLOCK = 4
WAIT = 60  # seconds until a test that hangs is given up


class HookedRunner(FakeRunner):
    """The fake runner, with something to do before each step's result."""

    hook: Callable[[StepPlan], None] = staticmethod(lambda plan: None)

    def execute(self, plan: StepPlan) -> list[list[int]]:
        tokens = super().execute(plan)
        self.hook(plan)
        return tokens


class Script:
    """Samples what it was told to: ``lines`` maps (request id, sample index) to token ids."""

    def __init__(self, lines: dict[tuple[str, int], list[int]]) -> None:
        self.lines = lines
        self.hook: Callable[[StepPlan], None] = lambda plan: None

    def execute(self, plan: StepPlan) -> list[list[int]]:
        self.hook(plan)
        return [
            [self.lines[s.parent_id, s.sample_index][len(s.output_token_ids)] for s in chunk.samplers]
            for chunk in plan.chunks
        ]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    num_blocks: int = 64,
    runner: object = None,
    tokenizer: object = None,
    eos: Collection[int] = (EOS,),
    **kwargs: object,
) -> Engine:
    blocks = BlockManager(num_blocks, BLOCK, watermark=0.0)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, chunk_size=7, max_model_len=80)
    runner = runner or HookedRunner(num_blocks, BLOCK)
    return Engine(Scheduler(config, blocks), runner, tokenizer, eos_token_ids=eos, vocab_size=300, **kwargs)  # type: ignore[arg-type]


def scripted(lines: dict[tuple[str, int], str | list[int]], **kwargs: object) -> Engine:
    coded = {key: list(line.encode()) if isinstance(line, str) else line for key, line in lines.items()}
    return make_engine(runner=Script(coded), tokenizer=ByteTokenizer(), eos=(256,), **kwargs)


def drain(engine: Engine, limit: int = 1000) -> list[RequestOutput]:
    outputs = []
    for _ in range(limit):
        outputs += engine.step()
        if not engine.has_unfinished:
            return outputs
    raise AssertionError("the engine does not come to an end")


def check_empty(engine: Engine) -> None:
    blocks = engine.scheduler.block_manager
    blocks.check_integrity([])
    assert blocks.num_free_blocks == blocks.num_blocks
    assert not engine.has_unfinished and not engine.scheduler.has_unfinished


def expected(output: RequestOutput, params: SamplingParams) -> list[list[int]]:
    return [oracle(output.prompt_token_ids, params, sample.index, 80) for sample in output.outputs]


def tokens(output: RequestOutput) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


PROMPTS = [[i + 1] * (1 + 5 * i % 13) for i in range(9)]
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=9)


# --- generate ------------------------------------------------------------------------------------------------------


def test_generate_returns_every_prompt_in_order() -> None:
    engine = make_engine()
    params = [SamplingParams(seed=i, max_tokens=1 + i, n=1 + i % 3) for i in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    for output, prompt, wanted in zip(outputs, PROMPTS, params, strict=True):
        assert output.prompt_token_ids == prompt and output.prompt is None and output.finished
        assert tokens(output) == expected(output, wanted)
        assert [sample.index for sample in output.outputs] == list(range(wanted.n))
        assert all(sample.finish_reason in ("stop", "length") for sample in output.outputs)
        assert output.metrics is not None and output.metrics.num_output_tokens == sum(map(len, tokens(output)))
    check_empty(engine)


def test_generate_takes_one_prompt_or_none() -> None:
    engine = make_engine(tokenizer=ByteTokenizer())
    assert [len(engine.generate(p, GREEDY, use_tqdm=False)) for p in ("a", [1, 2], ["a"], [[1], "b"], [])] == [
        1, 1, 1, 2, 0,
    ]  # fmt: skip
    assert engine.generate("abc", GREEDY, use_tqdm=False)[0].prompt == "abc"


def test_generate_shows_prompts_and_tokens_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    make_engine().generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "9/9" in shown and "tok/s" in shown
    make_engine().generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([], EmptyPromptError),
        ("", EmptyPromptError),
        ([1, 300], InvalidTokenError),
        ([1, -1], InvalidTokenError),
        ([1, 2.5], InvalidTokenError),
        (7, InvalidTokenError),
        ([1] * 81, PromptTooLongError),
    ],
)
def test_one_invalid_prompt_refuses_all_before_any_is_queued(bad: object, error: type[Exception]) -> None:
    engine = make_engine(tokenizer=ByteTokenizer())
    with pytest.raises(error):
        engine.generate([[1, 2], bad, [3]], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    check_empty(engine)
    assert len(engine.generate([[1, 2], [3]], GREEDY, use_tqdm=False)) == 2


def test_what_the_arguments_must_be() -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 3 prompts"):
        engine.generate([[1], [2], [3]], [GREEDY, GREEDY], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        engine.generate("text", GREEDY, use_tqdm=False)
    with pytest.raises(InvalidTokenError, match=r"300 .*\[0, 300\)"):
        engine.add_request([300])


def test_generate_leaves_the_outputs_of_others_to_them() -> None:
    engine = make_engine()
    mine = engine.add_request([5, 6], SamplingParams(seed=1, max_tokens=2, ignore_eos=True))
    engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.request_id for output in engine.poll()] == [mine]


def test_an_interrupt_aborts_the_prompts_and_the_engine_goes_on() -> None:
    engine = make_engine()
    other = engine.add_request([9, 9, 9], SamplingParams(seed=4, max_tokens=20, ignore_eos=True))
    calls = []

    def interrupt(plan: StepPlan) -> None:
        calls.append(plan)
        if len(calls) == 4:
            raise KeyboardInterrupt

    engine.runner.hook = interrupt  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert engine.is_unfinished(other)
    (output,) = drain(engine)
    assert tokens(output) == expected(output, SamplingParams(seed=4, max_tokens=20, ignore_eos=True))
    assert output.metrics is not None and output.metrics.num_preemptions == 1  # it was in the interrupted step
    check_empty(engine)


@pytest.mark.parametrize("where", ["append_slots", "commit"])
def test_an_interrupt_in_the_middle_of_the_bookkeeping_waits_for_its_end(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    blocks = engine.scheduler.block_manager
    original, calls = getattr(blocks, where), []

    def interrupted(*args: object) -> object:
        result = original(*args)
        calls.append(args)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(blocks, where, interrupted)
    default = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
    params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    for first in range(3):
        engine.add_request([first] * (2 + first), params)
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(30):
                engine.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, default)
    assert engine.scheduler.in_flight is None
    outputs = drain(engine)
    assert all(tokens(output) == expected(output, params) for output in outputs) and len(outputs) == 3
    check_empty(engine)


@pytest.mark.parametrize("where", ["add", "abort"])
def test_an_interrupt_while_prompts_are_queued_or_aborted_leaves_none_behind(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    original, calls = getattr(engine.scheduler, where), []

    def interrupted(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    def fail(plan: StepPlan) -> None:
        raise KeyboardInterrupt  # which makes `generate` abort

    monkeypatch.setattr(engine.scheduler, where, interrupted)
    engine.runner.hook = fail  # type: ignore[attr-defined]
    default = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, default)
    assert len(calls) == len(PROMPTS)
    check_empty(engine)


@pytest.mark.parametrize("end", ["finish", "fail", "interrupt"])
def test_copied_blocks_are_given_back_when_the_step_ends(end: str) -> None:
    """Both ends of a copy are held until it is done; the step that copies may be the last one for long."""
    engine = make_engine()

    def stop(plan: StepPlan) -> None:
        if plan.copies and end != "finish":
            raise RuntimeError if end == "fail" else KeyboardInterrupt

    engine.runner.hook = stop  # type: ignore[attr-defined]
    with suppress(StepFailedError, KeyboardInterrupt):
        engine.generate([1, 2], SamplingParams(n=3, max_tokens=2, ignore_eos=True), use_tqdm=False)
    check_empty(engine)


# --- requests and seeds --------------------------------------------------------------------------------------------


def test_ids() -> None:
    engine = make_engine()
    assert engine.add_request([1], GREEDY, request_id="1") == "1"
    assert [engine.add_request([1], GREEDY) for _ in range(3)] == ["0", "2", "3"]
    with pytest.raises(DuplicateRequestError, match="'1'"):
        engine.add_request([1], GREEDY, request_id="1")
    drain(engine)
    engine.add_request([1], GREEDY, request_id="1")
    with pytest.raises(UnknownRequestError, match="nobody"):
        engine.abort("nobody")
    drain(engine)
    with pytest.raises(UnknownRequestError):
        engine.abort("1")


def test_requests_without_a_seed_get_one_each_and_the_engines_seed_repeats_them() -> None:
    free = SamplingParams(max_tokens=12, ignore_eos=True)

    def sample(seed: int | None) -> list[list[int]]:
        return [out.outputs[0].token_ids for out in make_engine(seed=seed).generate([[1]] * 4, free, use_tqdm=False)]

    assert sample(7) == sample(7) != sample(8)
    assert len({tuple(line) for line in sample(7)}) == 4
    assert sample(None) != sample(None)


def test_max_tokens_zero_is_answered_without_a_step() -> None:
    engine = make_engine()
    engine.add_request([1, 2], SamplingParams(max_tokens=0, n=2))
    (output,) = engine.poll()
    assert output.finished and tokens(output) == [[], []]
    assert [s.finish_reason for s in output.outputs] == ["length", "length"]
    assert engine.generate([[1]], SamplingParams(max_tokens=0), use_tqdm=False)[0].outputs[0].text == ""
    assert [out.finished for out in engine.stream([1], SamplingParams(max_tokens=0))] == [True]
    assert engine.num_steps == 0


# --- text ----------------------------------------------------------------------------------------------------------


def test_text_leaves_out_the_token_that_stopped_it() -> None:
    engine = scripted({("a", 0): [*b"hey", 256], ("b", 0): [*b"hey!", 7]})
    engine.add_request("x", SamplingParams(), request_id="a")
    engine.add_request("x", SamplingParams(stop_token_ids=(ord("!"),)), request_id="b")
    outputs = {output.request_id: output.outputs[0] for output in drain(engine)}
    assert (outputs["a"].text, outputs["a"].token_ids) == ("hey", [*b"hey", 256])
    assert (outputs["b"].text, outputs["b"].token_ids) == ("hey", [*b"hey!"])
    assert outputs["a"].finish_reason == outputs["b"].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_that_spans_tokens(stream: bool) -> None:
    engine = scripted({("a", 0): "one 👍 two END three"})
    engine.add_request("x", SamplingParams(max_tokens=99, stop=["END", "👎"]), request_id="a", stream=stream)
    outputs = drain(engine)
    last = outputs[-1].outputs[0]
    assert last.text == "one 👍 two " and last.finish_reason == "stop"
    assert bytes(last.token_ids).decode() == "one 👍 two END", "tokens up to the one that completed it"
    assert len(outputs) == (len(last.token_ids) if stream else 1)
    assert all(last.text.startswith(output.outputs[0].text) for output in outputs)
    check_empty(engine)


def test_stop_string_completed_by_the_last_token_allowed() -> None:
    engine = scripted({("a", 0): "abEND"})
    engine.add_request("x", SamplingParams(max_tokens=5, stop="END"), request_id="a")
    (output,) = drain(engine)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ab", "stop")


def test_a_stop_string_ends_its_own_sample_only() -> None:
    engine = scripted({("a", 0): "no.", ("a", 1): "yes, and so on"})
    engine.add_request("x", SamplingParams(n=2, max_tokens=12, stop="."), request_id="a", stream=True)
    outputs = drain(engine)
    assert [(s.text, s.finish_reason) for s in outputs[-1].outputs] == [("no", "stop"), ("yes, and so ", "length")]
    assert sum(output.finished for output in outputs) == 1


def test_broken_text_at_the_end_is_shown_as_such() -> None:
    for stop in ((), "zz"):
        engine = scripted({("a", 0): [*b"ok", 0xE2, 0x82]})
        engine.add_request("x", SamplingParams(max_tokens=4, stop=stop), request_id="a")
        assert drain(engine)[0].outputs[0].text == "ok\ufffd"


def test_a_tokenizer_that_raises_costs_its_own_request_only() -> None:
    class Picky(ByteTokenizer):
        def decode(self, token_ids: list[int]) -> str:
            if 13 in token_ids:
                raise ValueError("unlucky")
            return super().decode(token_ids)

    for stop in ((), "zz"):
        engine = scripted({("a", 0): [1, 13, 2, 3], ("b", 0): [*b"fine"]})
        engine.tokenizer = Picky()
        engine.add_request("x", SamplingParams(max_tokens=4, stop=stop), request_id="a")
        engine.add_request("x", SamplingParams(max_tokens=4, stop=stop), request_id="b")
        outputs = {output.request_id: output for output in drain(engine)}
        assert outputs["b"].outputs[0].text == "fine"
        assert isinstance(outputs["a"].error, ValueError)
        check_empty(engine)


# --- streams -------------------------------------------------------------------------------------------------------


def test_stream_grows_to_what_generate_returns() -> None:
    engine = make_engine(tokenizer=ByteTokenizer())
    params = SamplingParams(seed=3, max_tokens=12, n=2)
    (whole,) = engine.generate([[1, 2, 3]], params, use_tqdm=False)
    snapshots = list(engine.stream([1, 2, 3], params))
    assert tokens(snapshots[-1]) == tokens(whole) and snapshots[-1].outputs[0].text == whole.outputs[0].text
    assert [output.finished for output in snapshots] == [False] * (len(snapshots) - 1) + [True]
    for before, after in itertools.pairwise(snapshots):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids and new.text.startswith(old.text)
            assert len(new.token_ids) - len(old.token_ids) in (0, 1)


def test_streams_side_by_side_get_every_output_of_their_own() -> None:
    engine = make_engine()
    params = SamplingParams(seed=3, max_tokens=10, ignore_eos=True)
    other = engine.add_request([4], params)
    first, second = engine.stream([1, 2], params), engine.stream([3], params)
    for _ in range(10):
        one, two = next(first), next(second)
    assert len(one.outputs[0].token_ids) == len(two.outputs[0].token_ids) == 10
    for stream in (first, second):
        with pytest.raises(StopIteration):
            next(stream)
    assert [output.request_id for output in engine.step()] == [other]


def test_a_stream_refuses_at_the_call_and_aborts_when_left() -> None:
    engine = make_engine()
    with pytest.raises(EmptyPromptError):
        engine.stream([])
    for number, _ in enumerate(engine.stream([1], SamplingParams(max_tokens=50, ignore_eos=True))):
        if number == 2:
            break
    gc.collect()
    check_empty(engine)
    with engine.stream([1], SamplingParams(max_tokens=50, ignore_eos=True)) as stream:
        next(stream)
    check_empty(engine)
    assert list(stream) == []


def test_callbacks_get_everything_in_order_and_may_call_the_engine() -> None:
    engine = make_engine()
    params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
    seen: list[tuple[str, int]] = []

    def follow(output: RequestOutput) -> None:
        seen.append((output.request_id, len(output.outputs[0].token_ids)))
        if output.request_id == "a" and len(output.outputs[0].token_ids) == 3:
            engine.abort("b")
            engine.add_request([1], params, request_id="c", stream=True, on_output=follow)

    engine.add_request([1], params, request_id="a", stream=True, on_output=follow)
    engine.add_request([2], SamplingParams(max_tokens=50, ignore_eos=True), request_id="b", on_output=follow)
    assert drain(engine) == []
    assert [n for name, n in seen if name == "a"] == [n for name, n in seen if name == "c"] == [1, 2, 3, 4, 5, 6]
    assert [n for name, n in seen if name == "b"] == [3]


def test_a_callback_that_raises_does_not_cost_others_their_outputs() -> None:
    engine = make_engine()
    seen = []

    def broken(output: RequestOutput) -> None:
        raise ZeroDivisionError

    engine.add_request([1], GREEDY, on_output=broken)
    engine.add_request([1], GREEDY, on_output=seen.append)
    with pytest.raises(ZeroDivisionError):
        drain(engine)
    assert len(seen) == 1
    check_empty(engine)


# --- failures ------------------------------------------------------------------------------------------------------


def test_a_step_that_raises_fails_its_requests_and_nothing_else() -> None:
    engine = make_engine()
    params = SamplingParams(seed=2, max_tokens=9, ignore_eos=True)
    early = [engine.add_request([i + 1] * 5, params) for i in range(2)]
    engine.step()
    late = [engine.add_request([i + 1] * 5, params) for i in range(8)]
    boom = RuntimeError("device lost")

    def fail(plan: StepPlan) -> None:
        engine.runner.hook = lambda plan: None  # type: ignore[attr-defined]
        raise boom

    engine.runner.hook = fail  # type: ignore[attr-defined]
    failed = engine.step()
    assert {output.request_id for output in failed} >= set(early)
    for output in failed:
        assert output.finished and output.outputs[0].finish_reason == "failed"
        assert isinstance(output.error, StepFailedError) and output.error.__cause__ is boom
        assert "device lost" in str(output.error)
    rest = drain(engine)
    assert len(failed) + len(rest) == 10 and {o.request_id for o in rest} < set(late)
    for output in rest:
        assert tokens(output) == expected(output, params)
    check_empty(engine)


@pytest.mark.parametrize("wrong", [[], [[1, 2]], [[]], [[1], [1]]])
def test_a_runner_that_breaks_its_contract_is_a_failed_step(wrong: list[list[int]]) -> None:
    class Wrong:
        def execute(self, plan: StepPlan) -> list[list[int]]:
            return wrong

    engine = make_engine(runner=Wrong())
    engine.add_request([1, 2], GREEDY)
    (output,) = engine.step()
    assert isinstance(output.error, StepFailedError)
    check_empty(engine)


def test_generate_and_stream_raise_when_their_step_failed() -> None:
    engine = make_engine()

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("boom")

    engine.runner.hook = fail  # type: ignore[attr-defined]
    with pytest.raises(StepFailedError, match="boom"):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    check_empty(engine)
    with pytest.raises(StepFailedError, match="boom"):
        next(engine.stream([1]))
    engine.runner.hook = lambda plan: None  # type: ignore[attr-defined]
    assert len(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == 9


def test_blocks_held_outside_are_an_error_not_a_hang() -> None:
    engine = make_engine(num_blocks=4)
    blocks = engine.scheduler.block_manager
    table = blocks.match_prefix([1])
    blocks.append_slots(table, 15)
    with pytest.raises(OutOfBlocksError, match="0 of 4"):
        engine.generate([[1, 2]], GREEDY, use_tqdm=False)
    with pytest.raises(OutOfBlocksError):
        next(engine.stream([1, 2], GREEDY))
    blocks.free(table)
    assert len(engine.generate([[1, 2]], GREEDY, use_tqdm=False)) == 1
    check_empty(engine)


def test_a_closed_engine_has_nothing_left_and_accepts_nothing() -> None:
    engine = make_engine()
    seen: list[RequestOutput] = []
    engine.add_request([1] * 9, SamplingParams(n=3, ignore_eos=True), on_output=seen.append)
    stream = engine.stream([2], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    engine.close()
    engine.close()
    check_empty(engine)
    assert [s.finish_reason for s in seen[0].outputs] == ["aborted"] * 3
    assert next(stream).outputs[0].finish_reason == "aborted"
    assert list(stream) == []
    for call in (
        engine.step,
        engine.begin_step,
        engine.advance,
        lambda: engine.add_request([1]),
        lambda: engine.abort("0"),
        lambda: engine.stream([1]),
        lambda: engine.generate([[1]], use_tqdm=False),
    ):
        with pytest.raises(EngineClosedError):
            call()
    with make_engine() as short:
        short.add_request([1])
    check_empty(short)


def test_close_in_the_middle_of_a_drivers_step() -> None:
    engine = make_engine()
    engine.add_request([1, 2])
    plan = engine.begin_step()
    assert plan is not None
    engine.close()
    check_empty(engine)
    with pytest.raises(EngineClosedError):
        engine.finish_step(plan, [[1]])


# --- threads -------------------------------------------------------------------------------------------------------


class Gate:
    """Holds the runner inside of a step until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.inside, self.open = threading.Event(), threading.Event()
        engine.runner.hook = self.hold  # type: ignore[attr-defined]

    def hold(self, plan: StepPlan) -> None:
        self.inside.set()
        assert self.open.wait(WAIT)


def test_add_and_abort_do_not_wait_for_the_step_that_runs() -> None:
    engine = make_engine()
    params = SamplingParams(seed=1, max_tokens=5, ignore_eos=True)
    seen: list[RequestOutput] = []
    engine.add_request([1, 2, 3], params, request_id="a", on_output=seen.append)
    engine.add_request([4, 5], params, request_id="b", on_output=seen.append)
    gate = Gate(engine)
    thread = threading.Thread(target=engine.step)
    thread.start()
    assert gate.inside.wait(WAIT)
    engine.abort("a")
    assert [(o.request_id, o.outputs[0].finish_reason, tokens(o)) for o in seen] == [("a", "aborted", [[]])]
    with pytest.raises(UnknownRequestError):
        engine.abort("a")
    engine.add_request([7] * 6, params, request_id="a", on_output=seen.append)  # the name is free again
    assert thread.is_alive()
    gate.open.set()
    thread.join(WAIT)
    assert len(seen) == 1 and tokens(seen[0]) == [[]], "the token sampled meanwhile is dropped"
    assert drain(engine) == []
    assert {o.request_id: tokens(o) == expected(o, params) for o in seen[1:]} == {"a": True, "b": True}
    check_empty(engine)


def test_a_name_given_again_while_its_first_owner_is_in_a_step() -> None:
    engine = scripted({("a", 0): "hello"})
    params = SamplingParams(max_tokens=5)
    first: list[RequestOutput] = []
    second: list[RequestOutput] = []
    engine.add_request("x", params, request_id="a", stream=True, on_output=first.append)
    engine.step()
    engine.step()

    def swap(plan: StepPlan) -> None:
        engine.runner.hook = lambda plan: None  # type: ignore[attr-defined]
        engine.abort("a")
        engine.add_request("x", params, request_id="a", stream=True, on_output=second.append)

    engine.runner.hook = swap  # type: ignore[attr-defined]
    drain(engine)
    assert [o.outputs[0].text for o in first] == ["h", "he", "he"] and first[-1].finished
    assert [o.outputs[0].text for o in second] == ["h", "he", "hel", "hell", "hello"]


def test_close_waits_for_the_step_that_runs() -> None:
    engine = make_engine()
    engine.add_request([1, 2, 3], SamplingParams(n=2), request_id="a")
    gate = Gate(engine)
    step = threading.Thread(target=engine.step)
    step.start()
    assert gate.inside.wait(WAIT)
    close = threading.Thread(target=engine.close)
    close.start()
    while not engine._closed:
        time.sleep(0.001)
    assert engine.scheduler.block_manager.num_free_blocks < 64, "the step still writes there"
    gate.open.set()
    for thread in (step, close):
        thread.join(WAIT)
        assert not thread.is_alive()
    check_empty(engine)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns a thousand times as often, so that races show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless")
def test_many_threads_add_abort_stream_and_generate() -> None:
    engine = make_engine(num_blocks=24)
    finals: list[RequestOutput] = []
    problems: list[BaseException] = []
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)

    def client(number: int) -> None:
        try:
            for i in range(12):
                prompt = [1 + (number * 12 + i) % (VOCAB - 1)] * (1 + i)
                if number == 0:
                    finals.extend(engine.generate([prompt, prompt], params, use_tqdm=False))
                elif number == 1:
                    finals.append(list(engine.stream(prompt, params))[-1])
                else:
                    request_id = engine.add_request(prompt, params, on_output=finals.append)
                    if i % 3 == 0:
                        with suppress(UnknownRequestError):  # it was faster
                            engine.abort(request_id)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished:
        engine.step()
    for thread in threads:
        thread.join(WAIT)
    assert not problems
    assert len(finals) == 24 + 12 + 24 and max(Counter(o.request_id for o in finals).values()) == 1
    for output in finals:
        whole = expected(output, params)[0]
        assert output.finished
        if output.outputs[0].finish_reason == "aborted":
            assert tokens(output)[0] == whole[: len(tokens(output)[0])]
        else:
            assert tokens(output)[0] == whole
    check_empty(engine)


# --- clocks --------------------------------------------------------------------------------------------------------


def test_a_driver_with_a_virtual_clock_gets_metrics_of_that_clock() -> None:
    clock = Clock()
    records: list[StepRecord] = []
    engine = make_engine(clock=clock, on_step=records.append)
    runner = FakeRunner(64, BLOCK)
    clock.now = 2.0
    engine.add_request([1] * 10, SamplingParams(seed=1, max_tokens=3, ignore_eos=True), arrival_time=1.5)
    clock.now = 3.0
    outputs = []
    while (plan := engine.begin_step()) is not None:
        clock.now += 0.5 * plan.num_tokens  # a step takes half a second per token
        engine.finish_step(plan, runner.execute(plan))
        outputs += engine.poll()
    (output,) = outputs
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.first_scheduled_time) == (1.5, 3.0)
    assert (metrics.ttft, metrics.tpot, metrics.finished_time) == (6.5, 0.5, 9.0)  # chunks of 7 and 3
    assert [(r.start, r.end, r.plan.num_prefill_tokens, r.num_running) for r in records] == [
        (3.0, 6.5, 7, 0),
        (6.5, 8.0, 3, 1),
        (8.0, 8.5, 0, 1),
        (8.5, 9.0, 0, 0),
    ]
    assert engine.num_steps == 4 and engine.num_generated_tokens == 3


def test_steps_out_of_order_are_refused() -> None:
    engine = make_engine()
    engine.add_request([1], GREEDY)
    plan = engine.begin_step()
    assert plan is not None
    with pytest.raises(IllegalTransitionError):
        engine.begin_step()
    with pytest.raises(IllegalTransitionError):
        engine.finish_step(StepPlan(plan.chunks), [[1]])
    engine.finish_step(plan, [[1]])
    with pytest.raises(IllegalTransitionError):
        engine.finish_step(plan, [[1]])


def test_an_idle_engine_takes_no_step() -> None:
    engine = make_engine()
    assert engine.step() == [] and engine.begin_step() is None and engine.num_steps == 0
