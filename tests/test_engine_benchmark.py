"""The engine benchmark on the CPU, in miniature, and the twin of a model that it is compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanopd.engine import LLM, SamplingParams
from nanopd.engine.benchmark import Sizes, bench_engine, prefill_flops
from nanopd.engine.benchmark_peer import decode_ms, hf_twin
from nanopd.errors import ConfigError
from nanopd.model import LoadedModel, Transformer
from nanopd.model.config import ModelConfig, RopeScaling
from nanopd.model.dummy import random_weights
from nanopd.model.presets import presets
from nanopd.ops import get_ops


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
    sizes = Sizes(decode=((1, 24), (3, 16)), prefill=48, throughput=(4, 10, 5), steps=2, max_num_batched_tokens=2048)
    result = bench_engine("dummy:tiny", "cpu", sizes=sizes, progress=False)
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
