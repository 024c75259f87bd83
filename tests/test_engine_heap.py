"""The garbage collector has little to do while nanopd serves: old objects are left out, and its own make no cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from engine_cases import greedy

from nanopd import LLM
from nanopd.engine.heap import settle_heap
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
    settle_heap()
    assert old() is None


def test_engines_workers_and_servers_are_freed_without_a_collector(tiny: LoadedModel) -> None:
    def llm() -> Any:
        made = LLM(tiny, num_blocks=64, use_tqdm=False)
        made.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
        return made

    def cluster() -> Any:
        return Cluster.build(tiny, prefill=["cpu"], decode=["cpu"], num_blocks=64, use_tqdm=False)

    def served() -> Any:
        made = cluster()
        with made, Server.of(made, make_policy("disaggregated")) as server:
            server.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
        return made, server

    gc.collect()
    gc.disable()
    try:
        for make in (llm, cluster, served):
            made = make()
            whole = weakref.ref(made[0] if isinstance(made, tuple) else made)
            del made
            assert whole() is None, make.__name__
    finally:
        gc.enable()
