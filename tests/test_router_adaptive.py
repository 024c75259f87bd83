"""The policy for one card: which way of computing prompts is faster beside the decodes that run."""

from __future__ import annotations

import math

import pytest

from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.hardware_profile import BUSY, WHOLE
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import ConfigError, NoWorkerError
from nanopd.router.adaptive import Adaptive
from nanopd.router.decision import Path
from nanopd.router.snapshot import Snapshot, WorkerSnapshot
from nanopd.workers.worker import Role

# Round numbers: a step costs 5 ms, a prompt token 0.025 ms on the whole card and 0.05 in its partition, a token of KV
# 30 µs per 1,000 for whoever reads it.
WHOLE_CARD = StepTimeModel(base_ms=5.0, token_ms=0.025, kv_token_ms=30e-6)
PREFILL_PART = StepTimeModel(base_ms=5.0, token_ms=0.05)
DECODE_PART = StepTimeModel(base_ms=6.0, kv_token_ms=40e-6)
MODELS = {WHOLE: WHOLE_CARD, "sm=68" + BUSY: PREFILL_PART, "sm=64" + BUSY: DECODE_PART}


def worker(name: str, role: Role, **load: int) -> WorkerSnapshot:
    fields = {"num_waiting": 0, "waiting_tokens": 0, "num_running": 0, "running_tokens": 0, **load}
    return WorkerSnapshot(
        name,
        role,
        "sm=68" if role is Role.PREFILL else "sm=64",
        free_blocks=10_000,
        total_blocks=10_000,
        block_size=16,
        free_seats=200,
        step_started=None,
        takes_prompts=role is Role.DECODE,
        **fields,
    )


def snapshot(
    decodes: int = 0, context: int = 0, *, waiting: int = 0, apart: int = 0, cached: int = 0, alone: bool = False
) -> Snapshot:
    decode = worker(
        "d0",
        Role.DECODE,
        num_running=decodes,
        running_tokens=decodes * context,
        waiting_tokens=waiting,
        cached_tokens=cached,
    )
    workers = (decode,) if alone else (worker("p0", Role.PREFILL, waiting_tokens=apart), decode)
    return Snapshot(0.0, workers, 0, 0, 0, 0, 147_456, None)


def request(tokens: int = 1024) -> Request:
    return Request("r", [1] * tokens, SamplingParams(max_tokens=64))


def policy(tpot_ms: float = 40.0, **options: float) -> Adaptive:
    return Adaptive(MODELS, tpot_ms, chunk_size=512, **options)  # type: ignore[arg-type]


def by_hand(decodes: int, context: int, tokens: int, tpot_ms: float) -> Path:
    """The rule in plain arithmetic, without caches and queues."""
    kv, steps = decodes * context, math.ceil(tokens / 512)
    mixed = steps * (5.0 + 30e-6 * kv + 0.025 * decodes) + 0.025 * tokens
    partition = 5.0 + (0.05 if decodes else 0.025) * tokens
    tpots = {Path.COLLOCATED: mixed / steps, Path.DISAGGREGATED: 6.0 + 40e-6 * kv if decodes else 0.0}
    rates = {Path.COLLOCATED: tokens / mixed, Path.DISAGGREGATED: tokens / partition}
    kept = [path for path in tpots if tpots[path] <= tpot_ms]
    return max(kept, key=lambda path: rates[path]) if kept else min(tpots, key=lambda path: tpots[path])


@pytest.mark.parametrize("tpot_ms", [15.0, 25.0, 60.0])
@pytest.mark.parametrize("tokens", [100, 512, 2048])
@pytest.mark.parametrize(("decodes", "context"), [(0, 0), (4, 500), (16, 1000), (64, 8000), (32, 24_000)])
def test_it_is_the_rule_done_by_hand(decodes: int, context: int, tokens: int, tpot_ms: float) -> None:
    found = policy(tpot_ms).decide(request(tokens), snapshot(decodes, context))
    assert found.path is by_hand(decodes, context, tokens, tpot_ms), found.reason
    assert found.collocated is not None and found.disaggregated is not None


def test_the_modes_are_the_step_times() -> None:
    chunks, partitions = policy().modes(request(1024), snapshot(64, 8000))
    running = StepFeatures.decode(64, 64 * 8000)
    assert chunks.tpot_ms == pytest.approx(WHOLE_CARD.step_ms(running.with_chunk(512)))
    assert partitions.tpot_ms == pytest.approx(DECODE_PART.step_ms(running))
    assert partitions.tokens_per_ms == pytest.approx(1024 / PREFILL_PART.step_ms(StepFeatures().with_chunk(1024)))


def test_light_kv_takes_chunks_and_heavy_kv_partitions() -> None:
    assert policy().decide(request(), snapshot(8, 500)).path is Path.COLLOCATED
    assert policy().decide(request(), snapshot(64, 8000)).path is Path.DISAGGREGATED


def test_a_way_that_breaks_the_objective_is_not_taken() -> None:
    heavy = snapshot(16, 10_000)  # chunks would be faster: 18.0 ms a step of 512 tokens
    assert policy(40.0).decide(request(), heavy).path is Path.COLLOCATED
    found = policy(15.0).decide(request(), heavy)
    assert found.path is Path.DISAGGREGATED and "ms a token" in found.reason
    assert policy(1.0).decide(request(), heavy).path is Path.DISAGGREGATED  # both break it, this one less


def test_what_is_cached_needs_no_prefill() -> None:
    """Only the rest of the prompt counts; a short rest fills no chunk, and chunks have their fixed cost each."""
    long = request(8192 + 100)
    chunks, partitions = policy().modes(long, snapshot(8, 500, cached=8192))
    assert chunks.tokens_per_ms == pytest.approx(100 / WHOLE_CARD.step_ms(StepFeatures.decode(8, 4000).with_chunk(100)))
    assert partitions.tokens_per_ms == pytest.approx(100 / PREFILL_PART.step_ms(StepFeatures().with_chunk(100)))
    policy().modes(request(16), snapshot(8, 500, cached=16))  # all of it: the last token is computed all the same


def test_a_queue_is_left_only_for_a_clear_gain() -> None:
    """14.5 tokens/ms against 18: worth leaving with the default margin, not with one of a half."""
    state = {"decodes": 64, "context": 8000}
    chunks, partitions = policy().modes(request(), snapshot(**state))
    assert 1.1 < partitions.tokens_per_ms / chunks.tokens_per_ms < 1.5
    waits = snapshot(**state, waiting=4000)
    assert policy(margin=0.1).decide(request(), waits).path is Path.DISAGGREGATED
    assert policy(margin=0.5).decide(request(), waits).path is Path.COLLOCATED
    assert policy(margin=0.5).decide(request(), snapshot(**state, waiting=10, apart=4000)).path is Path.DISAGGREGATED


def test_without_a_prefill_worker_there_is_no_choice() -> None:
    assert policy().decide(request(), snapshot(64, 8000, alone=True)).path is Path.COLLOCATED
    with pytest.raises(NoWorkerError):
        policy().decide(request(200_000), snapshot())


def test_bad_arguments_are_named() -> None:
    for options in ({"tpot_ms": 0.0}, {"tpot_ms": math.nan}, {"chunk_size": 0}, {"margin": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Adaptive(MODELS, **{"tpot_ms": 30.0, "chunk_size": 512, **options})
    with pytest.raises(ConfigError, match="sm=68 beside"):
        Adaptive({WHOLE: WHOLE_CARD}, 30.0, chunk_size=512).decide(request(), snapshot(4, 100))
