"""Calibrate a simulation on this device, then hold it against runs that it has not seen.

    python -m nanopd.sim.calibrated                 # smollm2 on the CPU, dummy:qwen3-8b on a GPU

One collocated worker serves a load; the step-time model is fitted to its steps. Then other arrivals at several rates
are served for real and simulated. Nothing is set by hand: the host's time between two steps is read off the recording.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanopd.bench.lengths import Uniform
from nanopd.bench.load import run_load
from nanopd.bench.metrics import SLO, Summary, summarize
from nanopd.bench.records import RequestRecord
from nanopd.bench.workload import Part, Schedule, Workload, poisson
from nanopd.costmodel.features import StepFeatures, StepPoint
from nanopd.costmodel.hardware_profile import WHOLE, HardwareProfile
from nanopd.costmodel.step_fit import StepTimeFit, fit_step_time
from nanopd.engine.engine import StepRecord
from nanopd.router.policies import make_policy
from nanopd.router.server import Server
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.fidelity import differences, table
from nanopd.sim.load import run_virtual
from nanopd.sim.recording import Recorder, Recording

if TYPE_CHECKING:
    from nanopd.model.loader import LoadedModel

OPEN = SLO(ttft_s=1e3, tpot_s=1e3)  # only times are compared


@dataclass(frozen=True)
class Setting:
    """What is served. ``calibration_s`` and ``duration_s``: seconds of arrivals; ``warm_s``: before each run."""

    load: Workload
    rates: tuple[float, ...]
    calibration_s: float
    duration_s: float
    warm_s: float
    limits: dict[str, Any]  # of the worker, as for ``Cluster.build``


CPU = Setting(
    Workload("small", (Part(1.0, Uniform(16, 128), Uniform(16, 48)),)),
    rates=(0.8, 1.4, 2.0),
    calibration_s=40.0,
    duration_s=40.0,
    warm_s=2.0,
    limits={"num_blocks": 1024, "max_num_seqs": 16, "collocated_chunk": 64, "max_model_len": 1024},
)
GPU = Setting(
    Workload("light", (Part(1.0, Uniform(512, 1536), Uniform(32, 96)),)),
    rates=(12.0, 17.0, 22.0),
    calibration_s=8.0,
    duration_s=8.0,
    warm_s=2.0,
    limits={"num_blocks": 8192, "max_num_seqs": 64, "collocated_chunk": 512, "max_model_len": 4096},
)


@dataclass(frozen=True)
class Run:
    """A served schedule: what became of its requests, its steps, and the recording."""

    records: list[RequestRecord]
    steps: list[StepRecord]
    recording: Recording


def serve(loaded: LoadedModel, setting: Setting, schedule: Schedule) -> Run:
    """Serve ``schedule`` on one collocated worker of the model's device, after a warm-up that is left out."""
    from nanopd.workers.cluster import Cluster

    steps: list[StepRecord] = []
    place = str(loaded.model.device)
    vocab_size = loaded.config.vocab_size
    with (
        Cluster.build(loaded, collocated=[place], use_tqdm=False, **setting.limits) as cluster,
        Server.of(cluster, make_policy("collocated"), on_step=lambda _, step: steps.append(step)) as server,
    ):
        recorder = Recorder(server)
        warm_up = poisson(setting.load, schedule.rate, setting.warm_s, seed=99)
        run_load(server, warm_up, vocab_size=vocab_size, use_tqdm=False)
        server.drain()
        steps.clear()
        records = run_load(server, schedule, vocab_size=vocab_size, use_tqdm=False)
        server.drain()
    return Run(records, list(steps), recorder.recording)


def calibrate(run: Run) -> tuple[StepTimeFit, float]:
    """The step-time model of a run's steps, and the median seconds of the host between two of them."""
    points = [StepPoint(StepFeatures.of(step.plan), 1e3 * (step.end - step.start)) for step in run.steps]
    return fit_step_time(points, name="this device"), statistics.median(run.recording.host_seconds("collocated0"))


def compare(loaded: LoadedModel, setting: Setting, *, use_tqdm: bool = True) -> dict[str, Any]:
    """Calibrate at the middle rate, then measure and simulate all rates, with other arrivals.

    Returns ``{"step_error", "host_ms", "rates", "runs": {"collocated": {rate: differences}}}``, see
    `nanopd.sim.fidelity`; ``step_error`` is the median error of the held-out steps.
    """
    from tqdm.auto import tqdm

    middle = setting.rates[len(setting.rates) // 2]
    with tqdm(total=1 + len(setting.rates), desc="Serving", disable=not use_tqdm) as bar:
        fit, host_s = calibrate(serve(loaded, setting, poisson(setting.load, middle, setting.calibration_s, seed=1)))
        bar.update()
        twin = SimulatedCluster(
            profile_of(loaded, fit), collocated=["cuda:0"], host_s=host_s, block_size=16, **setting.limits
        )
        rows: dict[str, dict[str, float]] = {}
        for rate in setting.rates:
            schedule = poisson(setting.load, rate, setting.duration_s, seed=2)
            measured = serve(loaded, setting, schedule).records
            simulated = run_virtual(twin.driver(make_policy("collocated")), schedule)
            rows[f"{rate:g}"] = differences(_summary(measured, schedule).to_json(), _summary(simulated, schedule))
            bar.update()
    return {
        "model": loaded.config.name,
        "step_error": fit.quality.median_error,
        "host_ms": host_s * 1e3,
        "duration_s": setting.duration_s,
        "runs": {"collocated": rows},
    }


def profile_of(loaded: LoadedModel, fit: StepTimeFit) -> HardwareProfile:
    """A profile whose steps take what was fitted. Its analytical numbers are placeholders that no step asks for."""
    dtype = loaded.model.dtype
    return HardwareProfile(
        device="this device",
        model=loaded.config.name,
        dtype=str(dtype).removeprefix("torch."),
        alpha_ms_per_token=1.0,
        beta_ms=1.0,
        gamma_ms_per_token=0.0,
        batch_thresh=1.0,
        kv_bytes_per_token=loaded.config.kv_bytes_per_token(dtype.itemsize),
        step_time={WHOLE: fit.model},
    )


def _summary(records: Sequence[RequestRecord], schedule: Schedule) -> Summary:
    return summarize(records, OPEN, offered=len(schedule), duration_s=schedule.duration_s)


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    from nanopd.model.loader import load_model
    from nanopd.ops.measure import write_result

    parser = argparse.ArgumentParser(prog="python -m nanopd.sim.calibrated", description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="default smollm2 on the CPU, dummy:qwen3-8b on a GPU")
    parser.add_argument("--threads", type=int, help="of torch on the CPU; fewer than cores leave room for the server")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    on_gpu = options.device.startswith("cuda")
    model = options.model or ("dummy:qwen3-8b" if on_gpu else "smollm2")
    result = compare(load_model(model, device=options.device), GPU if on_gpu else CPU)
    print(table(result["runs"]))
    threads = "" if options.threads is None else f" --threads {options.threads}"
    command = f"python -m nanopd.sim.calibrated --model {model} --device {options.device}{threads}"
    print("written:", write_result("calibrated", result, device=options.device, command=command))


if __name__ == "__main__":
    main()
