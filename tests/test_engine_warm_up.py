"""The prompt that a runner computes before it serves: as long as a step may be, and no longer than all limits allow."""

from __future__ import annotations

import pytest
import torch
from engine_cases import check_clean, greedy

from nanopd import LLM
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
    llm.kv_cache.tensor.fill_(float("nan"))
    llm.runner.warm_up()
    (batch,) = seen
    assert batch.token_ids.shape[0] == batch.max_seqlen_q == int(batch.context_lens[0]) == expected
    assert batch.positions.tolist() == batch.slot_mapping.tolist() == list(range(expected))
    assert batch.block_tables.shape[1] * 16 >= expected
    after = llm.generate([[5] * 20], greedy(8), use_tqdm=False)[0].outputs[0].token_ids
    assert after == before
    check_clean(llm)
