"""Prefill and decode apart on one GPU: SM partitions, shared and separate pools, every link, CUDA graphs."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest
import torch
from disaggregated_cases import Alternate, Always, check_pools_are_free, make_links
from engine_cases import greedy
from low_precision import Pair, make_pair

from nanopd import SamplingParams
from nanopd.router.central import CentralConfig
from nanopd.router.decision import Path
from nanopd.router.server import Server
from nanopd.workers.cluster import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DISAGGREGATED = Always(Path.DISAGGREGATED)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


def halves() -> tuple[str, str]:
    """Prefill and decode partitions, about two thirds and one third of the SMs."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    decode = sms // 3 // 8 * 8
    return f"cuda:0/sm={sms - decode}", f"cuda:0/sm={decode}"


def build(pair: Pair, partitions: bool = True, **options) -> Cluster:
    prefill, decode = halves() if partitions else ("cuda:0", "cuda:0")
    cluster = Cluster.build(
        pair.low,
        **{
            "prefill": [prefill],
            "decode": [decode],
            "num_blocks": 200,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "prefill_chunk": 48,
            "use_tqdm": False,
            **options,
        },
    )
    for worker in cluster.workers:
        worker.runner.kv_cache.tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    return cluster


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", ["shared pool", "same-device copy", "peer copy", "pinned relay", "throttled"])
def test_tokens_over_every_link(pair: Pair, path: str, streamed: bool) -> None:
    shared = path == "shared pool"
    with build(pair, shared_pool=shared) as cluster:
        links = cluster.links if shared else make_links(cluster, path)
        with Server.of(cluster, DISAGGREGATED, links=links, config=CentralConfig(stream_layers=streamed)) as server:
            outputs = server.generate(pair.prompts, [greedy(24)] * len(pair.prompts), use_tqdm=False)
        pair.check(outputs, pair.prompts)
        check_pools_are_free(cluster)
        if not shared:
            for link in links.values():
                link.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_all_roles_on_one_card(pair: Pair, shared: bool) -> None:
    """Whole GPU and partitions side by side, eager and graphs, prompts many times over."""
    prompts = pair.prompts * 3
    with build(pair, shared_pool=shared, collocated=["cuda:0"]) as cluster:
        with Server.of(cluster, Alternate()) as server:
            pair.check(server.generate(prompts, [greedy(16)] * len(prompts), use_tqdm=False), prompts)
            again = [server.generate(pair.prompts, SAMPLED, use_tqdm=False) for _ in range(2)]
        check_pools_are_free(cluster)
    for one, other in zip(*again, strict=True):
        assert len(one.outputs[0].token_ids) == len(other.outputs[0].token_ids) == 24


def test_a_small_decode_pool_preempts_and_recomputes(pair: Pair) -> None:
    with build(pair, shared_pool=False, num_blocks=34, max_model_len=400) as cluster:
        with Server.of(cluster, DISAGGREGATED, config=CentralConfig(growth_tokens=0)) as server:
            outputs = server.generate(pair.prompts, [greedy(24)] * len(pair.prompts), use_tqdm=False)
        pair.check(outputs, pair.prompts)
        check_pools_are_free(cluster)


def test_without_partitions_two_streams_share_the_card(pair: Pair) -> None:
    with build(pair, partitions=False, shared_pool=True) as cluster:
        with Server.of(cluster, DISAGGREGATED) as server:
            pair.check(server.generate(pair.prompts, [greedy(24)] * len(pair.prompts), use_tqdm=False), pair.prompts)
        check_pools_are_free(cluster)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_elastic_workers(pair: Pair, shared: bool) -> None:
    """Steps move between the whole card and the partition, and prompts come either way."""
    prompts = pair.prompts * 3
    with build(pair, shared_pool=shared, elastic=True) as cluster:
        with Server.of(cluster, Alternate()) as server:
            pair.check(server.generate(prompts, [greedy(16)] * len(prompts), use_tqdm=False), prompts)
        check_pools_are_free(cluster)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_workers_in_processes_of_their_own(pair: Pair, shared: bool) -> None:
    """Pool and weights reach them through CUDA IPC; the copy between separate pools is made in this process."""
    prompts = pair.prompts * 2
    with build(pair, partitions=False, processes=True, shared_pool=shared, collocated=["cuda:0"]) as cluster:
        link = cluster.links["prefill0", "decode0"]
        assert link.path == ("shared pool" if shared else "same-device copy")
        with Server.of(cluster, Alternate()) as server:
            pair.check(server.generate(prompts, [greedy(16)] * len(prompts), use_tqdm=False), prompts)
        pids = [worker.runner.pid for worker in cluster.workers]
        assert len({*pids, os.getpid()}) == 4
        check_pools_are_free(cluster)


def test_processes_leave_nothing_on_the_card(pair: Pair) -> None:
    left = []
    for _ in range(3):
        with build(pair, partitions=False, processes=True) as cluster, Server.of(cluster, DISAGGREGATED) as server:
            server.generate(pair.prompts[:4], greedy(4), use_tqdm=False)
        del cluster, server
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        left.append(torch.cuda.memory_allocated())
    assert left[2] <= left[0] + (1 << 20)


def test_a_killed_process_takes_its_worker_and_nothing_else(pair: Pair) -> None:
    with build(pair, partitions=False, processes=True, prefill=[], decode=[], collocated=["cuda:0"] * 2) as cluster:
        steps: list[str] = []

        def on_step(name: str, step: object) -> None:
            steps.append(name)
            if name == "collocated0" and steps.count(name) == 3:
                os.kill(cluster.workers[0].runner.pid, signal.SIGKILL)

        with Server.of(cluster, Always(Path.COLLOCATED), on_step=on_step) as server:
            pair.check(server.generate(pair.prompts, [greedy(24)] * len(pair.prompts), use_tqdm=False), pair.prompts)
        assert [worker.alive for worker in cluster.workers] == [False, True]
        check_pools_are_free(cluster)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_processes_on_two_cards(pair: Pair) -> None:
    with build(pair, partitions=False, processes=True, prefill=["cuda:1"], decode=["cuda:0"]) as cluster:
        with Server.of(cluster, DISAGGREGATED) as server:
            pair.check(server.generate(pair.prompts, [greedy(24)] * len(pair.prompts), use_tqdm=False), pair.prompts)
        check_pools_are_free(cluster)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", ["probed", "peer copy", "pinned relay"])
def test_two_cards(pair: Pair, path: str, streamed: bool) -> None:
    """Prefill on the second card, decode on the first, over the link that was found best and over each by itself."""
    where = {"prefill": ["cuda:1"], "decode": ["cuda:0"]}
    config = CentralConfig(stream_layers=streamed)
    with build(pair, partitions=False, **where) as cluster:
        links = cluster.links if path == "probed" else make_links(cluster, path)
        with Server.of(cluster, DISAGGREGATED, links=links, config=config) as server:
            outputs = server.generate(pair.prompts, [greedy(24)] * len(pair.prompts), use_tqdm=False)
        pair.check(outputs, pair.prompts)
        check_pools_are_free(cluster)
        if path != "probed":
            for link in links.values():
                link.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_role_on_both_cards(pair: Pair) -> None:
    """Two prefill and two decode workers and a collocated one: handoffs within a card and between cards."""
    prompts = pair.prompts * 3
    cards = ["cuda:0", "cuda:1"]
    with build(pair, partitions=False, prefill=cards, decode=cards, collocated=["cuda:1"]) as cluster:
        with Server.of(cluster, Alternate()) as server:
            pair.check(server.generate(prompts, [greedy(16)] * len(prompts), use_tqdm=False), prompts)
        check_pools_are_free(cluster)


def test_nothing_is_left_on_the_card(pair: Pair) -> None:
    left = []
    for _ in range(4):
        with build(pair) as cluster, Server.of(cluster, DISAGGREGATED) as server:
            server.generate(pair.prompts[:4], greedy(4), use_tqdm=False)
        del cluster, server
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one for each pair of a thread's handle and a stream, so at random
        left.append(torch.cuda.memory_allocated())
    assert left[3] <= left[1] + (1 << 20), "after the first ones"
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("nanopd")] == []
