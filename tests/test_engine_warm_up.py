"""What a runner computes before it serves: prompts as long as a step may be, and no longer than all limits allow."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import check_clean, greedy
from torch.utils._python_dispatch import TorchDispatchMode

from nanopd import LLM, SamplingParams
from nanopd.engine.warm_up import product_lengths, prompt_lengths, sample_every_way
from nanopd.model import LoadedModel, load_model


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("dummy:tiny", device="cpu", dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_num_batched_tokens": 64}, 64),
        ({"max_num_batched_tokens": 64, "max_model_len": 37}, 37),
        ({"max_num_batched_tokens": 64, "num_blocks": 3}, 48),
        ({"max_num_batched_tokens": 5000, "num_blocks": 5000, "max_model_len": 4096}, 4096),  # all positions there are
    ],
    ids=str,
)
def test_length_and_what_it_leaves_behind(
    tiny: LoadedModel, options: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(
        tiny, **{"num_blocks": 40, "max_num_seqs": 4, "use_tqdm": False, "enable_prefix_caching": False, **options}
    )
    before = llm.generate([[5] * 20], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
    seen = []
    forward = llm.model.forward
    monkeypatch.setattr(llm.model, "forward", lambda batch, *rest: (seen.append(batch), forward(batch, *rest))[1])
    linear, products = llm.model.ops.linear, set()
    monkeypatch.setattr(
        llm.model.ops, "linear", lambda x, w, *a, **k: (products.add((*x.shape, len(w))), linear(x, w, *a, **k))[1]
    )
    llm.kv_cache.tensor.fill_(float("nan"))
    llm.runner.warm_up()
    config = llm.config
    widths = [
        (config.hidden_size, config.q_size + 2 * config.kv_size),
        (config.q_size, config.hidden_size),
        (config.hidden_size, 2 * config.intermediate_size),
        (config.intermediate_size, config.hidden_size),
    ]
    assert {(n, *width) for n in product_lengths(expected) for width in widths} <= products
    whole = seen[0]
    assert whole.positions.tolist() == whole.slot_mapping.tolist() == list(range(expected))
    lengths = [batch.max_seqlen_q for batch in seen]
    assert lengths == sorted(lengths, reverse=True) and {16, 32, expected} <= set(lengths)
    assert all(longer <= 2 * shorter for longer, shorter in itertools.pairwise(lengths) if shorter > 1)
    assert lengths[-1] == 1
    for batch in seen:  # the end of a prompt of that length, or of the longest one
        length, context = batch.token_ids.shape[0], int(batch.context_lens[0])
        assert batch.max_seqlen_q == length and context in (length, expected)
        assert batch.positions.tolist() == batch.slot_mapping.tolist() == list(range(context - length, context))
        assert batch.block_tables.shape[1] == -(-context // 16), "as wide as a step makes it: attention goes by that"
    assert {int(batch.context_lens[0]) for batch in seen if batch.max_seqlen_q == 16} == {16, expected}
    used = -(-expected // 16)  # what it wrote would look like somebody's tokens
    assert not llm.kv_cache.tensor[:, :, :used].any() and llm.kv_cache.tensor[:, :, used + 1 :].isnan().all()
    after = llm.generate([[5] * 20], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
    assert after == before
    check_clean(llm)


@pytest.mark.parametrize("most", [1, 7, 15, 16, 17, 24, 31, 32, 100, 2048, 8209])
def test_lengths(most: int) -> None:
    *lengths, one = prompt_lengths(most) if most > 1 else [1, *prompt_lengths(most)]
    assert lengths[0] == most and lengths[-1] == min(most, 16) and len(set(lengths)) == len(lengths) and one == 1
    assert all(shorter < longer <= 1.5 * shorter for longer, shorter in itertools.pairwise(lengths))


@pytest.mark.parametrize("most", [1, 7, 8, 9, 100, 300, 2048, 8209])
def test_lengths_of_products(most: int) -> None:
    lengths = product_lengths(most)
    assert lengths[-1] == most and lengths[0] == min(8, most) and len(set(lengths)) == len(lengths) < 60
    assert all(0 < longer - shorter <= max(8, shorter / 8) for shorter, longer in itertools.pairwise(lengths))


NO_KERNELS = ("aten.view", "aten.slice", "aten.select", "aten.unbind", "aten.detach")


class Operations(TorchDispatchMode):
    """Which operations torch carries out, on what types, and for one row, for some or for many: by these it picks its
    kernels, which on a GPU are loaded at their first use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if tensors and not str(func).startswith(NO_KERNELS):
            rows = max(x.shape[0] if x.dim() else 1 for x in tensors)
            self.seen.add((str(func), *(x.dtype for x in tensors), (rows > 1) + (rows > 16)))
        return func(*args, **(kwargs or {}))


def test_sampling_uses_nothing_that_the_warm_up_did_not_use(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny, num_blocks=40, max_num_seqs=8, use_tqdm=False)
    with Operations() as warm, torch.inference_mode():
        sample_every_way(torch.zeros(1, llm.config.vocab_size, dtype=llm.model.dtype))
    served, sample = Operations(), llm.runner._sample

    def watched(*args: Any) -> torch.Tensor:
        with served:
            return sample(*args)

    monkeypatch.setattr(llm.runner, "_sample", watched)
    ways = [
        greedy(4),
        SamplingParams(temperature=0.7, max_tokens=4, seed=1),
        SamplingParams(temperature=1.0, top_k=3, max_tokens=4, seed=2),
        SamplingParams(temperature=1.0, top_p=0.6, max_tokens=4, seed=3, n=2),
    ]
    twice = [greedy(4), SamplingParams(temperature=1.0, max_tokens=4, seed=5)]
    twice[0] = replace(twice[0], n=2)
    for some in (ways[:1], ways[1:2], ways[2:3], ways, ways[1:2] * 2, ways[2:3] * 3, twice, ways[1:3] * 4):
        llm.generate([[3, 4, 5]] * len(some), some, use_tqdm=False)
        assert served.seen - warm.seen == set(), some
    assert any(name == "aten.cumsum.default" and rows == 1 for name, *_, rows in served.seen)


def test_blocks_are_copied_once(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernel is needed when a sequence first writes to a block that it shares, which may be much later."""
    llm = LLM(tiny, num_blocks=40, use_tqdm=False)
    copied = []
    monkeypatch.setattr(llm.runner.ops, "copy_blocks", lambda *args: copied.append(args[1:]))
    llm.runner.warm_up()
    assert [(src.tolist(), dst.tolist()) for src, dst in copied] == [([0], [0])]
