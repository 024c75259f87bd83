"""Goodput: the highest rate at which enough requests meet their SLO, searched by bisection.

It knows no clock and no server: a run is a function from rate to summary, which may measure, simulate or look up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from nanopd.costmodel.checks import check_count, check_number, is_number, shown
from nanopd.errors import ConfigError

Z = 1.645  # a probe whose 90 % interval holds the target is borderline


class Attained(Protocol):
    """A `nanopd.bench.Summary`, as far as this needs it."""

    @property
    def attained(self) -> int: ...
    @property
    def offered(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Probe:
    """What is known of one rate: requests within their SLO, of those offered, over ``runs`` runs."""

    rate: float
    attained: int
    offered: int
    runs: int = 1

    @property
    def attainment(self) -> float:
        return self.attained / self.offered if self.offered else 0.0

    def is_borderline(self, target: float) -> bool:
        """Whether chance could have decided on which side of ``target`` this probe lies (normal approximation)."""
        error = math.sqrt(target * (1 - target) / self.offered) if self.offered else math.inf
        return abs(self.attainment - target) < Z * error


@dataclass(frozen=True)
class Goodput:
    """The answer, how it was found, and how far to trust it."""

    rate: float  # requests per second; 0: not even the lowest rate attains
    per_gpu: float
    upper: float | None  # the lowest rate known to fail; None: none failed
    reason: str
    probes: tuple[Probe, ...]  # by rate


def find_goodput(
    run: Callable[[float], Attained],
    *,
    low: float,
    high: float,
    target: float = 0.9,
    tolerance: float = 0.05,
    max_runs: int = 12,
    repeats: int = 1,
    num_gpus: int = 1,
    known: Iterable[Probe] = (),
) -> Goodput:
    """The highest rate in [``low``, ``high``] with attainment >= ``target``, to a factor of 1 + ``tolerance``.

    Bisection on the logarithm of the rate. Pruning: ``known`` results narrow the bracket before anything runs, and
    rates outside of the bracket never run. Noise: a borderline probe is run up to ``repeats`` times, and pooled. If
    attainment is not monotonic (some rate fails below one that passes), the answer stays below the lowest rate that
    fails, and the reason says so: an operator cannot use an island beyond a rate that fails.

    Raises ConfigError if an argument is out of range.
    """
    if not (is_number(low) and is_number(high) and 0 < low < high):
        raise ConfigError(f"goodput needs rates 0 < low < high, got {shown(low)} and {shown(high)}")
    if not (is_number(target) and 0 < target < 1):
        raise ConfigError(f"target must be in (0, 1), got {shown(target)}")
    check_number("tolerance", tolerance, above=0.0)
    for name, count in (("max_runs", max_runs), ("repeats", repeats), ("num_gpus", num_gpus)):
        check_count(name, count, least=1)
    search = _Search(run, target, max_runs, repeats, {p.rate: p for p in known if low <= p.rate <= high})
    finished = search.bisect(low, high, tolerance)
    best, upper = search.best(), search.lowest_failure()
    reason = _reason(search, best, upper, low, high, tolerance, finished)
    return Goodput(best, best / num_gpus, upper, reason, tuple(sorted(search.probes.values(), key=lambda p: p.rate)))


class _Search:
    def __init__(
        self,
        run: Callable[[float], Attained],
        target: float,
        max_runs: int,
        repeats: int,
        probes: dict[float, Probe],
    ) -> None:
        self.run, self.target, self.repeats = run, target, repeats
        self.runs_left = max_runs
        self.probes = probes

    def passes(self, probe: Probe) -> bool:
        return probe.attainment >= self.target

    def lowest_failure(self) -> float | None:
        return min((rate for rate, probe in self.probes.items() if not self.passes(probe)), default=None)

    def best(self) -> float:
        """The highest rate that passes below all that fail; 0 if there is none."""
        limit = self.lowest_failure() or math.inf
        return max((rate for rate, probe in self.probes.items() if rate < limit), default=0.0)

    def islands(self) -> list[float]:
        """Rates that pass above one that fails."""
        limit = self.lowest_failure() or math.inf
        return sorted(rate for rate, probe in self.probes.items() if rate > limit and self.passes(probe))

    def bisect(self, low: float, high: float, tolerance: float) -> bool:
        """False: the runs were used up first."""
        if not self.best() and self.lowest_failure() != low and not self.probe(low):
            return False
        if self.best() and self.lowest_failure() is None and self.best() < high and not self.probe(high):
            return False
        while (best := self.best()) and (upper := self.lowest_failure()) and upper > best * (1 + tolerance):
            if not self.probe(math.sqrt(best * upper)):
                return False
        return True

    def probe(self, rate: float) -> bool:
        """Run ``rate``, more than once if the result is borderline. False: no run is left."""
        if self.runs_left < 1:
            return False
        probe = Probe(rate, 0, 0, 0)
        while probe.runs < self.repeats and self.runs_left > 0:
            self.runs_left -= 1
            result = self.run(rate)
            probe = Probe(rate, probe.attained + result.attained, probe.offered + result.offered, probe.runs + 1)
            if not probe.is_borderline(self.target):
                break
        self.probes[rate] = probe
        return True


def _reason(
    search: _Search, best: float, upper: float | None, low: float, high: float, tolerance: float, finished: bool
) -> str:
    share = f"{search.target:.0%}"
    if best == 0:
        failed = search.probes[upper] if upper is not None else Probe(low, 0, 0, 0)
        text = (
            f"already {failed.rate:g}/s, the lowest rate run, attains only {failed.attainment:.0%},"
            f" where {share} are asked"
        )
    elif upper is None:
        text = f"no rate up to {max(search.probes):g}/s fails {share}: the true goodput is at least this"
    else:
        text = (
            f"{best:.4g}/s attains {search.probes[best].attainment:.0%}, {upper:.4g}/s only"
            f" {search.probes[upper].attainment:.0%}, where {share} are asked"
        )
    if not finished:
        text += "; the runs were used up before the bracket was narrow enough"
    if islands := search.islands():
        where = ", ".join(f"{rate:.4g}/s" for rate in islands)
        text += f"; attainment is not monotonic: {where} attains again, and is left out"
    doubtful = [p for p in search.probes.values() if p.rate in (best, upper) and p.is_borderline(search.target)]
    if doubtful and best:
        worst = min(p.offered for p in doubtful)
        text += f"; with {worst} requests a run, chance may have decided at the edge"
    return text
