"""Keep reports of `nanopd bench --out` with the course's records: ``python -m nanopd.bench.record REPORT...``

They become ``docs/results/<gpu>/serving.json``: where and when, and under "values" the reports by workload, with fewer
samples. ``nanopd.ops.measure.recorded("serving")`` reads it, and prose cites numbers from it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanopd.bench.report import Report, load_report
from nanopd.errors import NanoPDError, ReportError

MOST_SAMPLES = 200  # of each latency per run


def record(reports: Sequence[Report]) -> dict[str, Any]:
    """One record of ``reports``. Raises ReportError without any, for two of one workload, or for two devices."""
    names = [report.workload for report in reports]
    devices = {report.environment.get("gpu") for report in reports}
    if not reports or len(set(names)) != len(names) or len(devices) != 1:
        raise ReportError(f"a record needs reports of different workloads on one device, got {names} on {devices}")
    by_workload = {report.workload: report.thinned(MOST_SAMPLES).to_json() for report in reports}
    return {**reports[0].environment, "values": {"reports": by_workload}}


def recorded_reports(found: Mapping[str, Any]) -> dict[str, Report]:
    """The reports of a record, by workload. Raises ReportError for what ``record`` did not make."""
    try:
        rows = found["values"]["reports"]
    except KeyError as error:
        raise ReportError(f"a record without {error}") from error
    return {name: Report.from_json(row, f"record of {name}") for name, row in rows.items()}


def main(arguments: list[str] | None = None) -> int:
    paths = sys.argv[1:] if arguments is None else arguments
    if not paths or paths[0].startswith("-"):
        print("usage: python -m nanopd.bench.record REPORT...", file=sys.stderr)
        return 2
    from nanopd.ops.measure import results_dir  # torch, for nothing else here

    try:
        made = record([load_report(path) for path in paths])
        out = results_dir() / _slug(made.get("gpu", "unknown")) / "serving.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    except (NanoPDError, OSError) as error:
        print(f"record: {error}", file=sys.stderr)
        return 1
    print(f"written: {Path(*out.parts[-2:])}")
    return 0


def _slug(gpu: str) -> str:
    """As `nanopd.ops.measure.gpu_slug`: "NVIDIA H200" is nvidia-h200, every CPU is cpu."""
    return "cpu" if gpu.startswith("CPU") else re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
