"""Traces: real arrivals and lengths from files, in Mooncake's JSONL and Azure's CSV formats.

Mooncake (Qin et al., FAST 2025): ``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}``, one
hash id per 512 prompt tokens; equal ids are equal prefixes, which `Schedule.prompt` turns into equal tokens. Timestamps
of its conversation and tool-agent traces are quantised to about 3 s: replayed as they are, ten requests arrive in one
instant and then none for 3 s. So each is moved by a seeded uniform time inside its bucket, and the schedule's note
says so.

Azure (Patel et al., Splitwise, ISCA 2024; Stojkovic et al., DynamoLLM): ``TIMESTAMP,ContextTokens,GeneratedTokens``.

Readers stream: they hold one bucket, never the file.
"""

from __future__ import annotations

import csv
import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from nanopd.bench.lengths import MOST_TOKENS
from nanopd.bench.workload import Arrival, Schedule
from nanopd.costmodel.checks import check_count, check_number
from nanopd.errors import TraceError

MOONCAKE_BLOCK = 512  # prompt tokens per hash id
_MORE = "values beyond the header"
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Where:
    """A place in a file, for messages."""

    path: Path
    line: int

    def error(self, field: str, problem: str) -> TraceError:
        return TraceError(f"{self.path}:{self.line}: field {field!r} {problem}")


def read_mooncake(path: str | Path) -> Iterator[Arrival]:
    """Arrivals in file order; times in seconds after the first. Raises TraceError, naming line and field."""
    previous = start = None
    with _open(path) as file:
        for index, (line, text) in enumerate((n, t) for n, t in enumerate(file, 1) if t.strip()):
            where = Where(Path(path), line)
            row = _json_object(text, where)
            time_ms = _number(row, "timestamp", where)
            start = time_ms if start is None else start
            if previous is not None and time_ms < previous:
                raise where.error("timestamp", f"goes back from {previous:g} to {time_ms:g}")
            previous = time_ms
            prompt = _count(row.get("input_length"), "input_length", where)
            output = _count(row.get("output_length"), "output_length", where, least=0)
            yield Arrival(
                index, (time_ms - start) / 1e3, prompt, max(1, output), _hash_ids(row, prompt, where), MOONCAKE_BLOCK
            )


def read_azure(path: str | Path) -> Iterator[Arrival]:
    """Arrivals in file order; times in seconds after the first. Raises TraceError, naming line and field."""
    previous = start = None
    with _open(path) as file:
        rows = csv.DictReader(file, restkey=_MORE, skipinitialspace=True)
        missing = [name for name in AZURE_FIELDS if name not in (rows.fieldnames or ())]
        if missing:
            raise Where(Path(path), 1).error(missing[0], f"is missing; the header has {rows.fieldnames or 'nothing'}")
        if twice := [name for name in AZURE_FIELDS if (rows.fieldnames or ()).count(name) > 1]:
            raise Where(Path(path), 1).error(twice[0], f"is there twice; the header has {rows.fieldnames}")
        for index, row in enumerate(_csv_rows(rows, Path(path))):
            where = Where(Path(path), rows.line_num)
            if row.pop(_MORE, None) is not None:
                raise TraceError(f"{path}:{rows.line_num}: more values than the header has fields")
            time = _moment(row["TIMESTAMP"], where)
            start = time if start is None else start
            if previous is not None and time < previous:
                raise where.error("TIMESTAMP", f"goes back from {previous} to {time}")
            previous = time
            prompt = _count(row["ContextTokens"], "ContextTokens", where)
            output = _count(row["GeneratedTokens"], "GeneratedTokens", where, least=0)
            yield Arrival(index, (time - start).total_seconds(), prompt, max(1, output))


def quantum(times_s: Iterable[float]) -> float:
    """The clock tick that timestamps were rounded to, in seconds; 0 if most of them stand alone."""
    counts = Counter(times_s)
    total = sum(counts.values())
    if total < 2 or len(counts) < 2 or sum(n for n in counts.values() if n > 1) < total / 2:
        return 0.0
    stamps = sorted(counts)
    gaps = sorted(b - a for a, b in pairwise(stamps))
    return gaps[len(gaps) // 2]


def jittered(arrivals: Iterable[Arrival], quantum_s: float, seed: int) -> Iterator[Arrival]:
    """Each arrival moved by a uniform time in [0, quantum_s), in order of the new times and numbered anew. Streams."""
    if quantum_s <= 0:
        yield from arrivals
        return
    moved = _moved(arrivals, quantum_s, random.Random(f"{seed}/jitter"))
    for index, arrival in enumerate(moved):
        yield replace(arrival, index=index)


def load_trace(
    path: str | Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    speed: float = 1.0,
    jitter_s: float | None = None,
    max_prompt: int = 32_768,
    max_output: int = 2_048,
    length_scale: float = 1.0,
) -> Schedule:
    """The first ``limit`` requests of a trace (``.csv``: Azure's format, else Mooncake's) as a schedule.

    Args:
        speed: 2 plays the trace twice as fast. ``Schedule.at_rate`` stretches to a mean rate instead.
        jitter_s: width of the bucket inside which times are spread; None finds it out from the first 1,000 stamps.
        length_scale: multiplies all lengths, and the blocks of shared prefixes, for a small model.
        max_prompt, max_output: longer ones are clipped and counted.

    Raises:
        TraceError: the file is missing, empty, or broken at a line that the message names.
        ConfigError: an argument is out of range.
    """
    for name, value in (("speed", speed), ("length_scale", length_scale)):
        check_number(name, value, above=0.0)
    if limit is not None:
        check_count("limit", limit, least=1)
    if jitter_s is not None:
        check_number("jitter_s", jitter_s, unit="seconds")
    for name, most in (("max_prompt", max_prompt), ("max_output", max_output)):
        check_count(name, most, least=1)
    read = read_azure if Path(path).suffix.lower() == ".csv" else read_mooncake
    if jitter_s is None:
        jitter_s = quantum(a.time_s for a in islice(read(path), 1000))
    taken = list(islice(jittered(read(path), jitter_s, seed), limit))
    if not taken:
        raise TraceError(f"{path}: no request in it")
    first = taken[0].time_s
    scaled = [_scaled(a, first, speed, length_scale) for a in taken]
    notes = [f"trace {Path(path).name}"]
    notes += [f"times spread uniformly inside buckets of {jitter_s:.3g} s (seed {seed})"] if jitter_s else []
    notes += [f"times divided by {speed:g}"] if speed != 1 else []
    notes += [f"lengths multiplied by {length_scale:g}"] if length_scale != 1 else []
    last = scaled[-1].time_s
    return Schedule(
        Path(path).stem,
        tuple(a.clipped(max_prompt, max_output) for a in scaled),
        # One mean gap after the last arrival, so that n requests over the duration are n per n gaps.
        last + (last / (len(scaled) - 1) if last > 0 else 1.0),
        seed,
        "; ".join(notes),
        "trace",
    )


# --- inside ----------------------------------------------------------------------------------------------------


def _moved(arrivals: Iterable[Arrival], quantum_s: float, rng: random.Random) -> Iterator[Arrival]:
    waiting: list[tuple[float, int, Arrival]] = []  # a heap by new time
    for arrival in arrivals:
        while waiting and waiting[0][0] <= arrival.time_s:  # nothing that comes later can be moved before it
            yield heapq.heappop(waiting)[2]
        time_s = arrival.time_s + rng.random() * quantum_s
        heapq.heappush(waiting, (time_s, arrival.index, replace(arrival, time_s=time_s)))
    while waiting:
        yield heapq.heappop(waiting)[2]


def _scaled(arrival: Arrival, first_s: float, speed: float, length_scale: float) -> Arrival:
    return replace(
        arrival,
        time_s=(arrival.time_s - first_s) / speed,
        prompt_tokens=_times(arrival.prompt_tokens, length_scale),
        output_tokens=_times(arrival.output_tokens, length_scale),
        prefix_block=_times(arrival.prefix_block, length_scale),
    )


def _times(tokens: int, factor: float) -> int:
    return max(1, round(min(tokens * factor, MOST_TOKENS)))  # maxima clip, and count, what is still too long


def _open(path: str | Path) -> Any:
    if not isinstance(path, str | Path):  # an int would open a descriptor of this process
        raise TraceError(f"a trace is a file, got {path!r:.80}")
    try:
        return open(path, encoding="utf-8-sig", errors="replace", newline="")  # some begin with a byte order mark
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from error


def _csv_rows(rows: csv.DictReader[str], path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from rows
    except csv.Error as error:  # a NUL byte, a field without end
        raise TraceError(f"{path}:{rows.line_num}: not CSV: {error}") from error


def _json_object(text: str, where: Where) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where.path}:{where.line}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise TraceError(f"{where.path}:{where.line}: expected a JSON object, got {text.strip()[:60]!r}")
    return row


def _number(row: dict[str, Any], field: str, where: Where) -> float:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise where.error(field, f"must be a number >= 0, got {value!r:.60}")
    return float(value)


def _count(value: Any, field: str, where: Where, least: int = 1) -> int:
    """An int in the range, also one in a string."""
    number = value
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= MOST_TOKENS:
        raise where.error(field, f"must be an int in [{least}, {MOST_TOKENS}], got {value!r:.60}")
    return number


def _hash_ids(row: dict[str, Any], prompt: int, where: Where) -> tuple[int, ...]:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise where.error("hash_ids", f"must be a list of ints, got {ids!r:.60}")
    if len(ids) > math.ceil(prompt / MOONCAKE_BLOCK):
        raise where.error("hash_ids", f"has {len(ids)} blocks of {MOONCAKE_BLOCK} tokens for a prompt of {prompt}")
    return tuple(ids)


def _moment(text: str | None, where: Where) -> datetime:
    """Without a zone, so that all can be subtracted: in UTC where one is given."""
    try:
        moment = datetime.fromisoformat((text or "").strip())
        return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
    except (ValueError, OverflowError) as error:  # the first day of the year 1, in a zone of the east
        expected = "must be a date and time like 2023-11-16 18:17:03.97"
        raise where.error("TIMESTAMP", f"{expected}, got {text!r:.60}") from error
