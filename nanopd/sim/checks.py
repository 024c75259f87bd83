"""What must hold in every simulation, whatever the policy: Little's law, and that nobody idles beside work.

Checked on what other code keeps books of, so that a mistake in the driver shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from nanopd.bench.records import RequestRecord
from nanopd.errors import SimulationError
from nanopd.sim.driver import VirtualDriver
from nanopd.workers.worker import Worker

TOLERANCE = 1e-6  # relative: sums of floats over millions of events


def check_littles_law(driver: VirtualDriver, records: Iterable[RequestRecord]) -> None:
    """L = λW, times the time: unfinished requests integrated over the run are the sum of all times in the system.

    Exact for a run that begins and ends empty (Stidham, "A last word on L = λW", 1974). ``records``: of all requests
    that this driver ever accepted, each with a last output. Raises SimulationError.
    """
    sojourns = math.fsum(record.e2e_s for record in records if record.e2e_s is not None)
    if not math.isclose(driver.request_s, sojourns, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        raise SimulationError(
            f"Little's law is broken: the requests in the system add up to {driver.request_s:g} request-seconds, "
            f"their times in it to {sojourns:g}"
        )


def check_work_conserving(driver: VirtualDriver) -> None:
    """No idle worker has a request that it could go on with. To be called between events, as ``audit``.

    Raises SimulationError that names worker and request.
    """
    for worker in driver.central.workers.values():
        if worker.alive and worker.scheduler.in_flight is None and (found := _could_run(worker)):
            raise SimulationError(f"{worker.name} idles at {driver.now:g} s although it could run {found}")


def _could_run(worker: Worker) -> str | None:
    """Who a scheduler would surely take: seen from the pool and the queues alone, cached prefixes left out."""
    scheduler, blocks = worker.scheduler, worker.block_manager
    free = blocks.num_free_blocks
    for request in (*scheduler.prefilling, *scheduler.running):
        table = request.table
        if table is not None and (request.num_computed_tokens < table.num_tokens or free >= 2):
            return f"{request!r}, which has a seat"
    if scheduler.waiting and scheduler.num_free_seats > 0:
        head = scheduler.waiting[0]
        if -(-head.num_tokens // blocks.block_size) + 1 + blocks.watermark_blocks <= free:
            return f"{head!r}, which waits for a seat"
    return None
