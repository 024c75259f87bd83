"""InputPacker against a token-by-token oracle, while tables grow, fork, copy on write, and are freed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nanopd.engine.inputs import InputPacker
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import ScheduledChunk, StepPlan
from nanopd.errors import ConfigError
from nanopd.kv.block_manager import BlockManager
from nanopd.model.batch import ForwardBatch

BLOCK_SIZE = 8


def make_packer(max_num_seqs: int = 8, max_num_tokens: int = 128, max_blocks: int = 40) -> InputPacker:
    return InputPacker(
        block_size=BLOCK_SIZE,
        max_blocks=max_blocks,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        device=torch.device("cpu"),
    )


def check_batch(batch: ForwardBatch, plan: StepPlan) -> None:
    """Every field, one token at a time, straight from the definition in ForwardBatch."""
    token_ids, positions, slots, rows, starts = [], [], [], [], [0]
    for s, chunk in enumerate(plan.chunks):
        request = chunk.request
        assert request.table is not None
        for p in range(chunk.start, chunk.start + chunk.num_tokens):
            token_ids.append((request.prompt_token_ids + request.output_token_ids)[p])
            positions.append(p)
            slots.append(request.table.block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
        starts.append(len(token_ids))
        if chunk.samplers:
            rows.append(len(token_ids) - 1)
        context = chunk.start + chunk.num_tokens
        assert batch.context_lens[s] == context
        blocks = -(-context // BLOCK_SIZE)
        assert batch.block_tables[s, :blocks].tolist() == request.table.block_ids[:blocks]
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.cu_seqlens_q.tolist() == starts
    assert batch.logits_rows.tolist() == rows
    assert batch.num_seqs == len(plan.chunks)
    assert batch.num_decodes == plan.num_decodes
    assert batch.max_seqlen_q == max((c.num_tokens for c in plan.chunks[plan.num_decodes :]), default=0)
    for name in ("token_ids", "positions", "slot_mapping", "logits_rows"):
        assert getattr(batch, name).dtype == torch.int64
    for name in ("cu_seqlens_q", "context_lens", "block_tables"):
        assert getattr(batch, name).dtype == torch.int32
        assert getattr(batch, name).data_ptr() % 16 == 0


def new_request(name: str, length: int, rng: random.Random) -> Request:
    return Request(name, [rng.randrange(1000) for _ in range(length)], SamplingParams(max_tokens=200))


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed: int) -> None:
    """Admissions, chunks, decodes, forks, frees at random, in random order; few rows, so that rows are recycled."""
    rng = random.Random(seed)
    manager = BlockManager(200, BLOCK_SIZE, enable_prefix_caching=seed % 2 == 0)
    packer = make_packer(max_num_seqs=4)
    live: list[Request] = []
    forks = 0
    for step in range(150):
        while len(live) < 7 and rng.random() < 0.5:
            live.append(new_request(f"{step}-{len(live)}", rng.choice([1, 7, 8, 9, 30, 60]), rng))
            live[-1].table = manager.match_prefix(live[-1].prompt_token_ids)
            live[-1].num_computed_tokens = live[-1].table.num_tokens
        rng.shuffle(live)
        decodes, prefills = [], []
        budget = 100
        manager.copies_done()
        for request in live[: rng.randint(1, 4)]:
            left = request.remaining_prefill
            n = 1 if left == 1 else rng.randint(1, min(left, budget))
            budget -= n
            manager.append_slots(request.table, n)
            samplers = (request,) if n == left else ()
            chunk = ScheduledChunk(request, request.num_computed_tokens, n, samplers)
            (decodes if n == 1 and request.output_token_ids else prefills).append(chunk)
        plan = StepPlan([*decodes, *prefills], len(decodes))
        check_batch(packer.pack(plan), plan)
        for chunk in plan.chunks:
            request = chunk.request
            manager.commit(request.table, request.all_token_ids[chunk.start : chunk.start + chunk.num_tokens])
            request.num_computed_tokens += chunk.num_tokens
            for sampler in chunk.samplers:
                sampler.append_token(rng.randrange(1000))
                if rng.random() < 0.2 and len(live) < 9:  # a second sequence with the same blocks
                    twin = Request(f"twin{step}", sampler.prompt_token_ids, sampler.params)
                    for token in sampler.output_token_ids:
                        twin.append_token(token)
                    twin.table = manager.fork(sampler.table)
                    twin.num_computed_tokens = sampler.num_computed_tokens
                    live.append(twin)
                    forks += 1
        for request in [r for r in live if r.num_tokens > 250 or rng.random() < 0.05]:
            manager.free(request.table)
            live.remove(request)
    assert forks > 5


def decode_plan(manager: BlockManager, lengths: list[int]) -> StepPlan:
    rng = random.Random(0)
    chunks = []
    for i, length in enumerate(lengths):
        request = new_request(str(i), length, rng)
        request.table = manager.match_prefix(request.prompt_token_ids)
        manager.append_slots(request.table, length)
        manager.commit(request.table, request.prompt_token_ids)
        request.append_token(i)
        manager.append_slots(request.table, 1)
        chunks.append(ScheduledChunk(request, length, 1, (request,)))
    return StepPlan(chunks, len(chunks))


def test_padding_rows_compute_nothing() -> None:
    packer = make_packer()
    packer._host[:] = 0xAB  # whatever an earlier, larger step left behind
    plan = decode_plan(BlockManager(100, BLOCK_SIZE), [5, 17, 40])
    layout = packer.pack_decodes(plan, 8)
    got = {name: layout.tensor(packer.device_buffer, name) for name in layout.shapes}
    real = ForwardBatch(
        token_ids=got["token_ids"][:3],
        positions=got["positions"][:3],
        slot_mapping=got["slot_mapping"][:3],
        cu_seqlens_q=got["cu_seqlens_q"][:4],
        context_lens=got["context_lens"][:3],
        block_tables=got["block_tables"][:3],
        logits_rows=got["logits_rows"][:3],
        num_decodes=3,
        max_seqlen_q=0,
    )
    check_batch(real, plan)
    assert got["slot_mapping"][3:].tolist() == [-1] * 5
    assert got["context_lens"][3:].tolist() == [0] * 5
    assert got["token_ids"][3:].tolist() == got["positions"][3:].tolist() == [0] * 5
    assert got["cu_seqlens_q"].tolist() == list(range(9))
    assert got["logits_rows"].tolist() == list(range(8))
    assert not got["block_tables"][3:].any()


def test_only_what_changed_of_a_table_is_written() -> None:
    """A poisoned prefix of the row survives a step: the packer did not write it again."""
    manager = BlockManager(100, BLOCK_SIZE)
    packer = make_packer()
    plan = decode_plan(manager, [BLOCK_SIZE * 6 - 1])
    packer.pack(plan)
    packer.table_rows.rows[0, :3] = 99
    request = plan.chunks[0].request
    manager.commit(request.table, [0])
    request.append_token(1)
    manager.append_slots(request.table, 1)
    plan.chunks[0].start += 1
    tables = packer.pack(plan).block_tables[0]
    assert tables.tolist() == [99, 99, 99, *request.table.block_ids[3:]]


def test_a_step_beyond_the_limits_is_refused() -> None:
    manager = BlockManager(200, BLOCK_SIZE)
    plan = decode_plan(manager, [3] * 5)
    with pytest.raises(ConfigError, match="5 sequences"):
        make_packer(max_num_seqs=4).pack(plan)
    plan.chunks[0].request.table = None
    with pytest.raises(ConfigError, match="'0' is scheduled without blocks"):
        make_packer().pack(plan)
    with pytest.raises(ConfigError, match="exceeds the 2"):
        make_packer(max_blocks=2).pack(decode_plan(manager, [30]))
    rng = random.Random(0)
    long = new_request("long", 200, rng)
    long.table = manager.match_prefix(long.prompt_token_ids)
    manager.append_slots(long.table, 200)
    with pytest.raises(ConfigError, match="200 tokens"):
        make_packer().pack(StepPlan([ScheduledChunk(long, 0, 200, ())], 0))


def test_a_step_without_samplers_asks_for_no_logits() -> None:
    manager = BlockManager(20, BLOCK_SIZE)
    request = new_request("r", 30, random.Random(0))
    request.table = manager.match_prefix(request.prompt_token_ids)
    manager.append_slots(request.table, 20)
    plan = StepPlan([ScheduledChunk(request, 0, 20, ())], 0)
    batch = make_packer().pack(plan)
    check_batch(batch, plan)
    assert batch.logits_rows.shape == (0,)
    assert np.array_equal(batch.token_ids.numpy(), request.prompt_token_ids[:20])
