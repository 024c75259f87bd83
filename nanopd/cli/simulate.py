"""``nanopd simulate``: the benchmark on devices that need not be there, and the search for how many should do what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanopd.bench.compare import GoodputSearch, Strategy, compare_strategies
from nanopd.bench.load import LoadOptions
from nanopd.bench.metrics import SLO
from nanopd.bench.report import basic_environment
from nanopd.bench.target import Target
from nanopd.bench.workload import Schedule
from nanopd.cli.serve_bench import (
    PURE,
    arrivals,
    check_paths,
    check_strategies,
    check_times,
    parse_rates,
    policy_maker,
    save_figures,
    show,
)
from nanopd.costmodel.hardware_profile import load_profile
from nanopd.errors import ConfigError
from nanopd.router.predictor import OutputLengthPredictor
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.driver import VirtualDriver
from nanopd.sim.layouts import Layout, ratios, splits
from nanopd.sim.load import run_virtual
from nanopd.sim.search import Search, search_layouts

# Arguments of `SimulatedCluster`, and the options that set them to the same value in the same unit.
OPTIONS = {
    "link_gb_s": "--link",
    "bus_gb_s": "--bus",
    "memory_gb": "--memory",
    "num_blocks": "--num-blocks",
    "collocated_chunk": "--chunk",
    "max_model_len": "--max-model-len",
}
VOCAB = 256  # of simulated prompts, see ``nanopd.sim.load.Prompts``


@dataclass(frozen=True)
class Counts:
    """Devices by role, as the options say; None: not said."""

    gpus: int | None
    collocated: int | None
    prefill: int | None
    decode: int | None
    split: tuple[int, int] | None

    @property
    def num_devices(self) -> int:
        """A split card has a worker of each role; other devices have one."""
        said = self._said.values()
        return self.gpus or (max(said, default=0) if self.split is not None else sum(said)) or 1

    @property
    def _said(self) -> dict[str, int]:
        roles = {"collocated": self.collocated, "prefill": self.prefill, "decode": self.decode}
        return {role: count for role, count in roles.items() if count is not None}

    def of(self, strategy: str) -> Layout:
        """What ``strategy`` runs on. The pure ones use all devices; the others all that the counts say.

        Raises ConfigError if the counts do not add up to ``gpus``, or do not allow the strategy.
        """
        n = self.num_devices
        self._check(strategy, n)
        if strategy == "collocated":
            return Layout(collocated=n)
        if self.split is not None:
            mixed = strategy != "disaggregated"
            return Layout(collocated=n if mixed else 0, prefill=n, decode=n, split=self.split, beside=mixed)
        if strategy == "disaggregated":
            prefill = self._prefill(n)
            layout = Layout(prefill=prefill, decode=n - prefill if self.decode is None else self.decode)
        else:
            layout = Layout(self.collocated or 0, self.prefill or 0, self.decode or 0)
        if layout.num_devices != n:
            raise ConfigError(f"strategy {strategy!r} would use {layout.num_devices} of {n} GPUs ({layout})")
        return layout

    def _check(self, strategy: str, n: int) -> None:
        """Raises ConfigError for counts that contradict ``n``. A pure strategy may leave roles to other strategies."""
        said, total = self._said, sum(self._said.values())
        shown = ", ".join(f"--{role} {count}" for role, count in said.items())
        if self.split is not None:
            unused = {"collocated": ("prefill", "decode"), "disaggregated": ("collocated",)}.get(strategy, ())
            if any(count != n and (count or role not in unused) for role, count in said.items()):
                raise ConfigError(f"a split GPU has one worker of each role: {n} of them cannot be {shown}")
            return
        complete = self.collocated is not None if strategy == "collocated" else bool(self.collocated)
        if total > n or (complete and total < n):
            raise ConfigError(f"strategy {strategy!r} uses all of {n} GPUs, and {shown} are {total}")

    def _prefill(self, n: int) -> int:
        """A fourth, if nobody says."""
        if n < 2:
            raise ConfigError("prefill and decode need two GPUs, or --split on one")
        if self.prefill is not None:
            return self.prefill
        return max(1, n // 4) if self.decode is None else n - self.decode

    def strategies(self) -> list[str]:
        """Those to compare if nobody says which. Raises ConfigError for one role's device alone."""
        if self.split is None and self.num_devices < 2 and (self.prefill or self.decode):
            raise ConfigError("prefill and decode need two GPUs, or --split on one")
        return list(PURE) if self.split is not None or self.num_devices > 1 else ["collocated"]

    def layouts(self, cluster: SimulatedCluster) -> list[Layout]:
        """Those to search: every ratio, and on one device every split that was measured.

        Raises ConfigError for counts of roles that do not add up to ``gpus``.
        """
        n, total = self.num_devices, sum(self._said.values())
        if total not in (0, n):
            raise ConfigError(f"--search tries every ratio of {n} GPUs, and the counts of the roles are {total}")
        return [*ratios(n), *(splits(cluster.profile) if n == 1 else ())]


@contextmanager
def _naming_options() -> Iterator[None]:
    """Messages of errors inside name the command's options, where they name the arguments behind them."""
    try:
        yield
    except ConfigError as error:
        words = rf"\b({'|'.join(OPTIONS)})\b"
        error.args = (re.sub(words, lambda match: OPTIONS[match[1]], str(error)),)
        raise


@_naming_options()
def run_simulate(
    *,
    hardware: str,
    counts: Counts,
    strategies: Sequence[str],
    policy_options: Sequence[str],
    workload: str,
    limit: int | None,
    rates: str,
    duration: float,
    slo_ttft_ms: float,
    slo_tpot_ms: float,
    options: LoadOptions,
    seed: int,
    goodput: bool,
    search: bool,
    out: Path | None,
    figures: Path | None,
    cluster_options: dict[str, Any],
) -> None:
    """See the command's options. Raises NanoPDError."""
    if search:
        _check_search(strategies, policy_options, counts, options, figures)
    wanted = parse_rates(rates)
    check_paths(out, figures)
    check_times(duration, options)
    profile = load_profile(hardware)
    slo = SLO(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3)
    cluster = SimulatedCluster(profile, ["cuda:0"], **{k: v for k, v in cluster_options.items() if v is not None})
    console = Console()
    environment = basic_environment("nanopd simulate") | {
        "simulated": profile.device, "model": profile.model, "profile": profile.source or hardware,
    }  # fmt: skip
    if search:
        found = _run_search(counts.layouts(cluster), cluster, workload, limit, duration, slo, seed)
        show_search(found, console)
        if out is not None:
            context = {"workload": workload, "duration_s": duration, "slo": asdict(slo), "seed": seed}
            print(f"written: {found.save(out, **context, environment=environment)}")
        return
    schedule_at = arrivals(workload, duration, seed, scale=1.0, limit=limit, max_model_len=cluster.max_model_len)
    names = list(strategies) or counts.strategies()
    check_strategies(names, policy_options)
    policy = policy_maker(hardware, policy_options, slo_ttft_ms, slo_tpot_ms)

    def run(target: Target, schedule: Schedule) -> list[Any]:
        assert isinstance(target, VirtualDriver)
        return run_virtual(target, schedule, options=options, use_tqdm=True)

    report = compare_strategies(
        [_strategy(name, counts.of(name).on(cluster), policy(name)) for name in names],
        schedule_at,
        wanted,
        slo=slo,
        vocab_size=VOCAB,
        options=options,
        search=GoodputSearch() if goodput else None,
        run=run,
        environment=environment,
    )
    show(report, console)
    if out is not None:
        print(f"written: {report.save(out)}")
    if figures is not None:
        save_figures(report, figures)


def _check_search(
    strategies: Sequence[str], policy_options: Sequence[str], counts: Counts, options: LoadOptions, figures: Path | None
) -> None:
    """Raises ConfigError for options that a search would not look at."""
    unused = {
        "--strategy": strategies,
        "--policy": policy_options,
        "--split": counts.split,
        "--figures": figures,
        "--timeout, --warmup or --drain": options != LoadOptions(),
    }
    if given := [name for name, value in unused.items() if value]:
        raise ConfigError(f"--search tries every layout with the policy that it is for: drop {', '.join(given)}")


def _strategy(name: str, cluster: SimulatedCluster, policy: Callable[[], Any]) -> Strategy:
    policy()  # what is wrong with it shows now

    @contextmanager
    def open_driver() -> Iterator[Target]:
        with cluster.driver(policy(), predictor=OutputLengthPredictor()) as driver:
            yield driver  # type: ignore[misc]  # its `clock` is a method

    return Strategy(name, cluster.hardware, open_driver)


def _run_search(
    layouts: Sequence[Layout],
    cluster: SimulatedCluster,
    workload: str,
    limit: int | None,
    duration: float,
    slo: SLO,
    seed: int,
) -> Search:
    def schedule_at(rate: float, seconds: float) -> Schedule:
        made = arrivals(workload, seconds, seed, scale=1.0, limit=limit, max_model_len=cluster.max_model_len)
        return made(rate)

    return search_layouts(layouts, cluster, schedule_at, slo, duration_s=duration)


def show_search(found: Search, console: Console) -> None:
    """All layouts, the best first, with what was pruned and why."""
    table = Table(box=None, title_justify="left", pad_edge=False, title="Goodput by layout, requests/s per GPU")
    for heading in ("layout", "goodput", "bound", "runs", "why"):
        table.add_column(heading, justify="left" if heading in ("layout", "why") else "right")
    for trial in found.trials:
        table.add_row(
            str(trial.layout),
            f"{trial.per_gpu:.3g}" if trial.goodput is not None else "-",
            f"{trial.bound.rate / trial.layout.num_devices:.3g}",
            str(trial.num_runs),
            escape(trial.verdict),
        )
    console.print(table)
    if not found.best.per_gpu:
        console.print(
            f"No layout met the SLO at any rate, after {found.num_runs} runs: take a workload with shorter prompts and "
            "outputs, a longer --duration, or allow more with --slo-ttft and --slo-tpot."
        )
        return
    console.print(f"{found.best.layout}: {found.best.per_gpu:.4g} requests/s per GPU, after {found.num_runs} runs")


def parse_split(text: str | None) -> tuple[int, int] | None:
    """ "48/84" as SMs for (decode, prefill). Raises ConfigError for other texts."""
    if text is None:
        return None
    parts = text.split("/")
    if len(parts) != 2 or not all(re.fullmatch(r"0*[1-9][0-9]{0,3}", part) for part in parts):
        raise ConfigError(f"a split is SMS_FOR_DECODE/SMS_FOR_PREFILL, such as 48/84, got {text!r}")
    return int(parts[0]), int(parts[1])
