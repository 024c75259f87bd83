"""How fast the simulator is: ``python -m nanopd.sim.speed 10000 100000`` simulates that many requests on 8 devices.

Reports, asserts nothing: seconds depend on the machine.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from dataclasses import dataclass

from nanopd.bench.load import LoadOptions
from nanopd.bench.named import named_workload
from nanopd.bench.workload import poisson
from nanopd.costmodel.hardware_profile import preset
from nanopd.router.policies import make_policy
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.layouts import Layout
from nanopd.sim.load import run_virtual


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one run. ``seconds`` is CPU time of this process; ``peak_gb`` the most memory that it ever had, 1e9 bytes."""

    requests: int
    tokens: int
    steps: int
    events: int
    virtual_s: float
    seconds: float
    peak_gb: float

    def __str__(self) -> str:
        per_token = self.seconds / max(1, self.tokens) * 1e6
        n_log_n = self.seconds / max(1.0, self.requests * math.log2(max(1, self.requests))) * 1e6
        return (
            f"{self.requests:>7,} requests, {self.tokens:,} tokens, {self.steps:,} steps, {self.virtual_s:.0f} s "
            f"simulated in {self.seconds:.1f} s: {per_token:.2f} µs per token, {n_log_n:.1f} µs per n log2 n; "
            f"peak memory {self.peak_gb:.2f} GB"
        )


def measure(num_requests: int, layout: Layout, rate: float = 16.0, workload: str = "short", seed: int = 0) -> Speed:
    """Simulate ``num_requests`` at ``rate`` per second: as many as eight H20s of the preset can just bear."""
    cluster = layout.on(SimulatedCluster(preset("h20"), ["cuda:0"], collocated_chunk=512))
    driver = cluster.driver(make_policy("disaggregated" if layout.prefill else "collocated"))
    schedule = poisson(named_workload(workload), rate, num_requests / rate, seed)
    begin = time.process_time()
    records = run_virtual(driver, schedule, options=LoadOptions(drain_s=1e6))
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    tokens = sum(record.tokens for record in records)
    return Speed(len(schedule), tokens, driver.num_steps, driver.num_events, driver.now, seconds, peak / 1e9)


def main(arguments: list[str]) -> int:
    """Both pipelines, for each number of requests. Returns the exit code."""
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,5}", text) for text in arguments):
        print("usage: python -m nanopd.sim.speed [REQUESTS...], each from 1 to 999999", file=sys.stderr)
        return 2
    counts = [int(text) for text in arguments] or [1_000, 10_000]
    for layout in (Layout(collocated=8), Layout(prefill=2, decode=6)):
        for count in counts:
            print(f"{layout}: {measure(count, layout)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
