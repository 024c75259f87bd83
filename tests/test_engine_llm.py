"""LLM and runner on the smallest model: wiring, limits, failures, and giving everything back."""

from __future__ import annotations

import math
import random

import pytest
import torch
from engine_cases import check_clean, greedy, tokens_of
from model_cases import Pager

import nanopd
from nanopd import LLM, SamplingParams
from nanopd.engine.kv_budget import CPU_BYTES, default_num_blocks
from nanopd.engine.plan import ScheduledChunk, SchedulerConfig, StepPlan
from nanopd.engine.request import Request
from nanopd.engine.runner import sampling_batch
from nanopd.engine.sampler import sample_tokens
from nanopd.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    InvalidTokenError,
    NonFiniteLogitsError,
    PromptTooLongError,
    StepFailedError,
)
from nanopd.kv.cache import block_bytes
from nanopd.model import LoadedModel


def make_llm(tiny: LoadedModel, **options) -> LLM:
    return LLM(tiny, **{"num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options})


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(1024) for _ in range(length)]


def scheduled(llm: LLM, name: str, prompt: list[int], params: SamplingParams | None = None) -> StepPlan:
    """A step that computes a whole prompt, planned by hand."""
    request = Request(name, prompt, params or greedy(8))
    request.table = llm.block_manager.match_prefix(prompt)
    llm.block_manager.append_slots(request.table, len(prompt))
    return StepPlan([ScheduledChunk(request, 0, len(prompt), (request,))])


def test_every_layer_is_within_reach(tiny: LoadedModel) -> None:
    llm = make_llm(tiny)
    assert llm.config is tiny.config
    assert llm.tokenizer is None
    assert llm.model is llm.runner.model is tiny.model
    assert llm.kv_cache is llm.runner.kv_cache
    assert llm.kv_cache.num_blocks == llm.block_manager.num_blocks == 40
    assert llm.scheduler is llm.engine.scheduler
    assert llm.scheduler.block_manager is llm.block_manager
    assert llm.engine.runner is llm.runner
    assert llm.scheduler.config.max_model_len == tiny.config.max_position_embeddings
    assert nanopd.LLM is LLM


def test_two_engines_in_one_process_do_not_meet(tiny: LoadedModel) -> None:
    one, two = make_llm(tiny), make_llm(tiny)
    ids = [one.engine.add_request(prompt_of(20), greedy(6)), two.engine.add_request(prompt_of(20), greedy(6))]
    outputs = []
    while one.engine.has_unfinished or two.engine.has_unfinished:
        outputs += [*one.engine.step(), *two.engine.step()]
    assert [output.request_id for output in outputs] == ids
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_a_second_llm_may_share_the_weights_of_the_first(tiny: LoadedModel) -> None:
    one = make_llm(tiny)
    two = make_llm(one, enable_prefix_caching=False)  # type: ignore[arg-type]
    assert two.model is one.model and two.kv_cache is not one.kv_cache
    one.close()
    with pytest.raises(EngineClosedError, match="shared is closed"):
        make_llm(one)  # type: ignore[arg-type]
    assert len(two.generate(prompt_of(20), greedy(6), use_tqdm=False)[0].outputs[0].token_ids) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 12}, "multiple of 8, got 12"),
        ({"block_size": 0}, "multiple of 8, got 0"),
        ({"max_model_len": 5000}, "5000 exceeds the 4096 positions"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"num_blocks": 0}, "num_blocks|at least 1"),
        ({"max_num_seqs": 100}, "max_num_batched_tokens"),
        ({"num_blocks": None, "gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\], got 1.5"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(tiny: LoadedModel, options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(tiny, **options)


def test_default_pool_on_the_cpu(tiny: LoadedModel) -> None:
    """Never more than every seat can use, never more than the limit."""
    few = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=100)
    assert default_num_blocks(tiny.model, 16, few) == 2 * 7
    many = SchedulerConfig(max_num_seqs=256, max_model_len=4096)
    blocks = default_num_blocks(tiny.model, 16, many)
    assert blocks <= CPU_BYTES // block_bytes(tiny.config, 16, torch.float32)
    assert blocks * 16 >= 4096


def test_close_gives_everything_back_and_is_final(tiny: LoadedModel) -> None:
    with make_llm(tiny) as llm:
        llm.engine.add_request(prompt_of(30), greedy(5))
        llm.engine.step()
    check_clean(llm)
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate([prompt_of(3)], greedy(2))
    with pytest.raises(EngineClosedError):
        llm.beam_search(prompt_of(3), 2, 2)
    assert not hasattr(llm, "kv_cache") and not hasattr(llm.runner, "kv_cache")
    assert tiny.model.weights is not None  # the caller's model is not ours to destroy


def test_text_needs_a_tokenizer(tiny: LoadedModel) -> None:
    llm = make_llm(tiny)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.generate("hello", greedy(2))
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.beam_search("hello", 2, 2)


def test_beam_search_through_the_llm(tiny: LoadedModel) -> None:
    llm = make_llm(tiny, chunk_size=16)
    llm.kv_cache.tensor.fill_(math.nan)
    prompt = prompt_of(70)
    (best, *_rest) = llm.beam_search(prompt, 4, 6, length_penalty=0.0)
    (greedy_output,) = llm.generate([prompt], greedy(6), use_tqdm=False)
    pager = Pager(tiny)
    logprobs = []
    for tokens in (best.token_ids, greedy_output.outputs[0].token_ids):
        (logits,) = pager.step([(pager.sequence(prompt + tokens), len(prompt) + 6)])
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        logprobs.append(sum(rows[i, token].item() for i, token in enumerate(tokens)))
    assert best.cumulative_logprob == best.score == pytest.approx(logprobs[0], abs=1e-4)
    assert logprobs[0] >= logprobs[1] - 1e-5
    check_clean(llm)
    with pytest.raises(InvalidSamplingParamsError, match="9 exceeds max_num_seqs, 8"):
        llm.beam_search(prompt, 9, 6)
    with pytest.raises(PromptTooLongError, match="4096"):
        llm.beam_search(prompt, 2, 4090)
    with pytest.raises(InvalidTokenError, match="1024"):
        llm.beam_search([5, 1024], 2, 2)


def test_beam_search_between_the_steps_of_running_requests(tiny: LoadedModel) -> None:
    llm = make_llm(tiny)
    (alone,) = llm.generate([prompt_of(25)], greedy(10), use_tqdm=False)
    llm.engine.add_request(prompt_of(25), greedy(10))
    outputs = llm.engine.step() + llm.engine.step()
    llm.beam_search(prompt_of(25), 5, 10)  # shares the running request's first block
    while llm.engine.has_unfinished:
        outputs += llm.engine.step()
    assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
    check_clean(llm)


# --- the runner --------------------------------------------------------------------------------------------------


def test_nan_logits_fail_the_step_and_name_the_requests(tiny: LoadedModel) -> None:
    llm = make_llm(tiny)
    good, bad = scheduled(llm, "good", prompt_of(5)), scheduled(llm, "bad", prompt_of(20))
    block = bad.chunks[0].request.table.block_ids[0]
    assert llm.runner.execute(bad)[0][0] >= 0
    llm.kv_cache.tensor[:, :, block] = math.nan
    bad.chunks[0].start, bad.chunks[0].num_tokens = 19, 1  # reads the poisoned prefix
    with pytest.raises(NonFiniteLogitsError, match=r"1 request.*: bad$"):
        llm.runner.execute(StepPlan([*good.chunks, *bad.chunks]))


def test_a_nan_in_the_model_ends_its_requests_only(tiny: LoadedModel) -> None:
    """Through the engine: the failed step's request gets a typed error, later ones run."""
    llm = make_llm(tiny, enable_prefix_caching=False)
    llm.engine.add_request(prompt_of(20), greedy(5), request_id="bad")
    assert llm.engine.step() == []
    llm.kv_cache.tensor.fill_(math.nan)
    (output,) = llm.engine.step()
    assert output.request_id == "bad"
    assert isinstance(output.error, StepFailedError)
    assert isinstance(output.error.__cause__, NonFiniteLogitsError)
    assert output.outputs[0].finish_reason == "failed"
    (after,) = llm.generate([prompt_of(20)], greedy(5), use_tqdm=False)
    assert len(after.outputs[0].token_ids) == 5
    check_clean(llm)


def test_copies_run_before_the_step_writes(tiny: LoadedModel) -> None:
    """n = 4 from a prompt that ends inside a block: every sample writes behind it, in a block of its own."""
    llm = make_llm(tiny, enable_prefix_caching=False)
    llm.kv_cache.tensor.fill_(math.nan)
    copies = []
    llm.engine.on_step = lambda record: copies.extend(record.plan.copies)
    params = SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([prompt_of(21)], params, use_tqdm=False)
    assert len(copies) == 3
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    for sample in output.outputs:  # the KV that a sample saw was its own: its tokens follow from it
        tokens = prompt_of(21) + sample.token_ids
        pager = Pager(tiny)
        (logits,) = pager.step([(pager.sequence(tokens), len(tokens))])
        request = Request("again", prompt_of(21), params, sample_index=sample.index)
        for k, token in enumerate(sample.token_ids):
            batch = sampling_batch([request], [20 + k])
            assert sample_tokens(logits, batch).item() == token
            request.append_token(token)
    check_clean(llm)


def test_several_samplers_of_one_chunk(tiny: LoadedModel) -> None:
    llm = make_llm(tiny)
    plan, silent = scheduled(llm, "a", prompt_of(9)), scheduled(llm, "b", prompt_of(10))
    (chunk,) = plan.chunks
    parent = chunk.request
    chunk.samplers = (parent, parent.spawn(1), parent.spawn(2))
    silent.chunks[0].samplers = ()
    tokens = llm.runner.execute(StepPlan([*silent.chunks, *plan.chunks]))
    assert [len(t) for t in tokens] == [0, 3]
    assert len(set(tokens[1])) == 1
    logits = llm.runner.logits(StepPlan([*silent.chunks, *plan.chunks]))
    assert logits.shape == (1, 1024)
    assert logits.argmax().item() == tokens[1][0]


def test_a_plan_without_chunks_still_copies(tiny: LoadedModel) -> None:
    llm = make_llm(tiny)
    llm.kv_cache.tensor[:, :, 3] = 7.0
    assert llm.runner.execute(StepPlan(copies=[(3, 5)])) == []
    assert bool((llm.kv_cache.tensor[:, :, 5] == 7.0).all())


def test_a_step_tells_when_each_layer_is_done(tiny: LoadedModel) -> None:
    llm = make_llm(tiny)
    plan = scheduled(llm, "a", prompt_of(9))
    layers: list[int] = []
    pending = llm.runner.launch(plan, layers.append)
    assert layers == [0, 1]
    assert pending.wait() == llm.runner.execute(plan)


def test_sampling_without_a_seed_is_a_mistake(tiny: LoadedModel) -> None:
    llm = make_llm(tiny)
    with pytest.raises(ConfigError, match="'a' is to be sampled but has no seed"):
        llm.runner.execute(scheduled(llm, "a", prompt_of(9), SamplingParams(temperature=1.0)))


def test_prompts_as_text_and_as_tokens(smollm2: LoadedModel) -> None:
    llm = LLM(smollm2, num_blocks=20, max_num_seqs=4)
    text = "The capital of France is"
    by_text, by_tokens = llm.generate([text, smollm2.tokenizer.encode(text)], greedy(4), use_tqdm=False)
    assert by_text.prompt == text
    assert by_tokens.prompt is None
    assert tokens_of([by_text]) == tokens_of([by_tokens])
    assert by_text.outputs[0].text == smollm2.tokenizer.decode(by_text.outputs[0].token_ids)
    assert by_text.outputs[0].text.startswith(" Paris")
    assert llm.beam_search(text, 2, 4)[0].text.startswith(" Paris")
    reply = llm.chat([{"role": "user", "content": "Say hello."}], greedy(4), use_tqdm=False)
    assert reply.outputs[0].text
    check_clean(llm)
