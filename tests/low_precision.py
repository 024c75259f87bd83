"""A low-precision model and its float32 oracle, for tests on the GPU.

The oracle is the same model with the same (rounded) weights in float32, on the reference ops. Low precision moves
logits, so tokens are compared where the oracle is sure: its best logit leads by more than twice the error that was
measured on the very same tokens. Where it is not, the engine's token must still be within that error of the best.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from model_cases import Pager, random_hf_model, save

from nanopd.model import LoadedModel, Transformer, load_model
from nanopd.model.weights import allocate, checkpoint_slots
from nanopd.ops.reference import ReferenceOps

VOCAB = 1000
MODELS = {  # head dims and widths that the kernels support, grouped and plain key heads
    "llama": {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3": {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
}
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 100, 129, 200, 300, 5, 31]


@dataclass
class Pair:
    """A low-precision model on the GPU, and the float32 oracle with the same weights."""

    low: LoadedModel
    oracle: LoadedModel
    prompts: list[list[int]]

    def check(self, outputs: Sequence, prompts: Sequence[Sequence[int]], least_sure: float = 0.1) -> None:
        """Every token of every sample against the oracle, given the tokens before it.

        ``least_sure``: with PyTorch's own bfloat16 on a CPU, the oracle is sure of 0.2 to 0.9 of the tokens of these
        random models, by architecture and length; the others are still held to the error.
        """
        sure = total = 0
        for output, prompt in zip(outputs, prompts, strict=True):
            assert output.error is None, output.error
            for sample in output.outputs:
                tokens = torch.tensor(sample.token_ids)
                want, got = (self.logits(m, [*prompt, *sample.token_ids], len(prompt)) for m in (self.oracle, self.low))
                error = (want - got).abs().max()
                assert error < 0.15 * want.abs().max(), "low precision costs too much to compare anything"
                best = want.topk(2, dim=-1).values
                is_sure = best[:, 0] - best[:, 1] > 2 * error
                assert torch.equal(tokens[is_sure], want.argmax(-1)[is_sure]), (len(prompt), sample.index)
                assert bool((want.gather(1, tokens[:, None])[:, 0] > best[:, 0] - 2 * error).all())
                sure, total = sure + int(is_sure.sum()), total + len(tokens)
        assert sure > least_sure * total, f"the oracle was sure of {sure} in {total} tokens only"

    @staticmethod
    def logits(loaded: LoadedModel, tokens: list[int], prompt_len: int) -> torch.Tensor:
        """[outputs, vocab] float32: what the model says before each of the output tokens, in one pass."""
        pager = Pager(loaded, num_blocks=-(-len(tokens) // 16) + 1)
        with torch.inference_mode():
            (rows,) = pager.step([(pager.sequence(tokens), len(tokens))])
        return rows[prompt_len - 1 : -1]


def as_oracle(low: LoadedModel) -> LoadedModel:
    weights = allocate(low.config, "cuda", torch.float32)
    source = checkpoint_slots(low.config, low.model.weights)
    for name, slot in checkpoint_slots(low.config, weights).items():
        slot.copy_(source[name])
    return LoadedModel(low.config, Transformer(low.config, weights, ReferenceOps()), low.tokenizer)


def make_pair(name: str, folder: Path) -> Pair:
    """Random weights of the architecture ``name``, saved in ``folder`` and loaded in bfloat16."""
    save(random_hf_model(name, vocab_size=VOCAB, **MODELS[name]), folder)
    low = load_model(str(folder), device="cuda", dtype="bfloat16")
    rng = random.Random(name)
    return Pair(low, as_oracle(low), [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS])
