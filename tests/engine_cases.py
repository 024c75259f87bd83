"""Helpers of the engine's end-to-end tests: prompts, transformers' answers, and ways to run them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanopd import LLM, RequestOutput, SamplingParams

TEXTS = {
    "english": "In the beginning the engineers believed that a faster processor would make the program faster. Then "
    "they measured how long it waited for memory, and they learned to count bytes before they counted operations. ",
    "chinese": "预填充受算力限制，而解码受显存带宽限制。把两个阶段放在不同的地方，它们就不会互相等待。",
    "russian": "Память быстрее всего тогда, когда её читают подряд, и медленнее всего, когда по слову. ",
    "arabic": "الذاكرة أبطأ من المعالج، ولذلك ننتظر البيانات أكثر مما ننتظر الحساب. ",
    "emoji": "Ship it 🚀🚀 — naïve café, Ångström & co: ½ + ¼ = ¾ … “quoted” 🇩🇪👩‍🔬\t\n\n",
    "code": "def attend(q, k, v):\n    scores = [dot(q, x) / sqrt(len(q)) for x in k]\n"
    "    weights = [exp(s - max(scores)) for s in scores]\n"
    "    return sum(w * x for w, x in zip(weights, v)) / sum(weights)\n\n",
    "repeated": "again and again and ",
    "numbers": '3.14159 26535 89793 23846; 0x7fff, 1e-9, [1, 2, 3], {"a": null}\n',
}

# (name of the text, or "random" for random ids, or "chat"; length in tokens). 1 to 2,000 tokens, around block borders.
PROMPTS = [
    ("english", 1),
    ("random", 1),
    ("chinese", 2),
    ("random", 5),
    ("code", 9),
    ("numbers", 15),
    ("russian", 16),
    ("english", 17),
    ("arabic", 24),
    ("repeated", 31),
    ("chat", 32),
    ("emoji", 33),
    ("random", 40),
    ("chinese", 48),
    ("english", 64),
    ("repeated", 65),
    ("code", 100),
    ("random", 150),
    ("numbers", 400),
    ("english", 2000),
]


def make_prompts(tokenizer: Any) -> list[list[int]]:
    """PROMPTS as token ids of the embedded model."""
    rng = random.Random(2024)
    chat = [{"role": "user", "content": "Explain in one sentence why the sky is blue, please."}]
    prompts = []
    for name, length in PROMPTS:
        if name == "random":
            tokens = [rng.randrange(100, 49_000) for _ in range(length)]
        elif name == "chat":
            tokens = tokenizer.encode(tokenizer.apply_chat_template(chat))[-length:]
        else:
            tokens = tokenizer.encode(TEXTS[name] * (1 + length // 3))[:length]
        assert len(tokens) == length, (name, len(tokens))
        prompts.append(tokens)
    return prompts


@dataclass
class Answer:
    """What transformers says to a prompt."""

    tokens: list[int]
    margin: float  # smallest distance between the best and the second logit at any of its steps


def hf_greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> Answer:
    """transformers' greedy continuation, past any end-of-sequence token."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),  # else ids equal to pad_token_id are masked
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack(out.logits)[:, 0].float().topk(2, dim=-1).values
    return Answer(out.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).min().item())


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def run_staggered(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], per_step: int = 3
) -> list[RequestOutput]:
    """Add a few requests before each step, so that steps mix decodes with chunks of several prompts."""
    ids: list[str] = []
    outputs: dict[str, RequestOutput] = {}
    todo = list(zip(prompts, params, strict=True))
    while todo or llm.engine.has_unfinished:
        for prompt, p in todo[:per_step]:
            ids.append(llm.engine.add_request(list(prompt), p))
        todo = todo[per_step:]
        for output in llm.engine.step():
            outputs[output.request_id] = output
    return [outputs[i] for i in ids]


def check_clean(llm: LLM) -> None:
    """Every block is back in the pool."""
    llm.block_manager.check_integrity([])
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """[request][sample][token]"""
    for output in outputs:
        assert output.finished
        assert output.error is None, output.error
    return [[sample.token_ids for sample in output.outputs] for output in outputs]
