"""The whole engine against transformers: whatever the path, the tokens are the same.

Paths: chunk sizes, prefix cache on and off (and hit), a pool so small that requests are preempted, alone and among
others. Everything in float32 on the CPU. The KV pool starts as NaN, so a slot that is read before it is written shows.

Sums of float32 depend on the order of the additions, and so on the batch. Where the two best logits are a hair apart
the tokens may then differ without anything being wrong. These tests do not make allowance for that: they require that
no such near tie occurs in transformers' own logits (``test_no_near_ties``), and then demand equal tokens everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from engine_cases import PROMPTS, Answer, check_clean, greedy, hf_greedy, make_prompts, run_staggered, tokens_of
from model_cases import VOCAB, random_hf_model, random_tokens, save
from test_engine_sampler import oracle_distribution, oracle_token

from nanopd import LLM, SamplingParams
from nanopd.engine.uniforms import uniforms
from nanopd.model import LoadedModel, load_model

NUM_TOKENS = 10
NEAR_TIE = 1e-3  # logits; the two implementations differ by less than 2e-4 (test_model_transformer)
CHUNKS = [16, 64, 256, None]


@pytest.fixture(scope="session")
def prompts(smollm2: LoadedModel) -> list[list[int]]:
    return make_prompts(smollm2.tokenizer)


@pytest.fixture(scope="session")
def answers(hf_smollm2, prompts: list[list[int]]) -> list[Answer]:
    return [hf_greedy(hf_smollm2, prompt, NUM_TOKENS) for prompt in prompts]


def make_llm(loaded: LoadedModel, **options) -> LLM:
    defaults = {"num_blocks": 300, "max_num_seqs": 16, "max_num_batched_tokens": 4096}
    llm = LLM(loaded, **{**defaults, **options})
    llm.kv_cache.tensor.fill_(math.nan)
    return llm


def check_tokens(got: Sequence[Sequence[int]], answers: Sequence[Answer]) -> None:
    wrong = [i for i, (tokens, answer) in enumerate(zip(got, answers, strict=True)) if list(tokens) != answer.tokens]
    assert not wrong, [(PROMPTS[i], got[i], answers[i].tokens) for i in wrong]


def test_no_near_ties(answers: list[Answer]) -> None:
    assert min(answer.margin for answer in answers) > NEAR_TIE, [a.margin for a in answers]
    assert len({tuple(answer.tokens) for answer in answers}) > 15  # and the answers tell the prompts apart


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_mixed_batch_of_16(smollm2, prompts, answers, chunk_size, prefix_cache) -> None:
    llm = make_llm(smollm2, chunk_size=chunk_size, enable_prefix_caching=prefix_cache)
    mixed, most_running = 0, 0

    def watch(record) -> None:
        nonlocal mixed, most_running
        mixed += 0 < record.plan.num_decodes < len(record.plan.chunks)
        most_running = max(most_running, len(record.plan.chunks))

    llm.engine.on_step = watch
    order = random.Random(7).sample(range(len(prompts)), len(prompts))  # the long ones somewhere in the middle
    outputs = run_staggered(llm, [prompts[i] for i in order], [greedy(NUM_TOKENS)] * len(order))
    check_tokens([t[0] for t in tokens_of(outputs)], [answers[i] for i in order])
    check_clean(llm)
    assert mixed >= 5
    if chunk_size in (256, None):
        assert most_running >= (16 if chunk_size is None else 12)
    if prefix_cache:  # once more, now with the prompts' blocks in the cache, all at once
        outputs = llm.generate([prompts[i] for i in order], greedy(NUM_TOKENS), use_tqdm=False)
        check_tokens([t[0] for t in tokens_of(outputs)], [answers[i] for i in order])
        cached = [output.metrics.num_cached_tokens for output in outputs]
        assert cached == [(len(prompts[i]) - 1) // 16 * 16 for i in order]
        check_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_sixteen_decode_while_chunks_are_small(smollm2, prompts, answers, chunk_size) -> None:
    """In the test above, prompts cut this small trickle in more slowly than others finish. Here they are short."""
    most_decodes = 0

    def watch(record) -> None:
        nonlocal most_decodes
        most_decodes = max(most_decodes, record.plan.num_decodes)

    llm = make_llm(smollm2, chunk_size=chunk_size, enable_prefix_caching=False, on_step=watch)
    short = [i for i, (_, length) in enumerate(PROMPTS) if length <= 5] * 4
    outputs = llm.generate([prompts[i] for i in short], greedy(NUM_TOKENS), use_tqdm=False)
    check_tokens([t[0] for t in tokens_of(outputs)], [answers[i] for i in short])
    assert len(short) == most_decodes == 16
    check_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_size", "prefix_cache"), [(c, p) for c in CHUNKS for p in (False, True)])
def test_preemption(smollm2, prompts, answers, chunk_size, prefix_cache) -> None:
    """A pool of 15 blocks for 17 prompts that want 93: requests are thrown out and computed again."""
    chosen = [i for i, (_, length) in enumerate(PROMPTS) if length <= 100]
    llm = make_llm(smollm2, num_blocks=15, block_size=8, chunk_size=chunk_size, enable_prefix_caching=prefix_cache)
    outputs = run_staggered(llm, [prompts[i] for i in chosen], [greedy(NUM_TOKENS)] * len(chosen))
    check_tokens([t[0] for t in tokens_of(outputs)], [answers[i] for i in chosen])
    assert sum(output.metrics.num_preemptions for output in outputs) >= 3
    check_clean(llm)


# --- sampling ----------------------------------------------------------------------------------------------------

SAMPLING = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=20, seed=2, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.9, seed=3, max_tokens=10, ignore_eos=True, n=3),
    SamplingParams(temperature=0.6, top_k=50, top_p=0.95, seed=2**64 - 1, max_tokens=10, ignore_eos=True, n=2),
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, n=2),
    SamplingParams(temperature=5.0, seed=6, max_tokens=10, ignore_eos=True),
]


@pytest.fixture(scope="module")
def sampled(smollm2: LoadedModel, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts, and what the engine samples for each when it runs alone and whole: [request][sample][token]."""
    chosen = [prompts[i] for i in (4, 7, 10, 11, 13, 14)]
    llm = make_llm(smollm2, num_blocks=100, enable_prefix_caching=False)
    outputs = [llm.generate([p], s, use_tqdm=False)[0] for p, s in zip(chosen, SAMPLING, strict=True)]
    check_clean(llm)
    return chosen, tokens_of(outputs)


@pytest.mark.slow
def test_sampled_tokens_follow_from_transformers_logits(hf_smollm2, sampled) -> None:
    """The k-th token of sample i is transformers' inverse CDF, in float64, at uniform(seed, i, k)."""
    chosen, tokens = sampled
    for prompt, params, samples in zip(chosen, SAMPLING, tokens, strict=True):
        assert len(samples) == params.n
        for index, sample in enumerate(samples):
            with torch.no_grad():
                logits = hf_smollm2(torch.tensor([prompt + sample])).logits[0, len(prompt) - 1 : -1].numpy()
            for k, token in enumerate(sample):
                if params.temperature == 0:
                    assert token == logits[k].argmax()
                    continue
                p = oracle_distribution(logits[k], params.temperature, params.top_k, params.top_p)
                u = uniforms([params.seed], [index], [k])[0]
                expected, distance = oracle_token(p, u)
                assert distance > 1e-7, "u lies on the border of two tokens: choose another seed"
                assert token == expected, (params, index, k)
    assert tokens[4][0] == tokens[4][1]  # greedy samples are equal
    assert len({tuple(t) for t in tokens[2]}) == 3  # others are not


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 16},
        {"chunk_size": 7, "enable_prefix_caching": False},
        {"num_blocks": 11, "block_size": 8},
        {"num_blocks": 12, "block_size": 8, "chunk_size": 16, "enable_prefix_caching": False},
        {"block_size": 8, "num_blocks": 200, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_sampled_tokens_do_not_depend_on_the_path(smollm2, sampled, options) -> None:
    chosen, tokens = sampled
    llm = make_llm(smollm2, **{"num_blocks": 100, **options})
    outputs = run_staggered(llm, chosen, SAMPLING, per_step=2)
    assert tokens_of(outputs) == tokens
    if options.get("num_blocks", 100) < 20:
        assert sum(output.metrics.num_preemptions for output in outputs) >= 3
    check_clean(llm)


def test_unseeded_requests_differ_and_a_seeded_engine_repeats(smollm2, prompts) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

    def run(seed: int | None) -> list[list[list[int]]]:
        llm = make_llm(smollm2, num_blocks=50, seed=seed)
        return tokens_of(llm.generate([prompts[4]] * 3, params, use_tqdm=False))

    first, again, other = run(1), run(1), run(None)
    assert first == again
    assert len({tuple(t[0]) for t in [*first, *other]}) == 6


# --- other architectures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama-llama3", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied"])
def test_random_small_models(case: str, tmp_path) -> None:
    hf_model = random_hf_model(case)
    loaded = load_model(str(save(hf_model, tmp_path)), device="cpu", dtype="float32")
    prompts = [random_tokens(n, seed=n) for n in (1, 3, 8, 16, 33, 100, 257)]
    answers = [hf_greedy(hf_model, prompt, 20) for prompt in prompts]
    assert min(answer.margin for answer in answers) > NEAR_TIE
    for options in (
        {},
        {"chunk_size": 16, "block_size": 8},
        {"num_blocks": 20, "enable_prefix_caching": False},
        {"chunk_size": 5, "num_blocks": 19},
    ):
        llm = make_llm(loaded, **{"num_blocks": 100, **options})
        outputs = run_staggered(llm, prompts, [greedy(20)] * len(prompts))
        assert [t[0] for t in tokens_of(outputs)] == [answer.tokens for answer in answers], options
        check_clean(llm)


def test_end_token_and_length(tmp_path) -> None:
    """EOS as the first token, in the middle, and never; the model's own EOS ids are used."""
    hf_model = random_hf_model("qwen3")
    prompt = random_tokens(10, seed=1)
    tokens = hf_greedy(hf_model, prompt, 12).tokens
    for stop_at in (0, 5):
        hf_model.config.eos_token_id = [tokens[stop_at], VOCAB - 1]
        hf_model.generation_config.eos_token_id = hf_model.config.eos_token_id
        folder = save(hf_model, tmp_path / str(stop_at))
        llm = make_llm(load_model(str(folder), device="cpu"), num_blocks=10, max_model_len=64)
        first = tokens.index(tokens[stop_at])
        params = SamplingParams(temperature=0, max_tokens=12)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].token_ids == tokens[: first + 1]
        assert output.outputs[0].finish_reason == "stop"
        (output,) = llm.generate([prompt], greedy(12), use_tqdm=False)
        assert output.outputs[0].token_ids == tokens
        assert output.outputs[0].finish_reason == "length"
        check_clean(llm)
