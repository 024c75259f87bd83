"""``nanopd bench``: strategies under the same load, as a table, a JSON report and figures."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanopd.bench.compare import GoodputSearch, Strategy, compare_strategies
from nanopd.bench.hardware import device_word
from nanopd.bench.load import LoadOptions
from nanopd.bench.metrics import SLO, Percentiles
from nanopd.bench.named import named_workload, workload_names
from nanopd.bench.report import Report
from nanopd.bench.traces import load_trace
from nanopd.bench.workload import Schedule, Workload, schedules
from nanopd.costmodel.checks import check_count, check_number
from nanopd.costmodel.files import check_writable
from nanopd.costmodel.hardware_profile import load_profile
from nanopd.errors import ConfigError
from nanopd.router.policies import make_policy, policy_class
from nanopd.workers.spec import DeviceSpec, parse_devices

if TYPE_CHECKING:
    from nanopd.model.loader import LoadedModel

MOST_RATE = 1_000_000  # requests per second
_WIDE = 1000  # columns of a console on which every table fits
PURE = ("collocated", "disaggregated")  # strategies that use only workers of their own kind


@dataclass(frozen=True)
class Places:
    """Where workers may run."""

    collocated: list[DeviceSpec]
    prefill: list[DeviceSpec]
    decode: list[DeviceSpec]

    @classmethod
    def parse(cls, collocated: str, prefill: str, decode: str, default: str) -> Places:
        """Without any place: collocated on ``default``. Raises ConfigError for prefill without decode, or reverse."""
        places = cls(parse_devices(collocated), parse_devices(prefill), parse_devices(decode))
        if bool(places.prefill) != bool(places.decode):
            raise ConfigError(f"prefill and decode workers need each other: --prefill {prefill!r} --decode {decode!r}")
        if not places.collocated and not places.prefill:
            return cls([DeviceSpec.parse(default)], [], [])
        return places

    def of(self, strategy: str) -> dict[str, list[DeviceSpec]]:
        """The places that ``strategy`` uses. Raises ConfigError if it has none."""
        used = {
            "collocated": self.collocated if strategy != "disaggregated" else [],
            "prefill": self.prefill if strategy != "collocated" else [],
            "decode": self.decode if strategy != "collocated" else [],
        }
        if not any(used.values()):
            raise ConfigError(
                f"strategy {strategy!r} has no place to run: give --collocated, or --prefill and --decode"
            )
        return used

    def strategies(self) -> list[str]:
        """What these places allow, if nobody says which."""
        return [name for name, places in zip(PURE, (self.collocated, self.prefill), strict=True) if places]


def run_bench(
    *,
    model: str,
    dtype: str | None,
    collocated: str,
    prefill: str,
    decode: str,
    strategies: Sequence[str],
    profile: str | None,
    policy_options: Sequence[str],
    workload: str,
    scale: float,
    limit: int | None,
    rates: str,
    duration: float,
    slo_ttft_ms: float,
    slo_tpot_ms: float,
    options: LoadOptions,
    seed: int,
    goodput: bool,
    allow_unequal: bool,
    out: Path | None,
    figures: Path | None,
    cluster_options: dict[str, Any],
) -> None:
    """See the command's options. Raises NanoPDError."""
    from nanopd.model.loader import load_model, resolve_device
    from nanopd.ops.measure import environment

    wanted = parse_rates(rates)
    check_paths(out, figures)
    check_times(duration, options)
    slo = SLO(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3)
    default = str(resolve_device(None))
    places = Places.parse(collocated, prefill, decode, default)
    names = list(strategies) or places.strategies()
    policy = policy_maker(profile, policy_options, slo_ttft_ms, slo_tpot_ms)
    check_strategies(names, policy_options)
    first = (places.collocated or places.prefill)[0]
    loaded = load_model(model, device=first.device, dtype=dtype)
    limits = {key: value for key, value in cluster_options.items() if value is not None}
    longest = limits.get("max_model_len") or loaded.config.max_position_embeddings
    schedule_at = arrivals(workload, duration, seed, scale=scale, limit=limit, max_model_len=longest)
    raw = out.with_suffix(".records") if out else None
    if raw is not None and raw.exists():
        print(f"runs whose records are in {raw} are not repeated; delete it to measure them again")
    report = compare_strategies(
        [_strategy(name, loaded, places, policy, _sms(first), limits) for name in names],
        schedule_at,
        wanted,
        slo=slo,
        vocab_size=loaded.config.vocab_size,
        options=options,
        search=GoodputSearch() if goodput else None,
        raw=raw,
        allow_unequal=allow_unequal,
        context={
            "model": loaded.config.name,
            "dtype": str(loaded.model.dtype),
            "profile": profile,
            "policy": list(policy_options),
            **limits,
        },
        environment=environment(first.device, "nanopd bench"),
    )
    show(report, Console())
    if out is not None:
        print(f"written: {report.save(out)}")
    if figures is not None:
        save_figures(report, figures)


def check_paths(out: Path | None, figures: Path | None) -> None:
    """Raises ConfigError before anything is measured that could not be written afterwards."""
    if out is not None:
        if out.suffix == ".records":
            raise ConfigError(f"--out {out}: a name that ends in .records is the folder of a run's raw records")
        check_writable("--out", out)
        if figures is not None and Path(os.path.realpath(figures)).is_relative_to(os.path.realpath(out)):
            raise ConfigError(f"--out {out} is a file, and --figures {figures} needs a folder in its place")
    if figures is not None:
        if figures.exists() and not figures.is_dir():
            raise ConfigError(f"--figures {figures} is a file: name a folder")
        check_writable("--figures", figures / "figure.png")


def check_times(duration: float, options: LoadOptions) -> None:
    """Raises ConfigError before a model is loaded for a run that would measure nothing."""
    check_number("the duration", duration, above=0.0, unit="seconds")
    if options.warmup_s >= duration:
        raise ConfigError(f"a warm-up of {options.warmup_s:g} s leaves nothing of {duration:g} s to measure")


def check_strategies(names: Sequence[str], policy_options: Sequence[str]) -> None:
    """Raises ConfigError for a name that no policy has, and for policy options that no strategy takes."""
    for name in names:
        policy_class(name)
    if policy_options and all(name in PURE for name in names):
        raise ConfigError(f"--policy {policy_options[0]}: {' and '.join(names)} have no options; name a --strategy")


def arrivals(
    workload: str, duration: float, seed: int, *, scale: float, limit: int | None, max_model_len: int
) -> Callable[[float], Schedule]:
    """rate -> arrivals, of a named workload, PROMPT:OUTPUT tokens, or a trace. Raises ConfigError, TraceError."""
    if limit is not None:
        check_count("--limit", limit, least=1)
    if Path(workload).suffix.lower() in (".jsonl", ".csv"):
        check_count("--max-model-len, prompt and output together,", max_model_len, least=2)
        output = max_model_len // 2
        trace = load_trace(
            workload, seed=seed, limit=limit, length_scale=scale, max_prompt=max_model_len - output, max_output=output
        )
        return lambda rate: trace.at_rate(rate).until(duration)
    if limit is not None:
        raise ConfigError(f"--limit {limit} cuts a trace, and {workload!r} is none: use --duration")
    if lengths := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", workload):
        made = Workload.fixed(int(lengths[1]), int(lengths[2]))
        fixed = made.scaled(scale)
        if fixed.max_prompt + fixed.max_output > max_model_len:  # others are cut, and say so; this one was asked for
            raise ConfigError(
                f"workload {workload}: {fixed.max_prompt:,} and {fixed.max_output:,} tokens are more than the "
                f"{max_model_len:,} that prompt and output may have together"
            )
    elif workload in workload_names():
        made = named_workload(workload)
    else:
        raise ConfigError(
            f"workload {workload!r} is none of {', '.join(workload_names())}, a .jsonl or .csv trace, or PROMPT:OUTPUT"
        )
    return schedules(made.scaled(scale).fitting(max_model_len), duration, seed)


def parse_rates(text: str) -> list[float]:
    """ "1,2,4" as numbers. Raises ConfigError for what is no positive number."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"rates are numbers separated by commas, got {text!r:.80}") from error
    if not all(0 < rate < MOST_RATE for rate in rates):
        raise ConfigError(f"rates must be above 0 and below {MOST_RATE:,} requests per second, got {text!r:.80}")
    return rates


def policy_maker(
    profile: str | None, settings: Sequence[str], ttft_ms: float, tpot_ms: float
) -> Callable[[str], Callable[[], Any]]:
    """strategy -> policy factory. ``settings``: "key=value" for policies that are neither pure nor without options.

    Raises ConfigError for a setting that is none, and a profile that does not exist, whoever needs it.
    """
    hardware = None if profile is None else load_profile(profile)
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"a policy option is written KEY=VALUE, got {setting!r}")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            options[key] = value

    def make(name: str) -> Any:
        takes = inspect.signature(policy_class(name)).parameters  # an unknown name is said before a missing profile
        if name in PURE:
            return make_policy(name)
        if name == "slo":
            if hardware is None:
                raise ConfigError("strategy 'slo' predicts step times: give --profile (see `nanopd profile`)")
            hardware.step_model()  # raises if the profile has none
            fixed = {"models": hardware.step_time, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms}
            if twice := sorted(set(fixed) & set(options)):
                raise ConfigError(f"{', '.join(twice)} of strategy 'slo': use --profile, --slo-ttft and --slo-tpot")
            return make_policy(name, **fixed, **options)
        if "profile" in takes and "profile" not in options:
            if hardware is None:
                raise ConfigError(f"strategy {name!r} needs a hardware profile: give --profile (see `nanopd profile`)")
            return make_policy(name, profile=hardware, **options)
        return make_policy(name, **options)

    return lambda name: lambda: make(name)


def _strategy(
    name: str,
    model: LoadedModel,
    places: Places,
    policy: Callable[[str], Callable[[], Any]],
    sms: int | None,
    limits: dict[str, Any],
) -> Strategy:
    from nanopd.bench.serve import serving_strategy

    make = policy(name)
    make()  # what is wrong with it shows now, not after an hour
    return serving_strategy(
        name,
        model,
        make,
        sms_per_device=sms,
        on_open=lambda cluster, server: print(f"{name}:\n{cluster.describe()}"),
        **places.of(name),
        **limits,
    )


def _sms(place: DeviceSpec) -> int | None:
    if not place.is_cuda:
        return None
    import torch

    return int(torch.cuda.get_device_properties(torch.device(place.device)).multi_processor_count)


# --- output ----------------------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """The runs as tables, goodput with its reason, and on which footing they compare."""
    console.print(f"[bold]{escape(report.workload)}[/]: {escape(report.note)}\n", highlight=False)
    counts = _table("strategy", "rate", "done/offered", "in SLO", "out tok/s", "dropped")
    times: list[tuple[str, ...]] = []
    for result in report.results:
        s, head = result.summary, (result.strategy, f"{result.rate:g}")
        drops = ", ".join(f"{count} {why}" for why, count in s.counters.dropped.items() if count)
        done = f"{s.counters.completed}/{s.offered}"
        counts.add_row(*head, done, f"{s.attainment:.0%}", f"{s.token_throughput:.0f}", drops or "none")
        gaps = (_one(s.second_token_gap.p99, 1e3), _one(s.itl.p99, 1e3))
        times.append((*head, _three(s.ttft, 1e3), _three(s.tpot, 1e3), _three(s.e2e, 1.0), *gaps))
    console.print(counts)
    for outcome, reason in _drop_reasons(report).items():
        console.print(f"First {outcome}: {escape(reason)}", highlight=False)
    console.print("\nLatencies of completed requests from their scheduled arrival: p50/p90/p99.")
    console.print("2nd: gap before the second token; ITL: gaps between all tokens; both p99, ms.")
    console.print(_latencies(times, console))
    for line in _clipped(report):
        console.print(line)
    limits = f"TTFT <= {_one(report.slo.ttft_s, 1e3)} ms and TPOT <= {_one(report.slo.tpot_s, 1e3)} ms"
    console.print(f"\nSLO: {limits}; {escape(report.comparison)}")
    unit = f"requests/s per {device_word(report.hardware.values())}"
    for name, found in report.goodput.items():
        console.print(f"goodput of {name}: {found.per_gpu:.4g} {unit} ({escape(found.reason)})")
    if not any(result.summary.attained for result in report.results):
        console.print(
            "No request met the SLO at any rate, so nothing can be compared: see what was dropped, lower --rate, take "
            "a workload with shorter prompts and outputs, or allow more with --slo-ttft and --slo-tpot."
        )


def _drop_reasons(report: Report) -> dict[str, str]:
    """By outcome, of all runs."""
    return {outcome: reason for result in reversed(report.results) for outcome, reason in result.drops.items()}


def _clipped(report: Report) -> list[str]:
    """What was cut so that it fits, which a reader of the workload's name would not expect."""
    said = []
    for rate, plan in dict(report.options.get("arrivals", {})).items():
        prompts, outputs, offered = plan["clipped_prompts"], plan["clipped_outputs"], plan["offered"]
        if prompts or outputs:
            said.append(
                f"At {float(rate):g}/s {prompts} prompts and {outputs} outputs of {offered} requests were cut to fit."
            )
    return said


def _latencies(rows: Sequence[tuple[str, ...]], console: Console) -> Table:
    """Where the console is too narrow, percentiles stand below each other: wrapping would break a number."""
    headings = ("strategy", "rate", "TTFT ms", "TPOT ms", "E2E s", "2nd", "ITL")
    table = _table(*headings, rows=rows)
    if console.measure(table, options=console.options.update_width(_WIDE)).maximum <= console.width:
        return table
    return _table(*headings, rows=[tuple(cell.replace("/", "\n/") for cell in row) for row in rows])


def _table(*headings: str, rows: Sequence[tuple[str, ...]] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in headings:
        left = heading in ("strategy", "dropped")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _three(values: Percentiles, factor: float) -> str:
    return "/".join(_one(value, factor) for value in (values.p50, values.p90, values.p99))


def _one(value: float | None, factor: float) -> str:
    """Three digits, never in powers of ten."""
    if value is None:
        return "-"
    scaled = value * factor
    return f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.3g}"


def save_figures(report: Report, folder: Path) -> None:
    """Every figure of `nanopd.viz.serving` as a PNG. Raises OSError if one cannot be written."""
    from nanopd.viz.serving import figures

    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures(report).items():
        path = folder / f"{name}.png"
        figure.savefig(path)
        print(f"written: {path}")
