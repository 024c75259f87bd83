"""Report: all runs of a comparison in one JSON file, with what is needed to judge and to repeat them."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanopd.bench.goodput import Goodput, Probe
from nanopd.bench.hardware import Hardware, check_equal
from nanopd.bench.metrics import SLO, Summary
from nanopd.bench.records import Outcome, RequestRecord
from nanopd.costmodel.checks import check_number, shown
from nanopd.costmodel.files import write_whole
from nanopd.errors import ConfigError, ReportError

SCHEMA = "nanopd-serving-benchmark/1"
MOST_SAMPLES = 2000  # of each latency per run, for violins; every k-th by size if there are more


@dataclass(frozen=True)
class Result:
    """One run: a strategy at a rate."""

    strategy: str
    rate: float  # asked for; the summary has the real one
    summary: Summary
    schedule: str  # fingerprint of the arrivals: equal for all strategies at this rate
    samples: Mapping[str, list[float]] = field(default_factory=dict)  # ttft_s, tpot_s, e2e_s of completed requests
    drops: Mapping[str, str] = field(default_factory=dict)  # the reason of the first drop of each outcome


@dataclass(frozen=True)
class Report:
    """A comparison. ``comparison`` says on which footing: equal hardware, or per device."""

    workload: str
    note: str  # where lengths and arrivals come from
    slo: SLO
    seed: int
    options: Mapping[str, Any]  # of the load, and what was clipped
    hardware: Mapping[str, Hardware]  # by strategy
    comparison: str
    results: tuple[Result, ...]
    goodput: Mapping[str, Goodput] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def strategies(self) -> list[str]:
        return list(self.hardware)

    @property
    def per_gpu(self) -> bool:
        """Whether rates must be divided by GPUs before strategies are compared."""
        return self.comparison != "equal hardware"

    def of(self, strategy: str) -> list[Result]:
        """Runs of ``strategy`` by rate."""
        return sorted((r for r in self.results if r.strategy == strategy), key=lambda r: r.rate)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file, floats to five digits."""
        return {"schema": SCHEMA, **_rounded(asdict(self))}

    @classmethod
    def from_json(cls, row: Mapping[str, Any], where: str = "report") -> Report:
        """Of what ``to_json`` wrote. ``where`` stands in messages.

        Raises ReportError if it is damaged or of another version.
        """
        data = dict(row) if isinstance(row, Mapping) else {}
        if (schema := data.pop("schema", None)) != SCHEMA:
            raise ReportError(f"{where} has schema {schema!r}, this version reads {SCHEMA!r}")
        try:
            results = tuple(_result(r) for r in data.pop("results"))
            hardware = {
                name: Hardware(tuple(h["devices"]), h["sms"], h["description"], h.get("cores"))  # older ones lack cores
                for name, h in data.pop("hardware").items()
            }
            goodput = {
                name: Goodput(**{**g, "probes": tuple(Probe(**p) for p in g["probes"])})
                for name, g in data.pop("goodput").items()
            }
            return cls(results=results, hardware=hardware, goodput=goodput, slo=SLO(**data.pop("slo")), **data)
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ReportError(f"{where} is damaged: {type(error).__name__}: {error}") from error

    def save(self, path: str | Path) -> Path:
        """Write the JSON, whole or not at all; returns the path."""
        return write_whole(path, [json.dumps(self.to_json(), indent=1) + "\n"])


def _result(row: Mapping[str, Any]) -> Result:
    """Raises ReportError or ConfigError for what is none."""
    made = Result(**{**row, "summary": Summary.from_json(row["summary"])})
    check_number("the rate of a run", made.rate, above=0.0)
    if not isinstance(made.drops, Mapping) or not all(isinstance(text, str) for text in made.drops.values()):
        raise ConfigError(f"drops must be a table of reasons, got {shown(made.drops)}")
    for name, values in made.samples.items():
        if not isinstance(values, list):
            raise ConfigError(f"samples of {name} must be a list, got {shown(values)}")
        for value in values:
            check_number(f"a sample of {name}", value, least=-math.inf)
    return made


def make_report(results: list[Result], hardware: Mapping[str, Hardware], *, allow_unequal: bool, **rest: Any) -> Report:
    """A report of ``results``, after checking that they can be compared; ``rest`` as the fields of `Report`.

    Raises:
        UnequalHardwareError: device counts, or totals of SMs or CPU cores differ, and ``allow_unequal`` is not given.
        ReportError: two strategies saw different arrivals at one rate, or a result has no hardware.
    """
    comparison = check_equal(hardware, allow_unequal)
    arrivals: dict[float, str] = {}
    for result in results:
        if result.strategy not in hardware:
            raise ReportError(f"a result of {result.strategy!r}, whose hardware is not stated")
        if arrivals.setdefault(result.rate, result.schedule) != result.schedule:
            raise ReportError(f"at {result.rate:g}/s {result.strategy!r} saw other arrivals than the strategies before")
    return Report(hardware=dict(hardware), comparison=comparison, results=tuple(results), **rest)


def load_report(path: str | Path) -> Report:
    """Read what ``Report.save`` wrote. Raises ReportError if the file is missing, damaged or of another version."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ReportError(f"cannot read the report {path}: {error}") from error
    return Report.from_json(data, str(path))


def samples(records: list[RequestRecord], warmup_s: float = 0.0) -> dict[str, list[float]]:
    """Latencies of the measured completed requests, ascending, for `Result.samples`."""
    done = [r for r in records if r.outcome is Outcome.COMPLETED and r.time_s >= warmup_s]
    found: dict[str, list[float]] = {}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        found[name] = _every(sorted(value for r in done if (value := getattr(r, name)) is not None), MOST_SAMPLES)
    return found


def first_reasons(records: list[RequestRecord], warmup_s: float = 0.0) -> dict[str, str]:
    """Why the first measured request of each kind of drop was dropped, for `Result.drops`."""
    found: dict[str, str] = {}
    for record in records:
        if record.outcome is not Outcome.COMPLETED and record.time_s >= warmup_s:
            found.setdefault(record.outcome.value, record.reason)
    return found


def basic_environment(command: str = "") -> dict[str, str]:
    """Where a run took place, as far as it can be known without torch (`nanopd.ops.measure.environment` knows more)."""
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
    }


def _rounded(value: Any) -> Any:
    """Five significant digits are more than any latency repeats to; rates are kept, since they are keys."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(k): v if k in ("rate", "upper", "per_gpu") else _rounded(v) for k, v in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _every(values: list[float], most: int) -> list[float]:
    """Every k-th of them, so that at most that many are left."""
    return values[:: max(1, -(-len(values) // most))]
