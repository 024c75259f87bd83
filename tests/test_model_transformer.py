"""The transformer against transformers: random small models of every family, and the embedded model."""

from __future__ import annotations

import pytest
import torch
from model_cases import CASES, Pager, hf_logits, random_hf_model, random_tokens

from nanopd.model.config import ModelConfig
from nanopd.model.loader import LoadedModel
from nanopd.model.rope import cos_sin_table
from nanopd.model.transformer import Transformer
from nanopd.model.weights import allocate, checkpoint_slots
from nanopd.ops.reference import ReferenceOps

TOLERANCE = 2e-4  # absolute; the logits reach 10


def ours(hf_model) -> LoadedModel:
    """The same weights in our transformer, without a detour through files."""
    config = ModelConfig.from_hf({"architectures": [type(hf_model).__name__], **hf_model.config.to_diff_dict()}, "case")
    weights = allocate(config, "cpu", torch.float32)
    state = hf_model.state_dict()
    for name, slot in checkpoint_slots(config, weights).items():
        slot.copy_(state[name])
    return LoadedModel(config, Transformer(config, weights, ReferenceOps()), None)


@pytest.fixture(scope="module", params=sorted(CASES))
def pair(request):
    hf_model = random_hf_model(request.param)
    return ours(hf_model), hf_model


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_parameters_are_counted_as_transformers_counts_them(pair):
    loaded, hf_model = pair
    assert loaded.config.num_parameters == hf_model.num_parameters()


def test_whole_prompt(pair):
    loaded, hf_model = pair
    tokens = random_tokens(133, seed=1)
    want = hf_logits(hf_model, tokens)
    assert want.abs().max() > 1  # an oracle that says nothing would agree with anything
    pager = Pager(loaded)
    (got,) = pager.step([(pager.sequence(tokens), len(tokens))])
    assert_close(got, want)


def test_chunks_attend_to_earlier_chunks(pair):
    loaded, hf_model = pair
    tokens = random_tokens(133, seed=2)
    pager = Pager(loaded, block_size=8)
    sequence = pager.sequence(tokens)
    chunks = [pager.step([(sequence, n)])[0] for n in (1, 7, 40, 1, 64, 20)]
    assert_close(torch.cat(chunks), hf_logits(hf_model, tokens))


def test_decode_steps(pair):
    loaded, hf_model = pair
    tokens = random_tokens(40, seed=3)
    pager = Pager(loaded)
    sequence = pager.sequence(tokens)
    rows = [pager.step([(sequence, 30)])[0]]
    for _ in range(10):
        assert pager.batch([(sequence, 1)]).num_decodes == 1
        rows += pager.step([(sequence, 1)])
    assert_close(torch.cat(rows), hf_logits(hf_model, tokens))


def test_ragged_mixture_of_decodes_and_chunks(pair):
    """Decodes, first chunks, and chunks with a prefix in one step, blocks of all sequences interleaved."""
    loaded, hf_model = pair
    pager = Pager(loaded, block_size=8)
    lengths = [5, 64, 33, 17, 90, 1]
    prompts = [random_tokens(n, seed=n) for n in lengths]
    a, b, c, d, e, f = (pager.sequence(prompt) for prompt in prompts)
    parts: dict[int, list[torch.Tensor]] = {i: [] for i in range(6)}
    steps = [
        [(a, 4), (b, 63), (e, 11)],
        [(a, 1), (b, 1), (c, 20), (e, 40)],
        [(d, 17), (e, 1), (c, 9), (f, 1)],
        [(c, 1), (e, 38)],
        [(c, 3)],
    ]
    order = [a, b, c, d, e, f]
    for work in steps:
        for (sequence, _), logits in zip(work, pager.step(work), strict=True):
            parts[order.index(sequence)].append(logits)
    for i, prompt in enumerate(prompts):
        assert_close(torch.cat(parts[i]), hf_logits(hf_model, prompt))


def test_only_wanted_rows_are_projected(tiny):
    pager = Pager(tiny)
    tokens = random_tokens(30, seed=4)
    batch = pager.batch([(pager.sequence(tokens), 30)])
    everything = tiny.model.forward(batch, pager.cache)
    batch.logits_rows = torch.tensor([29, 3])
    got = tiny.model.forward(batch, pager.cache)
    torch.testing.assert_close(got, everything[[29, 3]], rtol=0, atol=1e-5)  # other shapes sum in another order
    batch.logits_rows = torch.tensor([], dtype=torch.int64)
    assert tiny.model.forward(batch, pager.cache).shape == (0, tiny.config.vocab_size)


def test_padding_tokens_change_nothing(tiny):
    """What CUDA graphs do: a decode batch rounded up with slot -1 and context 0."""
    pager = Pager(tiny)
    sequence = pager.sequence(random_tokens(21, seed=5))
    pager.step([(sequence, 20)])
    batch = pager.batch([(sequence, 1)])
    before = pager.cache.tensor.clone()
    want = tiny.model.forward(batch, pager.cache)
    after = pager.cache.tensor.clone()
    pager.cache.tensor.copy_(before)

    def padded(values: torch.Tensor, fill: int) -> torch.Tensor:
        extra = values.new_full((3, *values.shape[1:]), fill)
        return torch.cat([values, extra])

    batch.token_ids, batch.positions = padded(batch.token_ids, 0), padded(batch.positions, 0)
    batch.slot_mapping, batch.context_lens = padded(batch.slot_mapping, -1), padded(batch.context_lens, 0)
    batch.block_tables, batch.num_decodes = padded(batch.block_tables, 0), 4
    batch.cu_seqlens_q = torch.arange(5, dtype=torch.int32)
    got = tiny.model.forward(batch, pager.cache)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(pager.cache.tensor, after, rtol=0, atol=1e-5, equal_nan=True)


def test_a_layer_has_stored_its_keys_and_values_when_it_reports(tiny):
    pager = Pager(tiny)
    sequence = pager.sequence(random_tokens(16, seed=6))
    seen = []

    def after_layer(i: int) -> None:
        written = ~pager.cache.tensor[:, :, sequence.blocks[0]].isnan().flatten(1).any(dim=1)
        seen.append((i, written.tolist()))

    tiny.model.forward(pager.batch([(sequence, 16)]), pager.cache, after_layer)
    assert seen == [(0, [True, False]), (1, [True, True])]


def test_slots_cover_every_weight_once(tiny):
    config = tiny.config
    weights = allocate(config, "cpu", torch.float32)
    slots = checkpoint_slots(config, weights)
    assert sum(slot.numel() for slot in slots.values()) == config.num_parameters
    for slot in slots.values():
        slot.fill_(0.0)
    for slot in slots.values():
        slot.add_(1.0)
    tensors = [weights.embedding, weights.final_norm]
    for layer in weights.layers:
        tensors += [t for t in vars(layer).values() if t is not None]
    assert all(bool((t == 1).all()) for t in tensors)
    assert weights.lm_head is weights.embedding


def test_llama31_frequencies_over_the_whole_range():
    """The real Llama 3.1 parameters, at positions that a small model's logits would never reach."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf_config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope
    )
    config = ModelConfig.from_hf({**hf_config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    table = cos_sin_table(config, "cpu")
    assert table.shape == (131072, 128)
    positions = torch.tensor([0, 1, 100, 8191, 8192, 50_000, 131_071])
    cos, sin = LlamaRotaryEmbedding(hf_config)(torch.zeros(1, dtype=torch.float32), positions[None])
    # A float32 angle of 131,071 rad is known to 0.008.
    torch.testing.assert_close(table[positions, :64], cos[0, :, :64], rtol=0, atol=1e-2)
    torch.testing.assert_close(table[positions, 64:], sin[0, :, :64], rtol=0, atol=1e-2)
    torch.testing.assert_close(table[:8192:97, :64], _cos(hf_config, torch.arange(0, 8192, 97)), rtol=0, atol=1e-3)


def _cos(hf_config, positions):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(hf_config)(torch.zeros(1), positions[None])[0][0, :, :64]


@pytest.fixture(scope="module")
def hf_smollm2():
    """transformers' model of the same folder; test_model_embedded proves that folder equal to the GGUF file."""
    import transformers

    from nanopd.model.embedded import embedded_model

    return transformers.AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32)


@pytest.mark.parametrize("chunk", [16, 100, 300])
def test_embedded_model_logits(smollm2, hf_smollm2, chunk):
    text = "The heart pumps blood through the body. In 1969, two people walked on the Moon; déjà vu! " * 14
    tokens = smollm2.tokenizer.encode(text)[:300]
    assert len(tokens) == 300
    pager = Pager(smollm2)
    sequence = pager.sequence(tokens)
    parts = []
    while sequence.done < 300:
        parts += pager.step([(sequence, min(chunk, 300 - sequence.done))])
    assert_close(torch.cat(parts), hf_logits(hf_smollm2, tokens))


def test_embedded_model_continues_greedily_as_transformers_does(smollm2, hf_smollm2):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = smollm2.tokenizer.encode(smollm2.tokenizer.apply_chat_template(chat))
    want = hf_smollm2.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False)[0, len(tokens) :].tolist()
    pager = Pager(smollm2)
    sequence = pager.sequence(tokens + [0] * 16)
    got: list[int] = []
    (logits,) = pager.step([(sequence, len(tokens))])
    while len(got) < len(want):
        got.append(int(logits[-1].argmax()))
        sequence.tokens[len(tokens) + len(got) - 1] = got[-1]
        (logits,) = pager.step([(sequence, 1)])
    assert got == want
    assert got[-1] in smollm2.config.eos_token_ids
    assert smollm2.tokenizer.decode(got) == "The capital of France is Paris."
