"""Search for the layout with the highest goodput per GPU, by simulation, and with as little of it as possible.

Three prunings: a layout whose upper bound (`nanopd.sim.bounds`) does not reach what another one has attained is not run
(branch and bound); all others run for a short time first, and the worse half, if it is worse by more than the search is
coarse, does not go on to longer runs (successive halving; Karnin et al., ICML 2013); and each goodput search begins
around what the shorter one found. Every layout that drops out says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanopd.bench.goodput import Goodput, find_goodput
from nanopd.bench.load import LoadOptions
from nanopd.bench.metrics import SLO, Summary, summarize
from nanopd.bench.workload import Schedule
from nanopd.costmodel.checks import check_number, is_number, shown
from nanopd.costmodel.files import write_whole
from nanopd.errors import ConfigError
from nanopd.router.decision import Policy
from nanopd.router.policies import AlwaysCollocated, AlwaysDisaggregated
from nanopd.sim.bounds import Bound, bound
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.layouts import Layout
from nanopd.sim.load import run_virtual

ScheduleAt = Callable[[float, float], Schedule]  # (rate, duration in seconds) -> arrivals
ROUNDS = (0.25, 0.5, 1.0)  # shares of the duration
TOLERANCES = (0.2, 0.1, 0.05)  # of the goodput search in each round
SCHEMA = "nanopd-layout-search/1"
SAMPLE = 200  # arrivals that tell what requests are like
LEAST_REQUESTS = 40.0  # expected in a run, which lasts longer for it: of four, one that is late would decide
STAYS = 4.0  # the longest runs last for at least so many times the time that an answer may take
DRAIN_S = 3600.0  # virtual: long answers must not count as unfinished


@dataclass(frozen=True)
class Trial:
    """One layout: its bound, its goodput over the longest runs it had, and how its search ended."""

    layout: Layout
    bound: Bound
    goodput: Goodput | None  # None: never run
    duration_s: float  # of its longest runs; 0: never run
    num_runs: int
    verdict: str

    @property
    def per_gpu(self) -> float:
        return 0.0 if self.goodput is None else self.goodput.rate / self.layout.num_devices


@dataclass(frozen=True)
class Search:
    """The best layout, and all: best first, then by how far they came."""

    best: Trial
    trials: tuple[Trial, ...]

    @property
    def num_runs(self) -> int:
        return sum(trial.num_runs for trial in self.trials)

    def to_json(self, **context: Any) -> dict[str, Any]:
        """Plain values: every layout, best first, with its name, its goodput per device, and why it dropped out."""
        trials = [{"name": str(t.layout), "per_gpu": t.per_gpu, **asdict(t)} for t in self.trials]
        return {"schema": SCHEMA, **context, "num_runs": self.num_runs, "trials": trials}

    def save(self, path: str | Path, **context: Any) -> Path:
        """Write the JSON, whole or not at all; ``context`` says what was searched. Returns the path."""
        return write_whole(path, [json.dumps(self.to_json(**context), indent=1) + "\n"])


def default_policy(layout: Layout) -> Policy:
    """The pure strategy of a layout with workers of one kind."""
    return AlwaysDisaggregated() if layout.prefill else AlwaysCollocated()


def simulate(
    cluster: SimulatedCluster, policy: Policy, schedule: Schedule, slo: SLO, options: LoadOptions | None = None
) -> Summary:
    """One run on fresh workers, in numbers."""
    options = options or LoadOptions()
    driver = cluster.driver(policy)
    records = run_virtual(driver, schedule, options=options)
    return summarize(
        records,
        slo,
        offered=sum(arrival.time_s >= options.warmup_s for arrival in schedule.arrivals),
        duration_s=schedule.duration_s,
        warmup_s=options.warmup_s,
        num_gpus=cluster.hardware.num_gpus,
    )


def search_layouts(
    layouts: Sequence[Layout],
    cluster: SimulatedCluster,
    schedule_at: ScheduleAt,
    slo: SLO,
    *,
    duration_s: float = 60.0,
    target: float = 0.9,
    policy: Callable[[Layout], Policy] = default_policy,
    use_tqdm: bool = True,
) -> Search:
    """The layout with the highest goodput per device.

    Args:
        cluster: hardware, limits and links; its own places do not matter.
        schedule_at: see `ScheduleAt`; the same arrivals for every layout.
        duration_s: of the longest runs, at least. They last longer where answers do: in a run that is over before the
            first batch has ended, everybody finds a free seat.

    Raises ConfigError without a layout, for a duration or target out of range, or for what a cluster refuses in every
    layout.
    """
    if not isinstance(layouts, Sequence) or not layouts or not all(isinstance(one, Layout) for one in layouts):
        raise ConfigError(f"a search needs at least one layout, got {shown(layouts)}")
    if not isinstance(slo, SLO):
        raise ConfigError(f"slo must be an SLO, got {shown(slo)}")
    check_number("the duration of a search", duration_s, above=0.0, unit="seconds")
    if not (is_number(target) and 0.0 < target < 1.0):
        raise ConfigError(f"target must be in (0, 1), got {shown(target)}")
    search = _Search(cluster, schedule_at, slo, target, policy)
    with _progress(use_tqdm) as show:
        search.begin(layouts, show)
        duration_s = max(duration_s, STAYS * max(trial.bound.stay_s for trial in search.trials))
        for share, tolerance in zip(ROUNDS, TOLERANCES, strict=True):
            search.round(duration_s * share, tolerance, show)
            if share < 1.0:
                search.halve(duration_s * share, tolerance)
    ranked = sorted(search.trials, key=lambda trial: (trial.duration_s, trial.per_gpu), reverse=True)
    winner = "the highest goodput per device" if ranked[0].per_gpu else "tried longest; no layout met the SLO"
    best = replace(ranked[0], verdict=winner)
    others = [t if t.verdict else replace(t, verdict="went all the way, and reached less") for t in ranked[1:]]
    return Search(best, (best, *others))


class _Search:
    def __init__(
        self,
        cluster: SimulatedCluster,
        schedule_at: ScheduleAt,
        slo: SLO,
        target: float,
        policy: Callable[[Layout], Policy],
    ) -> None:
        self.cluster, self.schedule_at, self.slo, self.target, self.policy = cluster, schedule_at, slo, target, policy
        self.trials: list[Trial] = []

    def begin(self, layouts: Sequence[Layout], show: Callable[[str], None]) -> None:
        """Bounds first; the most promising runs first, so that it can rule others out."""
        sample = self.schedule_at(float(SAMPLE), 1.0).arrivals[:SAMPLE] or self.schedule_at(1.0, 60.0).arrivals
        for layout in layouts:
            show(f"{layout}, bound")  # hundreds of devices are hundreds of layouts of hundreds of pools
            made = bound(layout.on(self.cluster), sample, self.slo)
            self.trials.append(Trial(layout, made, None, 0.0, 0, ""))
        self.trials.sort(key=lambda trial: trial.bound.rate / trial.layout.num_devices, reverse=True)

    def round(self, duration_s: float, tolerance: float, show: Callable[[str], None]) -> None:
        """Measure all that are still in the race, unless their bound says that they cannot win."""
        best = 0.0  # per device, in this round
        for index, trial in enumerate(self.trials):
            if trial.verdict:
                continue
            show(f"{trial.layout}, {duration_s:g} s")
            limit = trial.bound.slackened(self.target, self.slo, duration_s)
            if limit / trial.layout.num_devices < best:
                verdict = (
                    f"pruned: at most {limit / trial.layout.num_devices:.3g}/s per device ({trial.bound.side} is the "
                    f"limit), and {best:.3g} was reached"
                )
                self.trials[index] = replace(trial, verdict=verdict)
                continue
            self.trials[index] = self._measure(trial, limit, duration_s, tolerance)
            best = max(best, self.trials[index].per_gpu)

    def _measure(self, trial: Trial, limit: float, duration_s: float, tolerance: float) -> Trial:
        cluster, policy = trial.layout.on(self.cluster), self.policy(trial.layout)
        num_runs = 0

        def run(rate: float) -> Summary:
            nonlocal num_runs
            num_runs += 1
            seconds = max(duration_s, LEAST_REQUESTS / rate)
            return simulate(cluster, policy, self.schedule_at(rate, seconds), self.slo, LoadOptions(drain_s=DRAIN_S))

        least = min(4.0 / duration_s, limit / 2)
        guess = limit / 2 if trial.goodput is None or not trial.goodput.rate else trial.goodput.rate
        low, high = max(least, guess / 2), max(least * 2, min(limit, guess * 2))
        found = find_goodput(run, low=low, high=high, target=self.target, tolerance=tolerance)
        while not found.rate and low > least:
            low, high = max(least, low / 8), low
            found = find_goodput(run, low=low, high=high, target=self.target, tolerance=tolerance, known=found.probes)
        return replace(trial, goodput=found, duration_s=duration_s, num_runs=trial.num_runs + num_runs)

    def halve(self, duration_s: float, tolerance: float) -> None:
        """The better half goes on, and whoever is as good within the tolerance of what was measured."""
        racing = sorted((t for t in self.trials if not t.verdict), key=lambda t: t.per_gpu, reverse=True)
        best = racing[0].per_gpu
        for trial in racing[-(-len(racing) // 2) :]:
            if trial.per_gpu * (1 + tolerance) < best:
                verdict = (
                    f"stopped after runs of {duration_s:.3g} s: {trial.per_gpu:.3g}/s per device, the best reached "
                    f"{best:.3g}, and the better half goes on"
                )
                self.trials[self.trials.index(trial)] = replace(trial, verdict=verdict)


@contextmanager
def _progress(use_tqdm: bool) -> Iterator[Callable[[str], None]]:
    if not use_tqdm:
        yield lambda text: None
        return
    from tqdm.auto import tqdm

    with tqdm(desc="layouts", unit="search") as bar:

        def show(text: str) -> None:
            bar.set_postfix_str(text)
            bar.update()

        yield show
