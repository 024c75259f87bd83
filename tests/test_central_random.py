"""The central scheduler under every order of events: right tokens, one final state each, nothing left behind."""

from __future__ import annotations

import pytest

from nanopd.router.central import CentralConfig
from tests.fake_cluster import Monkey, make_workers, uneven_workers

CLUSTERS = {
    "collocated": "c0",
    "two collocated": "c0 c1",
    "1P1D": "p0 d0",
    "2P1D": "p0 p1 d0",
    "1P2D": "p0 d0 d1",
    "decode takes prompts": "p0 e0",
    "several take prompts": "p0 p1 e0 e1",
    "all roles": "c0 p0 p1 d0 d1",
}
SEEDS = range(6)


def monkey(cluster: str, seed: int, *, shared: bool, streamed: bool, faults: float = 0.0, **pool: int) -> Monkey:
    workers = make_workers(CLUSTERS[cluster], shared_pool=shared, **pool)  # type: ignore[arg-type]
    config = CentralConfig(growth_tokens=seed % 9, lease_s=1e9 if not faults else 40.0, stream_layers=streamed)
    return Monkey(workers, seed, config=config, faults=faults)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_any_path_gives_the_same_tokens(cluster: str, shared: bool, streamed: bool, seed: int) -> None:
    run = monkey(cluster, seed, shared=shared, streamed=streamed)
    run.run(40, abort_share=0.01)
    run.check_tokens()
    run.check_pools()
    reasons = {sample.finish_reason for output in run.outputs.values() for sample in output.outputs}
    assert "failed" not in reasons and run.expected.keys() == run.outputs.keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_faults_cost_time_and_never_a_request(cluster: str, shared: bool, seed: int) -> None:
    run = monkey(cluster, seed, shared=shared, streamed=seed % 2 == 0, faults=0.05)
    run.run(60, abort_share=0.01, kill_share=0.0 if seed < 3 else 0.002)
    run.check_tokens()
    run.check_pools()
    assert run.expected.keys() == run.outputs.keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_a_pool_that_is_nearly_too_small(shared: bool, seed: int) -> None:
    run = monkey("all roles", seed, shared=shared, streamed=True, num_blocks=16)
    run.run(40)
    run.check_tokens()
    run.check_pools()


@pytest.mark.parametrize("first", range(0, 200, 25))
@pytest.mark.parametrize("faults", [0.0, 0.05], ids=["sound", "faulty"])
def test_workers_of_which_no_two_are_alike(faults: float, first: int) -> None:
    """Requests that exactly fill a pool, or fit one worker and not its neighbour; pools that some share."""
    for seed in range(first, first + 25):
        workers = uneven_workers(list(CLUSTERS.values())[seed % len(CLUSTERS)], seed)
        config = CentralConfig(
            growth_tokens=(0, 1, 3, 64)[seed % 4],
            prefill_ahead_tokens=(1, 10, 8192)[seed % 3],
            lease_s=40.0 if faults else 1e9,
            stream_layers=seed % 2 == 0,
        )
        run = Monkey(workers, seed, config=config, faults=faults)
        run.run(15, abort_share=0.02, kill_share=0.001 if faults else 0.0)
        run.check_tokens()
        run.check_pools()
        assert run.expected.keys() == run.outputs.keys()
        assert faults or all(output.error is None for output in run.outputs.values())
