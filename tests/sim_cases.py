"""Simulated machines for the simulator's tests: a profile with round numbers, and drivers over few blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nanopd.bench.records import RequestRecord
from nanopd.bench.workload import Arrival, Schedule
from nanopd.costmodel.hardware_profile import HardwareProfile
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.scheduler import Scheduler
from nanopd.kv.block_manager import BlockManager
from nanopd.router.central import CentralConfig
from nanopd.router.policies import make_policy
from nanopd.sim.checks import check_littles_law, check_work_conserving
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.driver import VirtualDriver
from nanopd.sim.load import run_virtual
from nanopd.sim.runner import SimulatedRunner
from nanopd.workers.worker import CollocatedWorker
from tests.fake_cluster import LAYOUT

WHOLE = StepTimeModel(base_ms=4.0, token_ms=0.02, kv_token_ms=1e-5, sequence_ms=0.01)
HALF = StepTimeModel(base_ms=5.0, token_ms=0.04, kv_token_ms=2e-5, sequence_ms=0.01)


def profile(**changes: Any) -> HardwareProfile:
    values: dict[str, Any] = {
        "device": "NVIDIA H200",
        "model": "qwen3-8b",
        "dtype": "bfloat16",
        "alpha_ms_per_token": 0.02,
        "beta_ms": 4.0,
        "gamma_ms_per_token": 0.01,
        "batch_thresh": 16.0,
        "kv_bytes_per_token": 147_456,
        "bandwidth_gb_s": 50.0,
        "num_blocks": 4000,
        "block_size": 16,
        "step_time": {"whole device": WHOLE, "sm=48": HALF, "sm=84": HALF},
    }
    return HardwareProfile(**{**values, **changes})


def cluster(collocated: int = 0, prefill: int = 0, decode: int = 0, **options: Any) -> SimulatedCluster:
    names = [f"cuda:{i}" for i in range(collocated + prefill + decode)]
    options.setdefault("profile", profile())
    options.setdefault("collocated_chunk", 256)
    return SimulatedCluster(
        collocated=names[:collocated],
        prefill=names[collocated : collocated + prefill],
        decode=names[collocated + prefill :],
        **options,
    )


def check_all(driver: VirtualDriver) -> None:
    """After each event: nobody idles beside work, and what the queues count is what they hold."""
    check_work_conserving(driver)
    for worker in driver.central.workers.values():
        scheduler = worker.scheduler
        waiting = (*scheduler.waiting, *scheduler.prefilling)
        assert scheduler.uncomputed_tokens == sum(request.remaining_prefill for request in waiting)


def checked_run(
    made: SimulatedCluster,
    schedule: Schedule,
    policy: str = "round-robin",
    config: CentralConfig | None = None,
    **load: Any,
) -> tuple[VirtualDriver, list[RequestRecord]]:
    """A run in which nobody may idle beside work, and after which the books balance and all pools are whole."""
    driver = made.driver(make_policy(policy), config=config, audit=check_all)
    records = run_virtual(driver, schedule, **load)
    check_rest(driver)
    check_littles_law(driver, records)
    return driver, records


def check_rest(driver: VirtualDriver) -> None:
    """Nothing is left anywhere once all requests have ended."""
    assert driver.central.num_unfinished == 0
    for worker in driver.central.workers.values():
        blocks = worker.block_manager
        assert blocks.num_free_blocks == blocks.num_blocks, worker
        blocks.check_integrity([], [])
        assert worker.scheduler.num_free_seats == worker.scheduler.config.max_num_seqs


def schedule_of(arrivals: Iterable[tuple[float, int, int]], duration_s: float = 1.0) -> Schedule:
    """From (time, prompt tokens, output tokens)."""
    made = tuple(Arrival(i, time, prompt, output) for i, (time, prompt, output) in enumerate(arrivals))
    return Schedule("test", made, duration_s, 0)


def single_server(service: Iterable[float], **options: Any) -> VirtualDriver:
    """One seat, one step a request: a queue with a single server, first come, first served."""
    times = iter(service)
    blocks = BlockManager(8, 16, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(1, 16, None, 16), blocks)
    worker = CollocatedWorker("server", scheduler, SimulatedRunner(lambda plan: next(times)), LAYOUT)
    return VirtualDriver([worker], make_policy("collocated"), **options)
