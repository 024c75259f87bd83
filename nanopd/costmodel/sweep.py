"""Which steps a profile measures. No torch: a sweep is a list of what to set up, chosen from the limits of the place.

Systematic points first, since a line through few well-placed points tells slopes apart; then random ones, half of them
held out, since a model is to be judged where it will be used: anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Setup:
    """A step to measure: ``prompts`` chunks of ``prefill_tokens`` in all, ``start`` tokens into their prompt (0: whole
    prompts), beside ``num_decodes`` sequences of ``kv_len`` tokens each."""

    kind: str
    prefill_tokens: int = 0
    start: int = 0
    prompts: int = 1
    num_decodes: int = 0
    kv_len: int = 0
    held_out: bool = False

    @property
    def per_prompt(self) -> int:
        """Tokens of each chunk."""
        return self.prefill_tokens // self.prompts

    @property
    def skipped_steps(self) -> int:
        """Chunks that lie before the one to measure; ``start`` is rounded to whole ones."""
        return max(1, self.start // self.per_prompt) if self.start else 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a place can take: sequences and prefill tokens in a step, tokens of one sequence, tokens of the pool."""

    max_num_seqs: int
    max_prefill_tokens: int
    max_model_len: int
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure. Each set-up takes ``warm_up`` steps (the first may capture a CUDA graph) and then ``steps``
    timed ones, of which the median one is kept."""

    prefill: tuple[int, ...]
    batches: tuple[int, ...]
    kv_lens: tuple[int, ...]
    mixed_batches: tuple[int, ...]
    mixed_kv_lens: tuple[int, ...]
    chunks: tuple[int, ...]
    behind: tuple[tuple[int, int], ...]  # (tokens, prefix): chunks alone whose attention counts
    random: int  # to fit to
    held_out: int
    steps: int = 3
    warm_up: int = 1

    @property
    def rounds(self) -> int:
        """Steps of each set-up."""
        return self.warm_up + self.steps


GPU = Sizes(
    prefill=(16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048),
    batches=(1, 4, 8, 16, 32, 64, 128, 256),
    kv_lens=(128, 1024, 4096, 16384),
    mixed_batches=(8, 32, 64),
    mixed_kv_lens=(1024, 8192),
    chunks=(64, 128, 256, 512, 1024),
    behind=((256, 4096), (1024, 4096), (2048, 4096), (256, 16384), (1024, 16384), (2048, 16384)),
    random=48,
    held_out=48,
)
GPU_QUICK = Sizes(
    prefill=(32, 128, 256, 512, 1024, 2048),
    batches=(1, 8, 32, 64, 128),
    kv_lens=(256, 2048, 8192),
    mixed_batches=(16, 64),
    mixed_kv_lens=(1024, 8192),
    chunks=(128, 512, 1024),
    behind=((1024, 4096), (1024, 16384)),
    random=24,
    held_out=40,
)
CPU = Sizes(
    prefill=(8, 16, 32, 64, 128, 192, 256, 384),
    batches=(1, 2, 4, 8, 12, 16),
    kv_lens=(32, 256, 768),
    mixed_batches=(2, 8),
    mixed_kv_lens=(64, 512),
    chunks=(16, 32, 64, 128),
    behind=((32, 256), (128, 256)),
    random=32,
    held_out=40,
    warm_up=0,
)
CPU_QUICK = Sizes(
    prefill=(8, 16, 32, 64, 96, 128),
    batches=(1, 2, 4, 8),
    kv_lens=(32, 128, 384),
    mixed_batches=(2, 8),
    mixed_kv_lens=(128,),
    chunks=(16, 64),
    behind=(),
    random=16,
    held_out=16,
    warm_up=0,
)


def plan_sweep(sizes: Sizes, limits: Limits, phases: Sequence[str] = PHASES, seed: int = 0) -> list[Setup]:
    """All set-ups of a profile that fit the limits, in the order of measuring (random, so that a drift of the device's
    speed blurs all alike rather than tilting a line)."""
    setups: list[Setup] = []
    if "prefill" in phases:
        setups += [Setup("prefill", n) for n in sizes.prefill]
        setups += [Setup("chunk", n, start=prefix) for n, prefix in sizes.behind]
    if "decode" in phases:
        setups += [Setup("decode", num_decodes=b, kv_len=k) for b in sizes.batches for k in sizes.kv_lens]
    if "prefill" in phases and "decode" in phases:
        for b in sizes.mixed_batches:
            for k in sizes.mixed_kv_lens:
                setups.append(Setup("decode", num_decodes=b, kv_len=k))
                setups += [Setup("mixed", c, start=4 * c, num_decodes=b, kv_len=k) for c in sizes.chunks]
    setups = [setup for setup in dict.fromkeys(setups) if fits(setup, limits, sizes.rounds)]
    rng = random.Random(seed)
    wanted = sizes.random + sizes.held_out
    drawn: list[Setup] = []
    for _ in range(50 * wanted):  # a place may be too small for most
        if len(drawn) == wanted:
            break
        setup = _draw(rng, sizes, limits, phases, held_out=len(drawn) >= sizes.random)
        if fits(setup, limits, sizes.rounds):
            drawn.append(setup)
    setups += drawn
    rng.shuffle(setups)
    return setups


def fits(setup: Setup, limits: Limits, rounds: int) -> bool:
    """Whether a place can take ``rounds`` steps of the set-up."""
    if setup.prefill_tokens and not setup.per_prompt:
        return False
    chunks = setup.skipped_steps + rounds if setup.start else 1  # of each prompt
    prompt_len = setup.per_prompt * chunks + 1
    prompts = 1 if setup.start else setup.prompts * rounds
    kv_len = setup.kv_len + setup.skipped_steps + rounds + 1
    slack = 32  # last blocks that are not full
    pool = setup.num_decodes * (kv_len + slack) + (prompts * (prompt_len + slack) if setup.prefill_tokens else 0)
    return (
        setup.num_decodes + setup.prompts <= limits.max_num_seqs
        and setup.num_decodes + setup.prefill_tokens <= limits.max_prefill_tokens
        and max(prompt_len, kv_len) < limits.max_model_len
        and pool <= limits.pool_tokens
    )


def _draw(rng: random.Random, sizes: Sizes, limits: Limits, phases: Sequence[str], held_out: bool) -> Setup:
    """A random step: sizes log-uniform over the range of the systematic points."""
    prefill = decode = False
    while not (prefill or decode):
        prefill = "prefill" in phases and rng.random() < 0.75
        decode = "decode" in phases and rng.random() < 0.8
    tokens = _log_uniform(rng, sizes.prefill[0], min(sizes.prefill[-1], limits.max_prefill_tokens)) if prefill else 0
    start, prompts = 0, 1
    if prefill and rng.random() < 0.6:
        start = _log_uniform(rng, sizes.prefill[0], 2 * sizes.kv_lens[-1] // 3)
    elif prefill and tokens >= 64 and rng.random() < 0.4:
        prompts = rng.randint(2, 4)
    batch = _log_uniform(rng, 1, min(sizes.batches[-1], limits.max_num_seqs)) if decode else 0
    kv_len = _log_uniform(rng, sizes.kv_lens[0], sizes.kv_lens[-1]) if decode else 0
    return Setup("random", tokens, start, prompts, batch, kv_len, held_out)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * (max(high, low) / low) ** rng.random())
