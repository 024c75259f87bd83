"""The same tokens wherever a request runs: collocated, or prefill and decode apart over any link.

The oracle computes each request alone, on one worker, without a prefix cache; that engine's own tokens are held against
transformers elsewhere. In float64, so that no rounding depends on who shares a batch.
"""

from __future__ import annotations

import pytest
import torch
from disaggregated_cases import (
    Alternate,
    Always,
    Load,
    answers_alone,
    check,
    check_pools_are_free,
    float64_model,
    make_links,
    run,
)
from model_cases import VOCAB, random_hf_model

from nanopd.model.loader import LoadedModel
from nanopd.router.central import CentralConfig
from nanopd.router.decision import Path
from nanopd.router.server import Server
from nanopd.workers.cluster import Cluster

LOAD = Load.at_random(7, 100, VOCAB)
PATHS = ["same-device copy", "peer copy", "pinned relay", "throttled"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    return float64_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> list[list[list[int]]]:
    return answers_alone(model, LOAD)


def build(model: LoadedModel, *, shared_pool: bool, collocated: int = 0, prefill: int = 1, decode: int = 1) -> Cluster:
    cluster = Cluster.build(
        model,
        collocated=["cpu"] * collocated,
        prefill=["cpu"] * prefill,
        decode=["cpu"] * decode,
        shared_pool=shared_pool,
        num_blocks=60,
        block_size=8,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        prefill_chunk=20,
        max_model_len=128,
    )
    for worker in cluster.workers:
        worker.runner.kv_cache.tensor.fill_(float("nan"))  # whoever reads what nobody sent gives itself away
    return cluster


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", [*PATHS, "shared pool", "collocated", "mixed"])
def test_tokens_do_not_depend_on_the_path(
    model: LoadedModel, expected: list[list[list[int]]], path: str, streamed: bool
) -> None:
    mixed = path in ("collocated", "mixed")
    with build(model, shared_pool=path == "shared pool", collocated=int(mixed)) as cluster:
        policy = {"collocated": Always(Path.COLLOCATED), "mixed": Alternate()}.get(path, Always(Path.DISAGGREGATED))
        links = make_links(cluster, path) if path in PATHS else cluster.links
        with Server.of(cluster, policy, links=links, config=CentralConfig(stream_layers=streamed)) as server:
            final = run(server, LOAD)
        assert check(final, LOAD, expected) > 0
        check_pools_are_free(cluster)
        if path in PATHS:
            for link in links.values():
                link.close()


def test_several_workers_of_each_role(model: LoadedModel, expected: list[list[list[int]]]) -> None:
    with build(model, shared_pool=False, collocated=1, prefill=2, decode=2) as cluster:
        with Server.of(cluster, Alternate()) as server:
            final = run(server, LOAD)
        check(final, LOAD, expected)
        check_pools_are_free(cluster)


def test_the_oracle_agrees_with_transformers(model: LoadedModel, expected: list[list[list[int]]]) -> None:
    reference = random_hf_model("qwen3").double()
    for number in [i for i, params in enumerate(LOAD.params) if params.temperature == 0][:10]:
        tokens = list(LOAD.prompts[number])
        for _ in range(LOAD.params[number].max_tokens):
            with torch.no_grad():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert tokens[len(LOAD.prompts[number]) :] == expected[number][0]
