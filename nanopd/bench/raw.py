"""Raw records of a run as JSON lines: a header that says which run it was, a line per request, a line that ends it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanopd.bench.records import RequestRecord
from nanopd.costmodel.files import write_whole
from nanopd.errors import ReportError

SCHEMA = "nanopd-serving-records/1"


def write_records(path: Path, header: Mapping[str, Any], records: Sequence[RequestRecord]) -> None:
    """Whole or not at all: what is there under this name is a finished run."""
    rows = ({"schema": SCHEMA, **header}, *(r.to_json() for r in records), {"end": len(records)})
    write_whole(path, (json.dumps(row) + "\n" for row in rows))


def read_records(path: Path, header: Mapping[str, Any] | None = None) -> list[RequestRecord]:
    """The records of a finished run. ``header``: what it must have been.

    Raises ReportError if the file is damaged, or belongs to a run that differs from ``header``.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"cannot read the records {path}: {error}") from error
    if not rows or not isinstance(rows[0], dict) or rows[0].get("schema") != SCHEMA:
        raise ReportError(f"{path} does not begin with a header of schema {SCHEMA!r}")
    if rows[-1] != {"end": len(rows) - 2}:
        raise ReportError(f"{path} is cut off: its last line should count {len(rows) - 2} records")
    for name, expected in json.loads(json.dumps(header or {})).items():
        if rows[0].get(name) != expected:
            raise ReportError(
                f"{path} belongs to another run: its {name} is {rows[0].get(name)!r}, not {expected!r}; "
                f"delete it, or write to another folder"
            )
    return [RequestRecord.from_json(row) for row in rows[1:-1]]
