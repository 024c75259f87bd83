"""The engine benchmark on the CPU, in miniature, and the twin of a model that it is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanopd.engine import LLM, SamplingParams
from nanopd.engine import benchmark as engine_benchmark
from nanopd.engine.benchmark import CPU_SIZES, GPU_SIZES, Sizes, bench_engine, prefill_flops
from nanopd.engine.benchmark_peer import decode_ms, hf_twin
from nanopd.errors import ConfigError
from nanopd.model import LoadedModel, Transformer
from nanopd.model.config import ModelConfig, RopeScaling
from nanopd.model.dummy import random_weights
from nanopd.model.presets import presets
from nanopd.ops import get_ops

SMALL = Sizes(decode=((1, 24), (3, 16)), prefill=48, throughput=(4, 10, 5), steps=2, max_num_batched_tokens=2048)


def small(architecture: str, **changes: object) -> ModelConfig:
    config = replace(
        presets()["tiny"],
        architecture=architecture,
        vocab_size=300,
        num_layers=2,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def loaded(config: ModelConfig) -> LoadedModel:
    weights = random_weights(config, "cpu", torch.float32)
    for layer in weights.layers:  # large enough for attention and positions to matter
        layer.qkv.mul_(8.0)
    return LoadedModel(config, Transformer(config, weights, get_ops("cpu")), None)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_twin_computes_the_same_from_the_same_memory(architecture: str, tied: bool) -> None:
    model = loaded(small(architecture, tie_word_embeddings=tied))
    twin = hf_twin(model.model)
    assert twin.lm_head.weight.data_ptr() == model.model.weights.lm_head.data_ptr()
    assert twin.model.layers[1].mlp.up_proj.weight.untyped_storage().data_ptr() == (
        model.model.weights.layers[1].gate_up.untyped_storage().data_ptr()
    )
    prompt = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with LLM(model, num_blocks=16, max_model_len=128, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (ours,) = llm.generate([prompt], params, use_tqdm=False)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            tokens.append(int(twin(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert ours.outputs[0].token_ids == tokens[40:]


def test_scaled_positions_have_no_twin() -> None:
    scaling = RopeScaling("linear", 8.0)
    with pytest.raises(ConfigError, match="scales its positions"):
        hf_twin(loaded(small("llama", rope_scaling=scaling)).model)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decode_loop_of_the_twin(cache: str) -> None:
    twin = hf_twin(loaded(small("qwen3")).model)
    seen = []
    forward = twin.forward

    def spy(*args: object, **kwargs: object) -> object:
        seen.append(kwargs["input_ids"].shape)  # type: ignore[attr-defined]
        return forward(*args, **kwargs)

    twin.forward = spy
    assert decode_ms(twin, 3, 20, 4, cache) > 0  # type: ignore[arg-type]
    assert seen == [(3, 20)] + [(3, 1)] * 5


def test_operations_of_a_prompt() -> None:
    """Counted one matrix, one query, one key at a time."""
    config = small("llama", num_layers=1)
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    matrices = (
        hidden * (config.q_size + 2 * config.kv_size) + config.q_size * hidden + 3 * hidden * config.intermediate_size
    )
    linear = sum(2 * matrices for _ in range(5)) + 2 * hidden * config.vocab_size
    attention = sum(2 * 2 * heads * dim for query in range(5) for key in range(query + 1))
    assert prefill_flops(config, 5) == (linear, attention)


def test_every_row_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench_engine("dummy:tiny", "cpu", sizes=SMALL, progress=False)
    for name in ("b1_kv24", "b3_kv16"):
        case = result["decode"][name]
        assert case["of_floor"] == pytest.approx(case["step_ms"] / case["floor_ms"])
        best = min(case["transformers_ms"].values())
        assert case["of_transformers"] == pytest.approx(best / case["beside_transformers_ms"])
    assert result["decode"]["b3_kv16"]["kv_gb"] == pytest.approx(2 * result["decode"]["b1_kv24"]["kv_gb"])
    assert result["prefill"]["p48"]["step_ms"] > 0
    done = result["throughput"]
    assert done["output_tokens_per_s"] == pytest.approx(20 / done["seconds"])
    assert done["of_floor"] == pytest.approx(done["floor_seconds"] / done["seconds"])
    assert "memory" not in result and set(result["host"]) == {"b1", "b32", "b256"}


@pytest.mark.parametrize(
    ("positions", "sizes"),
    [(291, None), (257, None), (47, replace(SMALL, decode=((1, 24),))), (48, SMALL), (14, replace(SMALL, prefill=1))],
    ids=["decode", "short", "decode-only", "prefill", "throughput"],
)
def test_a_model_with_too_few_positions_is_refused_before_anything_is_measured(
    positions: int, sizes: Sizes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(small("llama", max_position_embeddings=positions))
    monkeypatch.setattr(engine_benchmark, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(engine_benchmark, "measure_ceilings", lambda *_: pytest.fail("measured first"))
    with pytest.raises(ConfigError, match=rf"has {positions} positions, .* needs \d+"):
        bench_engine("m", "cpu", sizes=sizes)


def test_a_model_with_just_enough_positions_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (CPU_SIZES.longest, GPU_SIZES.longest) == (256 + 2 * 8 + 20, 4096 + 2 * 40 + 20)
    sizes = replace(SMALL, decode=((2, 30),), steps=9)
    model = loaded(small("llama", max_position_embeddings=30 + 2 * 9 + 20))
    monkeypatch.setattr(engine_benchmark, "load_model", lambda *_, **__: model)
    assert bench_engine("m", "cpu", sizes=replace(sizes, prefill=37), peer=False, progress=False)["decode"]["b2_kv30"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be an int >= 2, got 0"),
        ({"steps": 1}, "steps must be an int >= 2, got 1"),
        ({"decode": ()}, "decode must hold at least one"),
        ({"decode": ((1, 8), (0, 8))}, r"decode\[1\] must be an int >= 1, got 0"),
        ({"decode": ((1, 0),)}, r"decode\[0\] must be an int >= 1, got 0"),
        ({"decode": ((True, 8),)}, r"decode\[0\] must be an int >= 1, got True"),
        ({"prefill": 0}, "prefill must be an int >= 1, got 0"),
        ({"prefill": 2.5}, "prefill must be an int >= 1, got 2.5"),
        ({"prefill": 4096}, r"prefill \(4096\) is one step: at most max_num_batched_tokens \(2048\)"),
        ({"throughput": (4, 0, 5)}, "throughput must be an int >= 1, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be an int >= 1, got 0"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **change)
