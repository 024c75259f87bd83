"""The frontier's loads and arithmetic, and the whole measurement in miniature on the CPU."""

from __future__ import annotations

import itertools
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanopd.engine.plan import StepPlan
from nanopd.errors import ConfigError, StepFailedError
from nanopd.model import LoadedModel
from nanopd.workers import Cluster, Worker
from nanopd.workers.curves import compare, lines, summary, throughput_at
from nanopd.workers.frontier import measure_frontier, split_name
from nanopd.workers.gil import switch_interval
from nanopd.workers.loads import Decodes, Load, Prompts, Step, gaps_ms, prefill_rate, run_together
from nanopd.workers.measured import Sizes, cpu_sizes

SIZES = Sizes(
    states=((3, 64),), chunks=(8, 32), splits=(("cpu/cores=0", "cpu/cores=1"),), whole="cpu", prompt=32, seconds=0.05,
    warmup=1, settle=0.2,
)  # fmt: skip

# --- arithmetic ------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=300))
def test_summary_against_numpy(gaps: list[float]) -> None:
    result = summary(gaps)
    assert result["mean_ms"] == pytest.approx(np.mean(gaps))
    assert result["p99_ms"] == np.percentile(gaps, 99, method="inverted_cdf")
    assert result["p50_ms"] == np.percentile(gaps, 50, method="inverted_cdf")
    assert result["steps"] == len(gaps)


def test_no_step_has_no_summary() -> None:
    with pytest.raises(ConfigError, match="no step was timed"):
        summary([])


@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(0, 50)), min_size=1, max_size=8, unique_by=lambda p: p[0]),
    st.floats(0.5, 120),
)
def test_interpolation_against_numpy(curve: list[tuple[float, float]], tpot: float) -> None:
    ordered = sorted(curve)
    front = [p for i, p in enumerate(ordered) if i == 0 or p[1] > max(rate for _, rate in ordered[:i])]
    expected = 0.0 if tpot < front[0][0] else np.interp(tpot, *zip(*front))
    assert throughput_at(curve, tpot) == pytest.approx(expected)


def test_interpolation_by_hand() -> None:
    curve = [(40.0, 20.0), (20.0, 0.0), (30.0, 16.0), (35.0, 15.0)]  # (35, 15) is worse than (30, 16) in both
    assert [throughput_at(curve, t) for t in (10.0, 20.0, 25.0, 30.0, 35.0, 40.0, 99.0)] == [0, 0, 8, 16, 18, 20, 20]
    assert throughput_at([], 10.0) == 0.0


def test_splits_are_compared_with_chunks_at_their_own_tpot() -> None:
    """DESIGN.md's figures for 64 decodes of 8k tokens."""
    state = {
        "alone": {"mean_ms": 21.5},
        "chunked": {
            "256": {"mean_ms": 25.4, "prefill_tokens_per_ms": 10.1},
            "512": {"mean_ms": 31.6, "prefill_tokens_per_ms": 16.2},
            "1024": {"mean_ms": 45.0, "prefill_tokens_per_ms": 22.7},
        },
        "split": {
            "64/68": {"mean_ms": 30.1, "prefill_tokens_per_ms": 19.9},
            "48/84": {"mean_ms": 35.5, "prefill_tokens_per_ms": 25.7},
            "fast": {"mean_ms": 20.0, "prefill_tokens_per_ms": 5.0},
        },
    }
    ratios = compare(state)
    assert list(ratios) == ["64/68", "48/84"]
    assert ratios["64/68"] == pytest.approx(1.35, abs=0.02) and ratios["48/84"] == pytest.approx(1.42, abs=0.02)


def test_gaps_leave_out_where_decodes_start_over() -> None:
    steps = [Step(1.0, 2, 0, True), Step(1.5, 2, 10, False), Step(9.0, 2, 10, True), Step(9.25, 2, 5, False)]
    assert gaps_ms(steps) == [500.0, 250.0]
    assert prefill_rate(steps) == pytest.approx(15 / 750)


def test_names_of_splits() -> None:
    assert split_name("cuda:0/sm=48", "cuda:0/sm=84") == "48/84"
    assert split_name("cpu/cores=0-2", "cpu/cores=3") == "3/1"
    with pytest.raises(ConfigError, match="'cuda:0'"):
        split_name("cuda:0/sm=48", "cuda:0")


# --- loads -----------------------------------------------------------------------------------------------------


class Silent:
    """A runner that answers at once, and keeps the plans."""

    def __init__(self, fail_after: int = 10**9) -> None:
        self.contexts: list[list[int]] = []
        self.prefilled: list[tuple[str, int, int]] = []
        self.fail_after = fail_after

    def execute(self, plan: StepPlan) -> list[list[int]]:
        self.fail_after -= 1
        if self.fail_after < 0:
            raise ZeroDivisionError("as told")
        self.contexts.append([chunk.start + 1 for chunk in plan.chunks[: plan.num_decodes]])
        self.prefilled += [(c.request.request_id, c.start, c.num_tokens) for c in plan.chunks[plan.num_decodes :]]
        return [[7] * len(chunk.samplers) for chunk in plan.chunks]


@pytest.fixture
def worker(tiny: LoadedModel) -> Any:
    sizes = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    with Cluster.build(
        tiny, collocated=["cpu"], **sizes, collocated_chunk=24, enable_prefix_caching=False, use_tqdm=False
    ) as cluster:
        yield cluster.workers[0]


def test_decodes_stay_near_their_context(worker: Worker) -> None:
    runner = worker.runner = Silent()
    load = Load(worker, threading.Lock(), Decodes(worker, batch=4, context=80))
    for _ in range(35):
        load.step()
    window = list(range(76, 86))  # a tenth of 80 steps around it
    assert [contexts[0] for contexts in runner.contexts] == (window * 4)[:35]
    assert all(len(set(contexts)) == 1 and len(contexts) == 4 for contexts in runner.contexts)
    assert [i for i, step in enumerate(load.steps) if step.fresh] == [0, 10, 20, 30]
    assert abs(np.mean(window) - 80) <= 0.5
    load.clear()
    assert worker.block_manager.num_free_blocks == worker.block_manager.num_blocks


def test_prompts_never_run_out_and_chunks_follow_each_other(worker: Worker) -> None:
    runner = worker.runner = Silent()
    load = Load(worker, threading.Lock(), Decodes(worker, 2, 40), Prompts(worker, 50))
    for _ in range(60):
        load.step()
    assert {step.prefill_tokens for step in load.steps} == {24} and {step.num_decodes for step in load.steps} == {2}
    done = [f"prompt{i}" for i in range(60 * 24 // 50)]
    for name in done:  # each prompt is computed once, from start to end
        chunks = [(start, n) for request, start, n in runner.prefilled if request == name]
        assert chunks[0][0] == 0 and sum(n for _, n in chunks) == 50
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(chunks))
    load.clear()
    assert worker.block_manager.num_free_blocks == worker.block_manager.num_blocks


def test_an_error_in_a_thread_reaches_the_caller_and_everything_ends(worker: Worker) -> None:
    worker.runner = Silent(fail_after=5)
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="as told"):
        run_together([Load(worker, threading.Lock(), Decodes(worker, 2, 40))], 10.0)
    assert threading.active_count() == threads


def test_what_comes_before_the_load_has_settled_does_not_count(worker: Worker) -> None:
    worker.runner = Silent()
    load = Load(worker, threading.Lock(), Decodes(worker, 2, 40))
    (steps,) = run_together([load], 0.02, warmup=2, settle=0.1)
    assert steps == [step for step in load.steps if step.end >= steps[0].end]
    assert steps[0].end > load.steps[1].end + 0.1
    for settle in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="settle"):
            run_together([load], 0.02, settle=settle)


def test_a_pool_too_small_for_the_load_says_so(worker: Worker) -> None:
    worker.runner = Silent()
    with pytest.raises(StepFailedError, match="collocated0 has nothing to compute"):
        run_together([Load(worker, threading.Lock())], 10.0)


def test_the_switch_interval_is_put_back() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(ZeroDivisionError), switch_interval(0.001):
        assert sys.getswitchinterval() == pytest.approx(0.001)
        _ = 1 / 0
    assert sys.getswitchinterval() == before


# --- the whole -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tiny: LoadedModel) -> dict[str, Any]:
    saved: list[int] = []
    cores = sorted(cpu_sizes().splits)
    sizes = replace(SIZES, splits=tuple(cores))  # the cores that this machine has
    results = measure_frontier(tiny, "cpu", sizes=sizes, progress=False, save=lambda r: saved.append(len(r)))
    assert len(saved) == len(cores)
    return results


def test_every_point_is_there(results: dict[str, Any]) -> None:
    (state,) = results["states"].values()
    assert list(results["states"]) == ["b3_ctx64"] and results["model"] == "tiny"
    assert list(state["chunked"]) == ["8", "32"] and list(state["streams"]) == ["8", "32"]
    for point in (*state["chunked"].values(), *state["streams"].values(), *state["split"].values()):
        assert 0 < point["p50_ms"] <= point["p99_ms"] and point["prefill_tokens_per_ms"] > 0 and point["steps"] > 0
    for point in state["split"].values():
        assert point["p99_of_alone"] == point["p99_ms"] / point["decode_alone"]["p99_ms"]
        assert point["starting_of_alone"] > 0
    assert state["at_equal_tpot"] == compare(state)


def test_the_gil_was_measured_where_there_is_a_split(results: dict[str, Any]) -> None:
    if not results["prefill_alone"]:
        pytest.skip("one core only")
    assert set(results["gil"]) == {"state", "alone", "beside_5ms", "beside_0.5ms", "beside_process"}
    for beside in ("beside_5ms", "beside_process"):
        assert results["gil"][beside]["other_steps_per_s"] > 0


def test_the_table_has_a_line_for_each_point(results: dict[str, Any]) -> None:
    text = list(lines(results))
    (state,) = results["states"].values()
    assert len(text) == 3 + sum(len(state[kind]) for kind in ("chunked", "split", "streams"))


def test_sizes_of_this_machine() -> None:
    sizes = cpu_sizes()
    assert sizes.num_blocks * 16 >= 4 * (128 + 8) + 64
    assert len(sizes.splits) <= 1 and sizes.whole.startswith("cpu/cores=")
