"""The garbage collector has little to do while nanopd serves: old objects are left out, and its own make no cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from engine_cases import greedy

from nanopd import LLM
from nanopd.engine.heap import settle_heap, thaw_heap
from nanopd.model import LoadedModel, load_model
from nanopd.router import Server
from nanopd.router.policies import make_policy
from nanopd.workers import Cluster


class Node:
    def __init__(self) -> None:
        self.other: Node | None = None


def cycle() -> Node:
    node = Node()
    node.other = Node()
    node.other.other = node
    return node


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("dummy:tiny", device="cpu")


def test_what_survives_is_looked_at_again_by_the_next_call_only() -> None:
    garbage, kept = weakref.ref(cycle()), cycle()
    settle_heap()
    assert garbage() is None
    old, new = weakref.ref(kept), weakref.ref(cycle())
    del kept
    gc.collect()
    assert old() is not None and new() is None
    thaw_heap()
    assert old() is None and gc.get_freeze_count() == 0


def test_engines_workers_and_servers_are_freed_without_a_collector(tiny: LoadedModel) -> None:
    def llm() -> list[Any]:
        made = LLM(tiny, num_blocks=64, use_tqdm=False)
        made.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
        return [made, made.engine, made.runner, made.kv_cache.tensor]

    def cluster(shared_pool: bool) -> list[Any]:
        made = Cluster.build(
            tiny, prefill=["cpu"], decode=["cpu"], num_blocks=64, shared_pool=shared_pool, use_tqdm=False
        )
        pools = [worker.runner.kv_cache.tensor for worker in made.workers]
        runners = [worker.runner for worker in made.workers]
        with made, Server.of(made, make_policy("disaggregated")) as server:
            server.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
        return [made, server, *made.workers, *pools, *runners]

    gc.collect()
    gc.disable()
    try:
        for make in (llm, partial(cluster, True), partial(cluster, False)):
            parts = [(type(part).__name__, weakref.ref(part)) for part in make()]
            assert [name for name, part in parts if part() is not None] == []
    finally:
        gc.enable()
