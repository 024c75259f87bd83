"""Helpers of the model tests: random transformers models, and paged steps written out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from nanopd.errors import ModelLoadError
from nanopd.kv.cache import KVCache
from nanopd.model.batch import ForwardBatch
from nanopd.model.loader import LoadedModel

VOCAB = 101

# name -> (transformers config class, what differs from the common sizes). Grouped and plain attention, one shared key
# head, head_dim apart from hidden_size / num_heads, odd sizes, tied and untied, every rope type.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-mha-tied": ("LlamaConfig", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 64, "num_key_value_heads": 1}),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0}},
    ),
    "llama-llama3": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 3}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True, "num_key_value_heads": 3}),
}


def random_hf_model(case: str, **overrides: Any) -> Any:
    """A transformers model with random weights, large enough that every part shows in the logits."""
    import transformers

    class_name, differs = CASES[case]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    config = getattr(transformers, class_name)(**{**sizes, **differs, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(len(case))
    matrix_deviation = 2.0 * config.hidden_size**-0.5  # keeps attention from being one-hot at any width
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2, generator=generator)
            else:
                parameter.normal_(0.0, matrix_deviation, generator=generator)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a transformers model as config.json and safetensors."""
    model.save_pretrained(folder, **options)
    return folder


def hf_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[n, vocab] float32: the oracle's logits after each token of a whole prompt."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


@contextmanager
def embedded_or_skip() -> Iterator[None]:
    """For tests on a machine that may lack the embedded model: loading it in here skips them then."""
    try:
        yield
    except ModelLoadError as error:
        pytest.skip(f"the embedded model is not there: {error}")


@dataclass
class Sequence:
    """One sequence in the cache: its tokens, its physical blocks, how many tokens are computed."""

    tokens: list[int]
    blocks: list[int]
    done: int = field(default=0)


class Pager:
    """A poisoned KV cache and shuffled block tables, without the block manager (which has tests of its own)."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 64, block_size: int = 16) -> None:
        self.loaded = loaded
        model = loaded.model
        self.cache = KVCache.allocate(loaded.config, num_blocks, block_size, model.dtype, model.device)
        self.cache.tensor.fill_(float("nan"))  # whoever reads an unwritten slot gives itself away
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def sequence(self, tokens: list[int]) -> Sequence:
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // self.cache.block_size))]
        return Sequence(tokens, blocks)

    def batch(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        """Next ``n`` tokens of each sequence; leading ones of one token count as decodes. Logits of every row."""
        num_decodes = 0
        while num_decodes < len(work) and work[num_decodes][1] == 1 and work[num_decodes][0].done > 0:
            num_decodes += 1
        size, device = self.cache.block_size, self.loaded.model.device
        tokens, positions, slots, bounds = [], [], [], [0]
        for sequence, n in work:
            span = range(sequence.done, sequence.done + n)
            tokens += sequence.tokens[span.start : span.stop]
            positions += span
            slots += [sequence.blocks[p // size] * size + p % size for p in span]
            bounds.append(bounds[-1] + n)
        width = max(len(sequence.blocks) for sequence, _ in work)
        tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in work]

        def tensor(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return ForwardBatch(
            token_ids=tensor(tokens),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            cu_seqlens_q=tensor(bounds, torch.int32),
            context_lens=tensor([sequence.done + n for sequence, n in work], torch.int32),
            block_tables=tensor(tables, torch.int32),
            logits_rows=tensor(range(len(tokens))),
            num_decodes=num_decodes,
            max_seqlen_q=max((n for _, n in work[num_decodes:]), default=0),
        )

    def step(self, work: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Run it: logits [n, vocab] in float32 on the CPU for each entry."""
        logits = self.loaded.model.forward(self.batch(work), self.cache).float().cpu()
        for sequence, n in work:
            sequence.done += n
        return list(logits.split([n for _, n in work]))


def random_tokens(n: int, seed: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
