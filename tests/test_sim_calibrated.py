"""Calibration: a model that is known is found again, and the comparison runs from end to end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from sim_cases import WHOLE, profile

from nanopd.bench.lengths import Uniform
from nanopd.bench.workload import Part, Workload, poisson
from nanopd.costmodel.features import StepFeatures
from nanopd.engine.engine import StepRecord
from nanopd.model.loader import load_model
from nanopd.router.policies import make_policy
from nanopd.sim.calibrated import CPU, Run, calibrate, compare
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.load import run_virtual
from nanopd.sim.recording import Recording

LOAD = Workload("load", (Part(1.0, Uniform(10, 300), Uniform(4, 40)),))


def test_the_model_behind_the_steps_is_found() -> None:
    """Steps of a simulated server whose model is known, with 2 ms of the host between them."""
    steps: list[StepRecord] = []
    cluster = SimulatedCluster(profile(), collocated=["cuda:0"], num_blocks=2000, collocated_chunk=64)
    schedule = poisson(LOAD, 30.0, 10.0, seed=3)
    run_virtual(cluster.driver(make_policy("collocated"), on_step=lambda _, step: steps.append(step)), schedule)
    calls = []
    for k in range(5):
        for call, now in (("begin_step", 0.1 * k), ("finish_step", 0.1 * k + 0.098)):
            calls.append({"call": call, "worker": "collocated0", "planned": True, "now": now})
    fit, host_s = calibrate(Run([], steps, Recording({}, calls, [])))
    assert host_s == pytest.approx(0.002)
    assert fit.quality.median_error < 0.01
    for features in (StepFeatures.decode(12, 3000), StepFeatures.decode(3, 200).with_chunk(64, 128)):
        assert fit.model.step_ms(features) == pytest.approx(WHOLE.step_ms(features), rel=0.05)


def test_every_rate_is_served_and_simulated() -> None:
    load = Workload("tiny", (Part(1.0, Uniform(8, 60), Uniform(4, 12)),))
    setting = replace(CPU, load=load, rates=(10.0, 20.0), calibration_s=1.5, duration_s=1.0, warm_s=0.3)
    result = compare(load_model("dummy:tiny", device="cpu"), setting, use_tqdm=False)
    rows = result["runs"]["collocated"]
    assert set(rows) == {"10", "20"} and result["host_ms"] > 0
    for row in rows.values():
        assert len(row) == 18 and all(math.isfinite(value) for value in row.values())
        for metric in ("ttft", "tpot", "e2e"):
            measured, simulated = row[f"{metric}_p50_measured_ms"], row[f"{metric}_p50_simulated_ms"]
            assert row[f"{metric}_p50_error"] == pytest.approx(simulated / measured - 1)
