"""Compare strategies: the same arrivals and the same prompts at each rate, on equal hardware, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanopd.bench.goodput import Goodput, Probe, find_goodput
from nanopd.bench.hardware import Hardware, check_equal
from nanopd.bench.load import LoadOptions, run_load
from nanopd.bench.metrics import SLO, Summary, summarize
from nanopd.bench.raw import read_records, write_records
from nanopd.bench.records import RequestRecord
from nanopd.bench.report import Report, Result, first_reasons, make_report, samples
from nanopd.bench.target import Target
from nanopd.bench.workload import Schedule
from nanopd.costmodel.checks import check_number, shown
from nanopd.errors import ConfigError


@dataclass(frozen=True)
class Strategy:
    """A way to serve: ``open`` builds its target, and leaving the context takes it down."""

    name: str
    hardware: Hardware
    open: Callable[[], AbstractContextManager[Target]]


# How a schedule is put on a target: `run_load` by default, a virtual-time driver in a simulation.
Runner = Callable[[Target, Schedule], list[RequestRecord]]


@dataclass(frozen=True)
class GoodputSearch:
    """How finely to search between the lowest and the highest rate, see `find_goodput`."""

    target: float = 0.9
    tolerance: float = 0.05
    max_runs: int = 8


def compare_strategies(
    strategies: Sequence[Strategy],
    schedule_at: Callable[[float], Schedule],
    rates: Sequence[float],
    *,
    slo: SLO,
    vocab_size: int,
    options: LoadOptions | None = None,
    search: GoodputSearch | None = GoodputSearch(),
    raw: Path | None = None,
    allow_unequal: bool = False,
    context: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    run: Runner | None = None,
    on_result: Callable[[Result], None] | None = None,
    use_tqdm: bool = True,
) -> Report:
    """Run every strategy at every rate, then search each one's goodput between the lowest and the highest rate.

    Args:
        schedule_at: rate -> arrivals, such as ``schedules(workload, duration_s, seed)`` or ``trace.at_rate``.
        raw: folder for the records of each run. A run whose records are there is not repeated, and a strategy that has
            all its runs is not even built, so an interrupted comparison goes on where it was.
        allow_unequal: compare unequal hardware too, per GPU and labelled so.
        context: what else makes a run what it is, such as model and policy options; records of another are not taken.
        run: see `Runner`.
        on_result: called after each run.

    Raises:
        UnequalHardwareError: before anything runs.
        ReportError: the records in ``raw`` belong to other arrivals, options or context.
        ConfigError: no strategy, two of one name, no rate, or one at which no request would be measured; before
            anything runs.
    """
    names = [strategy.name for strategy in strategies]
    if not names or len(set(names)) != len(names) or not rates:
        raise ConfigError(f"a comparison needs strategies of different names and rates, got {names} and {list(rates)}")
    if not isinstance(slo, SLO):
        raise ConfigError(f"slo must be an SLO, got {shown(slo)}")
    for rate in rates:
        check_number("a rate", rate, above=0.0, unit="requests per second")
    options = options or LoadOptions()
    hardware = {strategy.name: strategy.hardware for strategy in strategies}
    check_equal(hardware, allow_unequal)
    plans = _Plans(schedule_at)
    for rate in rates:
        _check_plan(plans(rate), rate, options)
    results: list[Result] = []
    goodput: dict[str, Goodput] = {}
    for strategy in strategies:
        bench = _Bench(strategy, plans, slo, vocab_size, options, dict(context or {}), raw, run, use_tqdm)
        with bench:
            for rate in sorted(set(rates)):
                results.append(bench.result(rate))
                if on_result is not None:
                    on_result(results[-1])
            if search is not None:
                goodput[strategy.name] = _search(bench, rates, search)
    first = plans(min(rates))
    return make_report(
        results,
        hardware,
        allow_unequal=allow_unequal,
        workload=first.name,
        note=first.note,
        slo=slo,
        seed=first.seed,
        options={**asdict(options), **(context or {}), "vocab_size": vocab_size, "arrivals": plans.described()},
        goodput=goodput,
        environment=dict(environment or {}),
    )


def _check_plan(plan: Schedule, rate: float, options: LoadOptions) -> None:
    """Raises ConfigError if the warm-up leaves nothing to measure, or nobody comes."""
    if options.warmup_s >= plan.duration_s:
        raise ConfigError(f"a warm-up of {options.warmup_s:g} s leaves nothing of {plan.duration_s:g} s to measure")
    if not any(arrival.time_s >= options.warmup_s for arrival in plan.arrivals):
        raise ConfigError(
            f"at {rate:g} requests/s none arrives between {options.warmup_s:g} s and {plan.duration_s:g} s: "
            "nothing would be measured; take a higher rate or a longer time"
        )


def _search(bench: _Bench, rates: Sequence[float], search: GoodputSearch) -> Goodput:
    """The rates that ran anyway are known to it; each further one is a run."""
    known = [Probe(rate, s.attained, s.offered) for rate, s in bench.summaries.items()]
    low, high = min(rates), max(rates)
    return find_goodput(
        bench.summary,
        low=low,
        high=high if high > low else low * 2,
        target=search.target,
        tolerance=search.tolerance,
        max_runs=search.max_runs,
        num_gpus=bench.strategy.hardware.num_gpus,
        known=known,
    )


class _Plans:
    """Schedules by rate, made once: strategies share the very same object."""

    def __init__(self, schedule_at: Callable[[float], Schedule]) -> None:
        self._schedule_at = schedule_at
        self._made: dict[float, Schedule] = {}

    def __call__(self, rate: float) -> Schedule:
        if rate not in self._made:
            self._made[rate] = self._schedule_at(rate)
        return self._made[rate]

    def described(self) -> dict[str, dict[str, Any]]:
        """By rate: how many arrivals, how many lengths were clipped, the fingerprint."""
        return {
            f"{rate!r}": {
                "offered": len(plan),
                "duration_s": plan.duration_s,
                "clipped_prompts": plan.num_clipped_prompts,
                "clipped_outputs": plan.num_clipped_outputs,
                "fingerprint": plan.fingerprint(),
            }
            for rate, plan in sorted(self._made.items())
        }


class _Bench:
    """The runs of one strategy. Its target is built when the first run needs it."""

    def __init__(
        self,
        strategy: Strategy,
        plans: _Plans,
        slo: SLO,
        vocab_size: int,
        options: LoadOptions,
        context: dict[str, Any],
        raw: Path | None,
        run: Runner | None,
        use_tqdm: bool,
    ) -> None:
        self.strategy, self.summaries = strategy, dict[float, Summary]()
        self._plans, self._slo, self._vocab_size, self._options = plans, slo, vocab_size, options
        self._context, self._raw, self._run, self._use_tqdm = context, raw, run, use_tqdm
        self._stack = ExitStack()
        self._target: Target | None = None

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()  # whatever ended it, the target is taken down as usual

    def summary(self, rate: float) -> Summary:
        return self.result(rate).summary

    def result(self, rate: float) -> Result:
        plan, warmup_s = self._plans(rate), self._options.warmup_s
        _check_plan(plan, rate, self._options)  # the search asks for rates of its own
        records = self._records(rate, plan)
        summary = summarize(
            records,
            self._slo,
            offered=sum(a.time_s >= warmup_s for a in plan.arrivals),
            duration_s=plan.duration_s,
            warmup_s=warmup_s,
            num_gpus=self.strategy.hardware.num_gpus,
        )
        self.summaries[rate] = summary
        return Result(
            self.strategy.name,
            rate,
            summary,
            plan.fingerprint(),
            samples(records, warmup_s),
            first_reasons(records, warmup_s),
        )

    def _records(self, rate: float, plan: Schedule) -> list[RequestRecord]:
        path = self._path(rate)
        header = {
            "strategy": self.strategy.name,
            "hardware": asdict(self.strategy.hardware),
            "rate": rate,
            "schedule": plan.fingerprint(),
            "vocab_size": self._vocab_size,
            "options": asdict(self._options),
            "context": self._context,
        }
        if path is not None and path.exists():
            return read_records(path, header)
        records = self._measure(rate, plan)
        if path is not None:
            write_records(path, header, records)
            records = read_records(path, header)  # the same numbers now as after a restart
        return records

    def _measure(self, rate: float, plan: Schedule) -> list[RequestRecord]:
        if self._target is None:
            self._target = self._stack.enter_context(self.strategy.open())
        if self._run is not None:
            return self._run(self._target, plan)
        return run_load(
            self._target,
            plan,
            vocab_size=self._vocab_size,
            options=self._options,
            use_tqdm=self._use_tqdm,
            label=f"{self.strategy.name} @ {rate:g}/s",
        )

    def _path(self, rate: float) -> Path | None:
        if self._raw is None:
            return None
        return self._raw / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.strategy.name)}-{rate!r}.jsonl"
