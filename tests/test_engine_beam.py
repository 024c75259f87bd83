"""Beam search: against exhaustive search, against a naive version without a KV cache, against transformers."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from engine_cases import hf_greedy
from model_cases import VOCAB, random_hf_model, random_tokens, save

from nanopd.engine.beam import BeamOutput, BeamSearch
from nanopd.engine.plan import StepPlan
from nanopd.engine.request import FinishReason
from nanopd.engine.runner import ModelRunner
from nanopd.errors import (
    EmptyPromptError,
    InvalidSamplingParamsError,
    NonFiniteLogitsError,
    OutOfBlocksError,
)
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.cache import KVCache
from nanopd.model import LoadedModel, load_model


class TableModel:
    """Logits that are a fixed random function of the whole sequence so far; no KV involved."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed
        self.steps = 0
        self.fail_at: int | None = None
        self.poison_at: int | None = None

    def row(self, tokens: list[int]) -> torch.Tensor:
        rng = random.Random(f"{self.seed} {tokens}")
        return torch.tensor([rng.gauss(0, 1.5) for _ in range(self.vocab)])

    def logits(self, plan: StepPlan) -> torch.Tensor:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the device fell off the bus")
        wanted = [c for c in plan.chunks if c.samplers]
        rows = [self.row(c.request.all_token_ids[: c.start + c.num_tokens]) for c in wanted]
        out = torch.stack(rows) if rows else torch.empty(0, self.vocab)
        if self.steps == self.poison_at:
            out[0, 0] = math.nan
        return out


def naive_beam_search(
    model: TableModel, prompt: list[int], width: int, max_tokens: int, penalty: float, ends: set[int]
) -> list[tuple[list[int], float]]:
    """The module's three rules on plain lists of (tokens, sum of log-probabilities)."""
    alive: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for n in range(1, max_tokens + 1):
        grown = []
        for tokens, total in alive:
            logprobs = torch.log_softmax(model.row(prompt + tokens).double(), 0).tolist()
            grown += [(tokens + [t], total + lp) for t, lp in enumerate(logprobs)]
        grown.sort(key=lambda g: -g[1])

        def is_over(tokens: list[int], n: int = n) -> bool:
            return tokens[-1] in ends or n == max_tokens

        done += [(t, s / n**penalty) for t, s in grown[:width] if is_over(t)]
        done = sorted(done, key=lambda d: -d[1])[:width]
        alive = [g for g in grown[: width * max(2, 1 + len(ends))] if not is_over(g[0])][:width]
        if not alive or (len(done) == width and alive[0][1] / n**penalty <= done[-1][1]):
            break
    return done


def check_outputs(outputs: list[BeamOutput], expected: list[tuple[list[int], float]]) -> None:
    assert [o.token_ids for o in outputs] == [tokens for tokens, _ in expected]
    assert [o.score for o in outputs] == pytest.approx([score for _, score in expected], abs=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_naive_search(seed: int) -> None:
    rng = random.Random(seed)
    vocab, width, max_tokens = rng.choice([5, 9, 30]), rng.randint(1, 5), rng.randint(1, 12)
    ends = set(rng.sample(range(vocab), rng.choice([0, 1, 1, 2])))
    penalty = rng.choice([0.0, 0.5, 1.0, 2.0, -1.0])
    model, manager = TableModel(vocab, seed), BlockManager(200, 8)
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 20))]
    search = BeamSearch(
        model, manager, width=width, max_tokens=max_tokens, length_penalty=penalty, end_token_ids=ends, chunk_size=7
    )
    expected = naive_beam_search(model, prompt, width, max_tokens, penalty, ends)
    check_outputs(search.run(prompt), expected)
    assert manager.num_free_blocks == manager.num_blocks
    manager.check_integrity([])


@pytest.mark.parametrize("seed", range(5))
def test_wide_enough_is_exhaustive(seed: int) -> None:
    """With room for every sequence, length penalty 0 and no end token, the result is the true ranking."""
    model, manager = TableModel(4, seed), BlockManager(400, 8)
    prompt, length = [1, 2, 3], 3
    ranking = []
    for tokens in itertools.product(range(4), repeat=length):
        total = 0.0
        for i, token in enumerate(tokens):
            total += torch.log_softmax(model.row([*prompt, *tokens[:i]]).double(), 0)[token].item()
        ranking.append((list(tokens), total))
    ranking.sort(key=lambda r: -r[1])
    outputs = BeamSearch(model, manager, width=64, max_tokens=length, length_penalty=0.0).run(prompt)
    check_outputs(outputs, ranking)
    assert {o.finish_reason for o in outputs} == {FinishReason.LENGTH}


# --- real models: the KV that forks share must be right ----------------------------------------------------------


def real_search(loaded: LoadedModel, num_blocks: int, block_size: int, **options) -> tuple[BeamSearch, BlockManager]:
    cache = KVCache.allocate(loaded.config, num_blocks, block_size, loaded.model.dtype, loaded.model.device)
    cache.tensor.fill_(math.nan)  # a block that was shared but should have been copied shows at once
    runner = ModelRunner(
        loaded.model,
        cache,
        loaded.model.ops,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=512,
        vocab_size=loaded.config.vocab_size,
    )
    manager = BlockManager(num_blocks, block_size)
    return BeamSearch(runner, manager, chunk_size=50, **options), manager


def hf_beams(model, prompt: list[int], width: int, max_tokens: int, penalty: float, ends: list[int]):
    """transformers' ranking: [(tokens, score)], the padding behind the end token removed."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),  # else ids equal to pad_token_id are masked
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            do_sample=False,
            length_penalty=penalty,
            early_stopping=False,
            eos_token_id=ends or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    result = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        stop = next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))
        result.append((tokens[:stop], score))
    return result


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_equals_transformers_on_random_models(case: str, tmp_path) -> None:
    hf_model = random_hf_model(case)
    loaded = load_model(str(save(hf_model, tmp_path)), device="cpu", dtype="float32")
    rng = random.Random(case)
    for trial in range(6):
        prompt = random_tokens(rng.choice([1, 7, 16, 60]), seed=trial)
        width, penalty = [1, 2, 3, 4, 5, 8][trial], rng.choice([0.0, 1.0, 1.0, 2.0])
        ends = sorted(rng.sample(range(VOCAB), [0, 1, 3, 12, 25, 2][trial]))
        search, manager = real_search(
            loaded, 120, 8, width=width, max_tokens=14, length_penalty=penalty, end_token_ids=ends
        )
        if width == 1:  # transformers takes num_beams=1 for greedy search; with one beam the two agree
            assert search.run(prompt)[0].token_ids == hf_greedy(hf_model, prompt, 14).tokens
        else:
            check_outputs(search.run(prompt), hf_beams(hf_model, prompt, width, 14, penalty, ends))
        manager.check_integrity([])
        assert manager.num_free_blocks == manager.num_blocks


def test_equals_transformers_on_smollm2(smollm2: LoadedModel, hf_smollm2) -> None:
    prompt = smollm2.tokenizer.encode("The three most important inventions of the nineteenth century were")
    ends = list(smollm2.config.eos_token_ids)
    search, manager = real_search(smollm2, 80, 16, width=4, max_tokens=20, end_token_ids=ends)
    check_outputs(search.run(prompt), hf_beams(hf_smollm2, prompt, 4, 20, 1.0, ends))
    manager.check_integrity([])


# --- blocks ------------------------------------------------------------------------------------------------------


def test_beams_share_what_they_have_in_common() -> None:
    """A prompt of 25 blocks under 8 beams takes 25 blocks and a few, not 200."""
    manager = BlockManager(300, 8)
    least = manager.num_free_blocks

    class Watching(TableModel):
        def logits(self, plan: StepPlan) -> torch.Tensor:
            nonlocal least
            least = min(least, manager.num_free_blocks)
            return super().logits(plan)

    BeamSearch(Watching(50, 0), manager, width=8, max_tokens=20).run(list(range(50)) * 4)
    assert 25 < 300 - least <= 25 + 8 * 4


def test_a_pool_too_small_raises_and_frees() -> None:
    manager = BlockManager(6, 8)
    search = BeamSearch(TableModel(30, 0), manager, width=6, max_tokens=30)
    with pytest.raises(OutOfBlocksError):
        search.run([1] * 20)
    manager.check_integrity([])
    assert manager.num_free_blocks == 6
    with pytest.raises(OutOfBlocksError):
        search.run([1] * 100)
    assert manager.num_free_blocks == 6


@pytest.mark.parametrize("fail_at", [1, 2, 3, 7])
def test_a_step_that_raises_leaves_no_block_behind(fail_at: int) -> None:
    manager = BlockManager(50, 8)
    model = TableModel(30, 0)
    model.fail_at = fail_at
    search = BeamSearch(model, manager, width=4, max_tokens=30, chunk_size=10)
    with pytest.raises(RuntimeError, match="bus"):
        search.run([1] * 19)
    manager.check_integrity([])
    assert manager.num_free_blocks == 50
    model.fail_at, model.steps = None, 0
    check_outputs(search.run([1] * 19), naive_beam_search(model, [1] * 19, 4, 30, 1.0, set()))


def test_other_sequences_in_the_pool_are_left_alone() -> None:
    manager = BlockManager(60, 8)
    table = manager.match_prefix([5] * 20)
    manager.append_slots(table, 20)
    manager.commit(table, [5] * 20)
    held = list(table.block_ids)
    BeamSearch(TableModel(30, 0), manager, width=4, max_tokens=10).run([5] * 21)  # shares two of its blocks
    assert table.block_ids == held
    manager.check_integrity([table])
    assert manager.num_free_blocks == 57


def test_nan_logits_are_an_error() -> None:
    manager = BlockManager(50, 8)
    model = TableModel(30, 0)
    model.poison_at = 3
    with pytest.raises(NonFiniteLogitsError):
        BeamSearch(model, manager, width=2, max_tokens=10).run([1, 2])
    assert manager.num_free_blocks == 50


def test_bad_arguments() -> None:
    model, manager = TableModel(5, 0), BlockManager(10, 8)
    for options in ({"width": 0, "max_tokens": 5}, {"width": 2, "max_tokens": 0}):
        with pytest.raises(InvalidSamplingParamsError, match=">= 1"):
            BeamSearch(model, manager, **options)
    with pytest.raises(EmptyPromptError):
        BeamSearch(model, manager, width=2, max_tokens=5).run([])
