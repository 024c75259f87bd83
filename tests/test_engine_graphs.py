"""DecodeGraphs without a GPU: a "graph" that, replayed, runs the captured step again on the captured tensors.

That is what a CUDA graph does, so everything but CUDA itself is put to the test: static inputs and outputs, padding,
rounding up, and steps that must not be replayed.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from engine_cases import check_clean, greedy, run_staggered, tokens_of

from nanopd import LLM, SamplingParams
from nanopd.engine.cuda_graphs import DecodeGraphs, capture_sizes
from nanopd.errors import ConfigError
from nanopd.model import LoadedModel


class GraphsOnTheCpu(DecodeGraphs):
    """Records the step's tensors as a CUDA graph records their addresses."""

    replays: int = 0

    def capture(self, size: int) -> None:
        batch = self._padding_batch(size)
        self._step(batch, size)
        self._graphs[size] = SimpleNamespace(replay=lambda: self._step(batch, size))  # type: ignore[assignment]

    def replay(self, size: int) -> None:
        self.replays += 1
        super().replay(size)


def make_llm(tiny: LoadedModel, sizes: list[int] | None, **options) -> tuple[LLM, GraphsOnTheCpu]:
    llm = LLM(tiny, **{"num_blocks": 80, "max_num_seqs": 12, "max_num_batched_tokens": 128, **options})
    graphs = GraphsOnTheCpu(
        llm.model.forward, llm.kv_cache, llm.runner.packer, vocab_size=llm.config.vocab_size, sizes=sizes
    )
    llm.runner.graphs = graphs
    llm.kv_cache.tensor.fill_(math.nan)
    return llm, graphs


def random_prompts(n: int) -> list[list[int]]:
    rng = random.Random(n)
    return [[rng.randrange(1024) for _ in range(rng.randint(1, 70))] for _ in range(n)]


MIXTURE = [
    greedy(12),
    SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True, n=3),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2, max_tokens=20, ignore_eos=True),
    greedy(25),
    SamplingParams(temperature=0.0, max_tokens=15, n=2),
]


@pytest.mark.parametrize("sizes", [None, [1, 3, 8], [2]], ids=str)
@pytest.mark.parametrize("all_greedy", [True, False])
def test_same_tokens_as_eager(tiny: LoadedModel, sizes, all_greedy: bool) -> None:
    """Batches of all sizes come by; those beyond the largest graph run eagerly."""
    prompts = random_prompts(20)
    params = [greedy(15 + i) if all_greedy else MIXTURE[i % 5] for i in range(20)]
    eager = LLM(tiny, num_blocks=80, max_num_seqs=12, max_num_batched_tokens=128)
    want = tokens_of(run_staggered(eager, prompts, params))
    llm, graphs = make_llm(tiny, sizes)
    steps = []
    llm.engine.on_step = lambda record: steps.append(record.plan)
    assert tokens_of(run_staggered(llm, prompts, params)) == want
    check_clean(llm)
    pure = [len(p.chunks) for p in steps if p.num_decodes == len(p.chunks)]
    assert graphs.replays == sum(n <= graphs.sizes[-1] for n in pure) >= 5
    assert any(n not in graphs.sizes for n in pure)  # some were padded


def test_padding_touches_nothing(tiny: LoadedModel) -> None:
    """Capturing, and a step of 3 padded to 8, change the cache in three slots and nowhere else."""
    llm, graphs = make_llm(tiny, [8], enable_prefix_caching=False)
    llm.kv_cache.tensor.fill_(0.5)
    for prompt in random_prompts(3):
        llm.engine.add_request(prompt, greedy(8))
    llm.engine.step()
    before = llm.kv_cache.tensor.clone()
    graphs.capture(8)
    assert torch.equal(llm.kv_cache.tensor, before)
    slots = {
        (r.table.block_ids[r.num_computed_tokens // 16], r.num_computed_tokens % 16) for r in llm.scheduler.running
    }
    llm.engine.step()
    assert graphs.replays == 1
    changed = (llm.kv_cache.tensor != before).any(dim=(0, 1, 4, 5))
    assert {tuple(where) for where in changed.nonzero().tolist()} == slots


def test_logits_are_copies_of_the_wanted_rows(tiny: LoadedModel) -> None:
    """Somebody may keep them, while the graph's own buffer changes with the next step."""
    llm, graphs = make_llm(tiny, None)
    for prompt in random_prompts(3):
        llm.engine.add_request(prompt, greedy(8))
    llm.engine.step()
    plan = llm.engine.begin_step()
    assert plan is not None and plan.num_decodes == len(plan.chunks) == 3
    tokens = llm.runner.execute(plan)
    silent = plan.chunks[1]
    silent.samplers, request = (), silent.samplers
    logits = llm.runner.logits(plan)
    assert logits.argmax(-1).tolist() == [tokens[0][0], tokens[2][0]]
    assert llm.runner.execute(plan) == [tokens[0], [], tokens[2]]
    kept = logits.clone()
    for chunk in plan.chunks:
        chunk.start -= 1  # another step: other logits
    assert not torch.equal(llm.runner.logits(plan), kept)
    assert torch.equal(logits, kept)
    assert graphs.replays == 4
    silent.samplers = request
    llm.engine.close()


def test_beam_search(tiny: LoadedModel) -> None:
    llm, graphs = make_llm(tiny, None)
    prompt = random_prompts(5)[4]
    plain = LLM(tiny, num_blocks=80, max_num_seqs=12, max_num_batched_tokens=128).beam_search(prompt, 5, 10)
    outputs = llm.beam_search(prompt, 5, 10)
    assert graphs.replays > 5
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    check_clean(llm)


def test_a_step_with_a_layer_hook_is_not_replayed(tiny: LoadedModel) -> None:
    llm, graphs = make_llm(tiny, None)
    llm.engine.add_request(random_prompts(1)[0], greedy(8))
    llm.engine.step()
    plan = llm.engine.begin_step()
    layers: list[int] = []
    llm.engine.finish_step(plan, llm.runner.launch(plan, layers.append).wait())
    assert layers == [0, 1] and graphs.replays == 0
    llm.engine.close()


def test_sizes(tiny: LoadedModel) -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(5) == [1, 2, 4, 5]
    assert capture_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert capture_sizes(256)[-3:] == [240, 248, 256]
    _, graphs = make_llm(tiny, [1, 3, 8])
    assert [graphs.size_for(n) for n in (1, 2, 3, 4, 8, 9)] == [1, 3, 3, 8, 8, None]
    assert graphs.missing == [8, 3, 1]
    for sizes in ([0, 4], [4, 13]):
        with pytest.raises(ConfigError, match=r"must be in \[1, 12\]"):
            make_llm(tiny, sizes)
