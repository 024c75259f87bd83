"""The transformer on the CUDA kernels: bfloat16 against float32, and captured into a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from model_cases import Pager, embedded_or_skip, random_hf_model, random_tokens, save

from nanopd.model import LoadedModel, Transformer, load_model
from nanopd.model.weights import allocate, checkpoint_slots
from nanopd.ops import get_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Head dims that the kernels support; widths that are no power of two; grouped, shared and plain key heads.
MODELS = {
    "llama": {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 2},
    "llama-mha-tied": {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2},
    "llama-llama3": {"hidden_size": 320, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1},
    "qwen2": {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3": {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3-tied": {"hidden_size": 320, "head_dim": 96, "num_attention_heads": 5, "num_key_value_heads": 5},
}


def converted(loaded: LoadedModel, device: str, dtype: torch.dtype) -> LoadedModel:
    """The same weights on another device and in another dtype."""
    weights = allocate(loaded.config, device, dtype)
    source = checkpoint_slots(loaded.config, loaded.model.weights)
    for name, slot in checkpoint_slots(loaded.config, weights).items():
        slot.copy_(source[name])
    return LoadedModel(loaded.config, Transformer(loaded.config, weights, get_ops(device)), loaded.tokenizer)


def mixture(loaded: LoadedModel) -> torch.Tensor:
    """Whole prompts, chunks with a prefix, and decodes among them: all logits, [rows, vocab] float32."""
    pager = Pager(loaded, num_blocks=128)
    a, b, c, d = (pager.sequence(random_tokens(n, seed=n)) for n in (40, 200, 77, 300))
    steps = [
        [(a, 39), (b, 130), (d, 290)],
        [(a, 1), (b, 20), (c, 70)],
        [(b, 1), (c, 1), (d, 10)],
        [(b, 1), (c, 1)],
        [(c, 5), (b, 48)],
    ]
    return torch.cat([torch.cat(pager.step(work)) for work in steps])


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", sorted(MODELS))
def test_low_precision_logits(case, dtype, tmp_path):
    """Against float32 on the CPU with the same rounded weights. What low precision costs by itself is measured with
    the reference ops in the same dtype; the kernels, which round elsewhere, may not cost much more."""
    folder = save(random_hf_model(case, **MODELS[case]), tmp_path / "model")
    low = load_model(str(folder), device="cpu", dtype=dtype)
    want = mixture(converted(low, "cpu", torch.float32))
    reference_error = rms(mixture(low) - want)
    got = mixture(converted(low, "cuda", dtype))
    assert bool(got.isfinite().all())
    assert rms(got - want) <= 1.5 * reference_error
    assert rms(got - want) <= 0.08 * rms(want)


def test_embedded_model_agrees_wherever_float32_is_sure(request: pytest.FixtureRequest) -> None:
    """bfloat16 moves logits by some tenths; where the best token leads by more than twice that, it must win."""
    with embedded_or_skip():
        smollm2 = request.getfixturevalue("smollm2")
    text = "The heart pumps blood through the body. In 1969, two people walked on the Moon; " * 20
    tokens = smollm2.tokenizer.encode(text)[:300]
    logits = []
    for loaded in (smollm2, converted(smollm2, "cuda", torch.bfloat16)):
        pager = Pager(loaded)
        sequence = pager.sequence(tokens)
        logits.append(torch.cat([pager.step([(sequence, n)])[0] for n in (100, 150, 49, 1)]))
    want, got = logits
    tolerance = 0.75
    assert rms(got - want) < tolerance / 4
    best = want.topk(2, dim=-1)
    sure = best.values[:, 0] - best.values[:, 1] > 2 * tolerance
    assert int(sure.sum()) > 100
    assert torch.equal(got.argmax(-1)[sure], best.indices[sure, 0])


def test_decode_captured_into_a_cuda_graph():
    """Captured once for a padded batch of 4, replayed with other tokens, lengths and blocks."""
    loaded = load_model("dummy:tiny", device="cuda")
    pager = Pager(loaded)
    sequences = [pager.sequence(random_tokens(60, seed=n)) for n in range(3)]
    pager.step([(sequence, n) for sequence, n in zip(sequences, (10, 33, 17), strict=True)])

    def padded(batch):
        """A fourth, empty sequence: slot -1, context 0."""
        batch.token_ids, batch.positions = (
            torch.nn.functional.pad(t, (0, 1)) for t in (batch.token_ids, batch.positions)
        )
        batch.slot_mapping = torch.nn.functional.pad(batch.slot_mapping, (0, 1), value=-1)
        batch.context_lens = torch.nn.functional.pad(batch.context_lens, (0, 1))
        batch.block_tables = torch.nn.functional.pad(batch.block_tables, (0, 0, 0, 1))
        batch.cu_seqlens_q = torch.arange(5, dtype=torch.int32, device="cuda")
        batch.num_decodes = 4
        return batch

    static = padded(pager.batch([(sequence, 1) for sequence in sequences]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loaded.model.forward(static, pager.cache)  # warm up: compiles kernels, creates cuBLAS handles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loaded.model.forward(static, pager.cache)

    for _ in range(8):
        batch = padded(pager.batch([(sequence, 1) for sequence in sequences]))
        for name in ("token_ids", "positions", "slot_mapping", "context_lens", "block_tables"):
            getattr(static, name).copy_(getattr(batch, name))
        cache_before = pager.cache.tensor.clone()
        captured.fill_(float("nan"))
        graph.replay()
        replayed, cache_replayed = captured.clone(), pager.cache.tensor.clone()
        pager.cache.tensor.copy_(cache_before)
        eager = loaded.model.forward(batch, pager.cache)
        assert torch.equal(replayed[:3], eager[:3])
        assert torch.equal(cache_replayed.nan_to_num(), pager.cache.tensor.nan_to_num())
        for sequence in sequences:
            sequence.done += 1


def test_a_step_never_waits_for_the_device():
    loaded = load_model("dummy:tiny", device="cuda")
    pager = Pager(loaded)
    a, b = (pager.sequence(random_tokens(60, seed=n)) for n in range(2))
    pager.step([(a, 30)])
    batch = pager.batch([(a, 1), (b, 40)])
    loaded.model.forward(batch, pager.cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loaded.model.forward(batch, pager.cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_dummy_weights_are_made_on_the_gpu():
    loaded = load_model("dummy:qwen2-1.5b")
    assert loaded.model.device.type == "cuda"
    assert loaded.model.dtype is torch.bfloat16
    pager = Pager(loaded)
    (logits,) = pager.step([(pager.sequence(random_tokens(50, seed=1, vocab=151936)), 50)])
    assert bool(logits.isfinite().all())
