"""A cluster on the CPU: what its workers share, what they do not, and that their tokens are the engine's own."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanopd.engine import LLM, SamplingParams
from nanopd.engine.request import Request, RequestState
from nanopd.engine.runner import ModelRunner
from nanopd.errors import ConfigError, ModelLoadError
from nanopd.model import LoadedModel
from nanopd.router import AlwaysDisaggregated, Server
from nanopd.transfer import Handoff
from nanopd.workers import Cluster, DecodeWorker, DeviceSpec, PrefillWorker, Role, Worker
from nanopd.workers.affinity import can_bind

SMALL: dict[str, Any] = {
    "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "use_tqdm": False,
}  # fmt: skip
APART: dict[str, Any] = {"prefill": ["cpu"], "decode": ["cpu"]}


def step(worker: Worker, now: float = 0.0) -> bool:
    plan = worker.scheduler.schedule(now)
    if plan.chunks:
        worker.scheduler.update(plan, worker.runner.execute(plan), now)
    return bool(plan.chunks)


def serve_apart(cluster: Cluster, requests: list[Request]) -> None:
    """Prefill here, decode there, by hand: what a driver does, in one thread and without a policy."""
    prefill, decode = (w for w in cluster.workers if w.role is not Role.COLLOCATED)
    assert isinstance(prefill, PrefillWorker) and isinstance(decode, DecodeWorker)
    for request in requests:
        prefill.add(request, 0.0)
    ids = itertools.count()
    while not all(request.is_finished for request in requests):
        step(prefill)
        for request in list(prefill.scheduler.transferring.values()):
            hand_over(cluster, prefill, decode, request, next(ids))
        step(decode)
    for worker in (prefill, decode):
        assert worker.block_manager.num_free_blocks == worker.block_manager.num_blocks, worker


def hand_over(cluster: Cluster, prefill: PrefillWorker, decode: DecodeWorker, request: Request, number: int) -> None:
    if prefill.shares_pool_with(decode):
        request.table = prefill.give_away(request)
        decode.scheduler.attach(request)
        return
    table = decode.reserve(request, 8)
    assert table is not None and request.table is not None
    source = request.table.block_ids
    handoff = Handoff(
        number, request.request_id, prefill.name, decode.name, tuple(source), tuple(table.block_ids[: len(source)]),
        request.num_computed_tokens, True, prefill.fingerprint,
    )  # fmt: skip
    assert cluster.links[prefill.name, decode.name].send(handoff).wait(30)
    prefill.block_manager.free(prefill.give_away(request))
    decode.take_over(request, 0.0)


@pytest.fixture(scope="module")
def work(tiny: LoadedModel) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts, parameters, and what the engine answers."""
    rng = random.Random(3)
    prompts = [[rng.randrange(1000) for _ in range(n)] for n in (1, 15, 16, 17, 40, 100, 63)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True) for i in range(len(prompts))
    ]
    with LLM(tiny, **SMALL) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return prompts, params, [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_tokens_apart_are_those_of_the_engine(tiny: LoadedModel, work: Any, shared: bool, chunk: int | None) -> None:
    prompts, params, expected = work
    requests = [Request(f"r{i}", prompt, p) for i, (prompt, p) in enumerate(zip(prompts, params))]
    with Cluster.build(tiny, **APART, **SMALL, shared_pool=shared, prefill_chunk=chunk) as cluster:
        serve_apart(cluster, requests)
    assert [request.output_token_ids for request in requests] == expected
    assert all(request.state is RequestState.FINISHED for request in requests)


def test_a_collocated_worker_serves_as_the_engine_does(tiny: LoadedModel, work: Any) -> None:
    prompts, params, expected = work
    requests = [Request(f"r{i}", prompt, p) for i, (prompt, p) in enumerate(zip(prompts, params))]
    with Cluster.build(tiny, collocated=["cpu"], **SMALL, collocated_chunk=16) as cluster:
        (worker,) = cluster.workers
        for request in requests:
            worker.add(request, 0.0)
        while step(worker):
            pass
        assert worker.scheduler.config.chunk_size == 16
    assert [request.output_token_ids for request in requests] == expected


def test_what_workers_share_and_what_they_do_not(tiny: LoadedModel) -> None:
    with Cluster.build(tiny, collocated=["cpu"], **APART, **SMALL, shared_pool=True, prefill_chunk=32) as cluster:
        workers = cluster.workers
        assert [(w.name, w.role.value, type(w).__name__) for w in workers] == [
            ("collocated0", "collocated", "CollocatedWorker"),
            ("prefill0", "prefill", "PrefillWorker"),
            ("decode0", "decode", "DecodeWorker"),
        ]
        runners = [w.runner for w in workers]
        assert len({id(r.model.weights) for r in runners}) == 1 and runners[0].model.weights is tiny.model.weights
        assert len({id(r.ops) for r in runners}) == len({id(r.model) for r in runners}) == 3
        assert all(r.model.ops is r.ops for r in runners)
        assert len({id(r.kv_cache) for r in runners}) == len({id(w.block_manager) for w in workers}) == 1
        assert len({id(w.scheduler) for w in workers}) == len({id(r.packer) for r in runners}) == 3
        assert [w.scheduler.config.chunk_size for w in workers] == [None, 32, 32]
        assert list(cluster.links) == [("prefill0", "decode0")]
        assert cluster.links["prefill0", "decode0"].path == "shared pool"
    with Cluster.build(tiny, collocated=["cpu"], **APART, **SMALL, shared_pool=False) as cluster:
        assert len({id(w.runner.kv_cache) for w in cluster.workers}) == 3
        assert len({id(w.block_manager) for w in cluster.workers}) == 3
        assert {w.fingerprint for w in cluster.workers} == {cluster.workers[0].runner.kv_cache.fingerprint()}
        assert cluster.links["prefill0", "decode0"].path != "shared pool"


def test_every_prefill_worker_is_linked_to_every_decode_worker(tiny: LoadedModel) -> None:
    with Cluster.build(tiny, prefill=["cpu", "cpu"], decode=["cpu", "cpu"], **SMALL) as cluster:
        assert list(cluster.links) == [(f"prefill{p}", f"decode{d}") for p in range(2) for d in range(2)]
        text = cluster.describe()
    lines = text.splitlines()
    assert len(lines) == 5 and lines[0].split() == ["worker", "place", "pool", "blocks", "tokens", "links"]
    assert lines[1].split()[:5] == ["prefill0", "cpu", "0", "64", "1,024"]
    assert "shared pool to decode0; shared pool to decode1" in lines[2]
    assert lines[4].split() == ["decode1", "cpu", "0", "64", "1,024"]


def test_memory_is_divided_by_what_workers_hold(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    block = 2 * tiny.config.kv_bytes_per_token(4) * 8
    monkeypatch.setattr("nanopd.engine.kv_budget.CPU_BYTES", 28 * block)
    sizes = {**SMALL, "num_blocks": None, "block_size": 16, "max_num_batched_tokens": 16}
    with Cluster.build(tiny, collocated=["cpu"], **APART, **sizes, shared_pool=False) as cluster:
        assert [w.block_manager.num_blocks for w in cluster.workers] == [12, 4, 12]  # 3 : 1 : 3 of 28
        assert [w.runner.kv_cache.num_blocks for w in cluster.workers] == [12, 4, 12]
    with Cluster.build(tiny, collocated=["cpu"], **APART, **sizes) as cluster:
        assert [w.block_manager.num_blocks for w in cluster.workers] == [28, 28, 28]
    with Cluster.build(tiny, **APART, **{**sizes, "max_num_seqs": 1, "max_model_len": 32}) as cluster:
        assert cluster.workers[0].block_manager.num_blocks == 4  # two workers, one request of two blocks each
    monkeypatch.setattr("nanopd.engine.kv_budget.CPU_BYTES", 3 * block)
    with pytest.raises(ConfigError, match="leave prefill0 no block"):
        Cluster.build(tiny, **APART, **sizes, shared_pool=False)


@pytest.mark.skipif(not can_bind(), reason="this system does not bind threads to cores")
def test_a_worker_takes_its_thread_to_its_cores(tiny: LoadedModel) -> None:
    core = min(os.sched_getaffinity(0))
    with Cluster.build(tiny, collocated=[DeviceSpec("cpu", cores=(core,)), "cpu"], **SMALL) as cluster:
        seen: list[Any] = []

        def run(worker: Worker) -> None:
            with worker.enter():
                seen.append((worker.place, os.sched_getaffinity(0), torch.get_num_threads()))

        threads = torch.get_num_threads()
        for worker in cluster.workers:
            thread = threading.Thread(target=run, args=(worker,))
            thread.start()
            thread.join()
        assert seen == [(f"cpu, core {core}", {core}, 1), ("cpu", os.sched_getaffinity(0), threads)]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_closing_lets_go_of_the_pool_and_may_be_repeated(tiny: LoadedModel, shared: bool) -> None:
    before = threading.active_count()
    cluster = Cluster.build(tiny, **APART, **SMALL, shared_pool=shared)
    pools = [weakref.ref(w.runner.kv_cache.tensor) for w in cluster.workers]
    cluster.close()
    cluster.close()
    gc.collect()
    assert [pool() for pool in pools] == [None, None]
    assert threading.active_count() == before
    assert tiny.model.weights.embedding is not None


@pytest.mark.parametrize("shared", [True, False])
def test_a_closed_cluster_serves_nobody(tiny: LoadedModel, shared: bool) -> None:
    cluster = Cluster.build(tiny, **APART, **SMALL, shared_pool=shared)
    cluster.close()
    with pytest.raises(ConfigError, match="the cluster was closed"):
        Server.of(cluster, AlwaysDisaggregated())


@pytest.fixture
def broken_capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModelRunner]]:
    closed: list[ModelRunner] = []

    def fail(self: ModelRunner, use_tqdm: bool = False) -> None:
        raise ConfigError("no graph today")

    close = ModelRunner.close
    monkeypatch.setattr(ModelRunner, "capture_graphs", fail)
    monkeypatch.setattr(ModelRunner, "close", lambda self: (closed.append(self), close(self))[1])
    yield closed


def test_a_build_that_fails_closes_what_it_had_built(tiny: LoadedModel, broken_capture: list[ModelRunner]) -> None:
    with pytest.raises(ConfigError, match="no graph today"):
        Cluster.build(tiny, **APART, **SMALL)
    assert len(broken_capture) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"collocated": ["cuda:7"]}, "'cuda:7' was asked for"),
        ({"collocated": ["cpu/cores=4000"]}, "core 4000"),
        ({"prefill": ["cpu"]}, "decode worker"),
        ({}, "at least one worker"),
        ({**APART, "block_size": 12}, "block_size"),
        ({**APART, "num_blocks": 0}, "num_blocks"),
        ({**APART, "enforce_eager": 1}, "enforce_eager"),
        ({**APART, "shared_pool": "no"}, "shared_pool"),
        ({**APART, "max_model_len": 10**6}, "max_model_len"),
        ({**APART, "prefill_chunk": 0}, "chunk_size"),
        ({**APART, "max_num_seqs": 100}, "max_num_batched_tokens"),
        ({**APART, "collocated_chunk": -1}, "chunk_size"),
        ({**APART, "elastic": "yes"}, "elastic"),
        ({**APART, "num_blocks": 10**12}, "GB are free"),
        ({**APART, "graph_sizes": "junk"}, "graph_sizes must be a list .* got 'junk'"),
        ({**APART, "graph_sizes": []}, "graph_sizes must be a list .* got "),
        ({**APART, "graph_sizes": 4}, "graph_sizes must be a list .* got 4"),
        ({**APART, "graph_sizes": [1, "2"]}, r"graph_sizes must be ints in .*8.* got '2'"),
        ({**APART, "graph_sizes": [True]}, "graph_sizes must be ints .* got True"),
        ({**APART, "graph_sizes": [0, 1]}, "graph_sizes must be ints .* got 0"),
        ({**APART, "graph_sizes": [1, 9]}, "graph_sizes must be ints .* got 9"),
        ({**APART, "gpu_memory_utilization": True}, "gpu_memory_utilization .* got True"),
        ({**APART, "gpu_memory_utilization": 2.0}, "gpu_memory_utilization .* got 2.0"),
        ({**APART, "use_tqdm": "no"}, "use_tqdm .* got 'no'"),
        ({**APART, "max_num_seqs": 10**12, "max_num_batched_tokens": 10**12}, "max_num_seqs must be at most 65,536"),
        ({"collocated": 5}, "collocated is a list of devices, got 5"),
        ({"collocated": ["cpu"], "prefill": None}, "prefill is a list of devices, got None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options_are_refused(tiny: LoadedModel, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Cluster.build(tiny, **{**SMALL, **changes})


def test_a_model_is_a_name_or_a_loaded_one(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="LoadedModel"):
        Cluster.build(tiny.model, collocated=["cpu"], **SMALL)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError):
        Cluster.build("no-such-model", collocated=["cpu"], **SMALL)
    with Cluster.build("dummy:tiny", collocated=["cpu"], dtype="float64", **SMALL) as cluster:
        assert cluster.tokenizer is None and cluster.config.name == "tiny"
        assert cluster.worker("collocated0").runner.kv_cache.dtype is torch.float64
        with pytest.raises(ConfigError, match="no worker 'decode0'; there are collocated0"):
            cluster.worker("decode0")
