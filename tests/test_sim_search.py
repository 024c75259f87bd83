"""Clusters from a description, layouts, upper bounds, and the search that they prune."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from nanopd.bench.goodput import find_goodput
from nanopd.bench.load import LoadOptions
from nanopd.bench.metrics import SLO, Summary
from nanopd.bench.workload import Schedule, Workload, poisson
from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.hardware_profile import BUSY, preset
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import ConfigError
from nanopd.router.policies import make_policy
from nanopd.sim.bounds import _plan, bound
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.devices import device_blocks
from nanopd.sim.durations import analytical
from nanopd.sim.layouts import Layout, ratios, splits
from nanopd.sim.search import default_policy, search_layouts, simulate
from tests.sim_cases import HALF, WHOLE, cluster, profile

SIZES = Workload.fixed(400, 12)
TIGHT = SLO(ttft_s=1.0, tpot_s=0.2)
SLOW = StepTimeModel(base_ms=40.0, token_ms=0.2, kv_token_ms=1e-4, sequence_ms=0.1)  # so that few requests are a load


BASE = cluster(1, profile=profile(step_time={"whole device": SLOW}))


def schedule_at(rate: float, seconds: float) -> Schedule:
    return poisson(SIZES, rate, seconds, seed=1)


# --- clusters --------------------------------------------------------------------------------------------------


def test_workers_are_those_of_a_real_cluster() -> None:
    made = SimulatedCluster(profile(), prefill=["cuda:0/sm=84"], decode=["cuda:0/sm=48"], num_blocks=100)
    prefill, decode = made.workers()
    assert (prefill.name, prefill.profile, decode.place) == ("prefill0", "sm=84", "cuda:0, 48 SMs")
    assert prefill.shares_pool_with(decode)  # one device: nothing moves
    assert made.driver(make_policy("disaggregated")).links == {}
    apart = cluster(1, 1, 2)
    assert set(apart.driver(make_policy("collocated")).links) == {("prefill0", "decode0"), ("prefill0", "decode1")}
    assert apart.hardware.num_gpus == 4 and made.hardware.num_gpus == 1


def test_elastic_partitions_have_the_whole_card_while_alone() -> None:
    """Beside a busy neighbour they have their share, which is slower still; measured if the profile has that place."""
    plan = _plan(0, 0, [(0, 100)])
    whole, half = (model.step_ms(StepFeatures.of(plan)) / 1e3 for model in (WHOLE, HALF))
    places = {"prefill": ["cuda:0/sm=84"], "decode": ["cuda:0/sm=48"]}
    fixed, elastic = (SimulatedCluster(profile(), elastic=e, **places).workers()[0] for e in (False, True))
    assert fixed.runner.seconds(plan) == pytest.approx((half, 1.24 * half))
    assert elastic.runner.seconds(plan) == pytest.approx((whole, 1.24 * half))
    models = {**profile().step_time, "sm=84" + BUSY: SLOW}
    measured = SimulatedCluster(profile(step_time=models), elastic=True, **places).workers()[0]
    assert measured.runner.seconds(plan) == pytest.approx((whole, SLOW.step_ms(StepFeatures.of(plan)) / 1e3))


def test_a_whole_card_is_shared_only_with_neighbours() -> None:
    plan = _plan(1, 50, [])
    alone, shared = (SimulatedCluster(profile(), ["cuda:0"] * n).workers()[0].runner.seconds(plan) for n in (1, 2))
    assert alone[0] == alone[1] == shared[0] and shared[1] == 2 * alone[0]
    with pytest.raises(ConfigError, match="slowdown"):
        SimulatedCluster(profile(), prefill=["cuda:0/sm=84"], decode=["cuda:0/sm=48"], partition_slowdown=0.5)


def test_the_host_takes_its_time_in_each_step() -> None:
    """A lone request of a prompt and five tokens is five steps, before each of which the host takes its time."""
    ends = []
    for host_s in (0.0, 0.001):
        driver = SimulatedCluster(profile(), ["cuda:0"], host_s=host_s).driver(make_policy("collocated"))
        driver.add_request([1] * 50, SamplingParams(max_tokens=5, ignore_eos=True))
        driver.drain()
        ends.append(driver.now)
    assert ends[1] == pytest.approx(ends[0] + 5 * 0.001)
    with pytest.raises(ConfigError, match="host"):
        SimulatedCluster(profile(), ["cuda:0"], host_s=-1.0)


def test_memory_becomes_blocks() -> None:
    """RTX 4090: 0.9 * 24 GB less 16.4 GB of Qwen3-8B's weights, at 147,456 bytes a token."""
    card = preset("rtx-4090")
    blocks = device_blocks(card, 16)
    assert 5.0e9 < blocks * 16 * 147_456 < 5.4e9
    assert device_blocks(profile(num_blocks=100, block_size=32), 16) == 200  # measured ones come first
    pools = SimulatedCluster(card, collocated=["cuda:0"]).workers()
    assert pools[0].block_manager.num_blocks == blocks
    with pytest.raises(ConfigError, match="no KV block"):
        device_blocks(card, 16, memory_gb=16)
    with pytest.raises(ConfigError, match="memory of 'Abacus'"):
        device_blocks(replace(card, device="Abacus"), 16)


def test_what_a_profile_lacks_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="no step-time model for 'sm=10'"):
        SimulatedCluster(profile(), prefill=["cuda:0/sm=10"], decode=["cuda:0/sm=48"])
    with pytest.raises(ConfigError, match=r"give link_gb_s$"):
        cluster(0, 1, 1, profile=profile(bandwidth_gb_s=None))
    with pytest.raises(ConfigError, match="at least one"):
        SimulatedCluster(profile())


def test_presets_without_a_step_model_use_the_analytical_one() -> None:
    card = preset("rtx-4090")
    seconds = analytical(card)
    assert seconds(_plan(0, 0, [(0, 1000)])) == pytest.approx(0.124722)
    assert seconds(_plan(32, 100, [])) == pytest.approx(2 * 0.0515604)
    assert seconds(_plan(1, 100, [(0, 100)])) == pytest.approx(0.0515604 + 100 * 0.0869146e-3)
    assert seconds(_plan(1, 100, [(0, 2000)])) == pytest.approx(2000 * 0.124722e-3)  # at least the prompt's own time


# --- layouts ---------------------------------------------------------------------------------------------------


def test_layouts_name_their_devices() -> None:
    mixed = Layout(collocated=2, prefill=1, decode=3).on(cluster(1))
    assert list(mixed.collocated) == ["cuda:0", "cuda:1"] and list(mixed.prefill) == ["cuda:2"]
    assert list(mixed.decode) == ["cuda:3", "cuda:4", "cuda:5"]
    split = Layout(prefill=2, decode=2, split=(48, 84))
    assert split.num_devices == 2 and list(split.on(cluster(1)).prefill) == ["cuda:0/sm=84", "cuda:1/sm=84"]
    beside = Layout(1, 1, 1, (48, 84), beside=True)
    assert beside.num_devices == 1 and beside.on(cluster(1)).hardware.num_gpus == 1
    assert [str(layout) for layout in ratios(3)] == ["3 collocated", "1 prefill : 2 decode", "2 prefill : 1 decode"]
    assert [layout.split for layout in splits(profile())] == [(48, 84), (84, 48)]


@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 1, 0), (1, 0, 2), (-1, 1, 1)])
def test_layouts_that_cannot_serve(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="layout"):
        Layout(*counts)


# --- bounds and search -----------------------------------------------------------------------------------------


def goodput(layout: Layout, duration_s: float = 6.0) -> float:
    """Found without any pruning."""
    made = layout.on(BASE)

    def run(rate: float) -> Summary:
        schedule = schedule_at(rate, duration_s)
        return simulate(made, default_policy(layout), schedule, TIGHT, LoadOptions(drain_s=30.0))

    return find_goodput(run, low=1.0, high=60.0, tolerance=0.05, max_runs=20).rate


@pytest.mark.parametrize("layout", list(ratios(3)), ids=str)
def test_no_run_beats_its_bound(layout: Layout) -> None:
    made = bound(layout.on(BASE), schedule_at(10.0, 20.0).arrivals, TIGHT)
    reached = goodput(layout)
    assert 0.3 * made.rate < reached <= made.slackened(0.9, TIGHT, 6.0)


def test_bounds_name_the_side_that_sets_them() -> None:
    arrivals = schedule_at(10.0, 20.0).arrivals
    assert bound(Layout(prefill=1, decode=7).on(BASE), arrivals, TIGHT).side == "prefill"
    long_answers = poisson(Workload.fixed(10, 500), 100.0, 2.0).arrivals
    assert bound(Layout(prefill=7, decode=1).on(BASE), long_answers, TIGHT).side == "decode"
    with pytest.raises(ConfigError, match="at least one arrival"):
        bound(BASE, [], TIGHT)


def test_the_search_finds_what_trying_everything_finds() -> None:
    layouts = list(ratios(3))
    found = search_layouts(layouts, BASE, schedule_at, TIGHT, duration_s=6.0, use_tqdm=False)
    reached = {layout: goodput(layout) / 3 for layout in layouts}
    assert reached[found.best.layout] >= 0.9 * max(reached.values())
    assert found.best.per_gpu == pytest.approx(reached[found.best.layout], rel=0.12)
    assert [trial.layout for trial in found.trials] != [] and len(found.trials) == len(layouts)
    for trial in found.trials[1:]:
        assert trial.verdict, trial
    pruned = [re.findall(r"at most (\S+)/s.*and (\S+) was", t.verdict) for t in found.trials if "pruned" in t.verdict]
    assert pruned and all(float(bounded) < float(best) for ((bounded, best),) in pruned)


def test_bounds_are_part_of_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """Hundreds of devices are hundreds of layouts: minutes before the first run."""
    search_layouts([Layout(1), Layout(2)], BASE, schedule_at, TIGHT, duration_s=0.5)
    shown = capsys.readouterr().err
    assert "1 collocated, bound" in shown and "2 collocated, bound" in shown


def test_steps_that_take_no_time_bound_nothing() -> None:
    free = cluster(1, profile=profile(step_time={"whole device": StepTimeModel(0.0)}))
    assert bound(free, schedule_at(10.0, 1.0).arrivals, TIGHT).rate == math.inf


def test_a_search_needs_a_layout() -> None:
    with pytest.raises(ConfigError, match="at least one layout"):
        search_layouts([], cluster(1), schedule_at, TIGHT)


def test_long_answers_do_not_make_a_layout_look_bad_for_being_unfinished() -> None:
    """Answers that take longer than the runs that were asked for: nobody attains less for not having finished, and no
    layout drops out over a handful of requests."""
    load = Workload.fixed(200, 120)  # 120 steps of some 50 ms
    slo = SLO(ttft_s=2.0, tpot_s=0.1)
    layouts = [Layout(collocated=2), Layout(prefill=1, decode=1)]
    found = search_layouts(
        layouts, BASE, lambda rate, seconds: poisson(load, rate, seconds, seed=1), slo, duration_s=4.0, use_tqdm=False
    )
    for trial in found.trials:
        assert trial.goodput is not None and trial.goodput.rate > 0, trial.verdict
        assert all(probe.offered >= 20 for probe in trial.goodput.probes), trial.goodput.probes
        assert trial.duration_s >= 4 * 120 * 0.1 / 4  # the first round's quarter of four answers
    rate = found.best.goodput.rate if found.best.goodput else 0.0
    direct = simulate(
        found.best.layout.on(BASE),
        default_policy(found.best.layout),
        poisson(load, rate, 96.0, seed=2),
        slo,
        LoadOptions(drain_s=600.0),
    )
    assert direct.attainment > 0.6  # twice as long and with another seed: near the edge, not far beyond it
