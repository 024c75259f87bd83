"""Trace readers: good files, broken files with line and field, jitter inside buckets, shared prefixes."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopd.bench import load_trace, read_azure, read_mooncake
from nanopd.bench.traces import jittered, quantum
from nanopd.bench.workload import Arrival
from nanopd.errors import ConfigError, TraceError

DATA = Path(__file__).parents[2] / "shared" / "data"


def mooncake(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(timestamp: float, n: int = 600, out: int = 5, ids: tuple[int, ...] = (0, 1)) -> dict:
    return {"timestamp": timestamp, "input_length": n, "output_length": out, "hash_ids": list(ids)}


def test_mooncake_rows_become_arrivals(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", [row(2000), row(2500, 100, 0, (7,)), {**row(4000), "session": "x"}])
    first, second, third = read_mooncake(path)
    assert (first.time_s, second.time_s, third.time_s) == (0.0, 0.5, 2.0)
    assert (first.prompt_tokens, first.output_tokens, first.prefix) == (600, 5, (0, 1))
    assert second.output_tokens == 1  # a request without output would have no latency
    assert third.index == 2


def test_azure_rows_become_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,110,27\n2023-11-16 18:18:03.97996,1,1"
    )
    arrivals = list(read_azure(path))
    assert [a.time_s for a in arrivals] == pytest.approx([0.0, 0.052, 60.0], abs=1e-6)
    assert [(a.prompt_tokens, a.output_tokens) for a in arrivals] == [(4808, 10), (110, 27), (1, 1)]


def test_azure_of_2024_has_time_zones(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 02:00:01.009930+02:00,2399,6\n"
    )
    assert [a.time_s for a in read_azure(path)] == [0.0, 1.0]


BROKEN_MOONCAKE = {
    "not-json": ("{", ":2: not JSON"),
    "not-object": ("[1]", ":2: expected a JSON object"),
    "no-timestamp": (json.dumps({k: v for k, v in row(1).items() if k != "timestamp"}), ":2: field 'timestamp'"),
    "text-timestamp": (json.dumps({**row(1), "timestamp": "soon"}), ":2: field 'timestamp'.*'soon'"),
    "nan-timestamp": ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', ":2: field 'timestamp'"),
    "backwards": (json.dumps(row(-1)), ":2: field 'timestamp'"),
    "earlier": (json.dumps(row(5)), ":2: field 'timestamp' goes back from 10 to 5"),
    "float-length": (json.dumps({**row(11), "input_length": 1.5}), r":2: field 'input_length'.*1\.5"),
    "zero-length": (json.dumps({**row(11), "input_length": 0, "hash_ids": []}), ":2: field 'input_length'.*got 0"),
    "negative-output": (json.dumps({**row(11), "output_length": -1}), ":2: field 'output_length'.*got -1"),
    "bool-length": (json.dumps({**row(11), "input_length": True}), ":2: field 'input_length'"),
    "huge-length": (json.dumps({**row(11), "input_length": 10**9}), ":2: field 'input_length'"),
    "bad-ids": (json.dumps({**row(11), "hash_ids": "abc"}), ":2: field 'hash_ids'"),
    "too-many-ids": (json.dumps(row(11, 512, 5, (1, 2))), ":2: field 'hash_ids' has 2 blocks"),
}


@pytest.mark.parametrize("name", BROKEN_MOONCAKE)
def test_a_broken_mooncake_line_is_named(name: str, tmp_path: Path) -> None:
    line, says = BROKEN_MOONCAKE[name]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row(10)) + "\n" + line + "\n")
    with pytest.raises(TraceError, match=says):
        list(read_mooncake(path))


BROKEN_AZURE = {
    "empty-file": ("", ":1: field 'TIMESTAMP' is missing"),
    "no-column": ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,1\n", ":1: field 'GeneratedTokens' is missing"),
    "short-row": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n", ":2: field 'GeneratedTokens'"),
    "bad-time": ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", ":2: field 'TIMESTAMP'.*'noon'"),
    "bad-count": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,x,1\n", ":2: field 'ContextTokens'.*'x'"),
    "earlier": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1,1\n2023-11-15,1,1\n", ":3: field 'TIMESTAMP'"),
}


@pytest.mark.parametrize("name", BROKEN_AZURE)
def test_a_broken_azure_line_is_named(name: str, tmp_path: Path) -> None:
    text, says = BROKEN_AZURE[name]
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        list(read_azure(path))


def test_missing_and_empty_files_are_trace_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        load_trace(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TraceError, match="no request"):
        load_trace(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="speed"):
        load_trace(tmp_path / "empty.jsonl", speed=0)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for suffix in ("jsonl", "csv"):
        path = tmp_path_factory.mktemp("fuzz") / f"t.{suffix}"
        path.write_bytes((b"TIMESTAMP,ContextTokens,GeneratedTokens\n" if suffix == "csv" else b"") + data)
        with suppress(TraceError):
            load_trace(path)


def test_readers_stream(tmp_path: Path) -> None:
    """What stands behind the requests taken is not even parsed."""
    path = mooncake(tmp_path / "t.jsonl", [row(i) for i in range(50)])
    with open(path, "a") as file:
        file.write("broken\n")
    assert len(list(islice(read_mooncake(path), 50))) == 50
    assert len(load_trace(path, limit=20, jitter_s=0.0)) == 20


# --- times -----------------------------------------------------------------------------------------------------


def quantised(count: int = 600, tick: float = 3000.0) -> list[dict]:
    """As Mooncake's conversation trace: about ten requests per tick, ticks off by a millisecond now and then."""
    ticks = np.sort(np.random.default_rng(0).integers(0, count // 10, count))
    return [row(float(t * tick - (t % 3 == 2))) for t in ticks]


def test_quantised_times_are_spread_inside_their_bucket(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", quantised())
    raw = [a.time_s for a in read_mooncake(path)]
    assert quantum(raw) == pytest.approx(3.0, abs=0.002)
    schedule = load_trace(path, seed=1)
    times = np.array([a.time_s for a in schedule.arrivals])
    assert (np.diff(times) >= 0).all()
    assert len(set(times)) == len(times)
    # per bucket as many as before (but for the millisecond), and evenly spread
    shifted = times + min(raw) + next(jittered(read_mooncake(path), quantum(raw), 1)).time_s
    moved = np.bincount((shifted // 3).astype(int), minlength=61)
    before = np.bincount(((np.array(raw) + 0.002) // 3).astype(int), minlength=61)
    assert np.abs(np.cumsum(moved) - np.cumsum(before)).max() <= 1
    within = shifted % 3
    assert abs(within.mean() - 1.5) < 4 * 3 / np.sqrt(12 * len(times))
    assert "buckets of 3 s" in schedule.note
    assert [a.index for a in schedule.arrivals] == list(range(len(times)))


def test_jitter_is_seeded_and_keeps_each_request(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", [row(t["timestamp"], 100 + i, 1, ()) for i, t in enumerate(quantised(100))])
    one, again, other = load_trace(path, seed=1), load_trace(path, seed=1), load_trace(path, seed=2)
    assert one == again
    assert one.arrivals != other.arrivals
    assert sorted(a.prompt_tokens for a in one.arrivals) == list(range(100, 200))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 50), min_size=1, max_size=40), st.floats(0.01, 20))
def test_streamed_jitter_is_the_sorted_one(times: list[float], width: float) -> None:
    arrivals = [Arrival(i, t, 1, 1) for i, t in enumerate(sorted(times))]
    moved = [a.time_s for a in jittered(arrivals, width, 3)]
    assert moved == sorted(moved)
    assert len(moved) == len(arrivals)
    assert all(new >= old for new, old in zip(moved, sorted(times)))  # order statistics move later, too


def test_fine_times_stay_as_they_are(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", [row(t) for t in (0, 0, 40, 277, 471, 529)])
    schedule = load_trace(path)
    assert [a.time_s for a in schedule.arrivals] == [0.0, 0.0, 0.04, 0.277, 0.471, 0.529]
    assert "bucket" not in schedule.note
    fast = load_trace(path, speed=2.0)
    assert [a.time_s for a in fast.arrivals] == pytest.approx([0.0, 0.0, 0.02, 0.1385, 0.2355, 0.2645])
    assert fast.rate == pytest.approx(2 * schedule.rate)


# --- prefixes --------------------------------------------------------------------------------------------------


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_equal_hash_ids_are_equal_prefixes_and_nothing_else_is(tmp_path: Path) -> None:
    rows = [row(0, 1300, 1, (0, 1, 2)), row(1, 1300, 1, (0, 1, 3)), row(2, 900, 1, (0, 4)), row(3, 700, 1, (5, 6))]
    schedule = load_trace(mooncake(tmp_path / "t.jsonl", rows))
    prompts = [schedule.prompt(a, 50_000) for a in schedule.arrivals]
    assert [len(p) for p in prompts] == [1300, 1300, 900, 700]
    assert common(prompts[0], prompts[1]) == 1024
    assert common(prompts[0], prompts[2]) == 512
    assert common(prompts[0], prompts[3]) == 0


def test_lengths_scale_with_their_shared_blocks_and_are_clipped(tmp_path: Path) -> None:
    rows = [row(0, 1024, 80, (0, 1)), row(1, 2048, 8, (0, 1, 2, 3))]
    path = mooncake(tmp_path / "t.jsonl", rows)
    small = load_trace(path, length_scale=1 / 64, max_prompt=20, max_output=1)
    assert [a.prompt_tokens for a in small.arrivals] == [16, 20]
    assert (small.num_clipped_prompts, small.num_clipped_outputs) == (1, 0)
    first, second = (small.prompt(a, 50_000) for a in small.arrivals)
    assert common(first, second) == 16
    assert load_trace(path, max_output=50).num_clipped_outputs == 1


# --- the real file ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (DATA / "mooncake_synthetic_trace.jsonl").exists(), reason="the trace is not here")
def test_mooncakes_synthetic_trace() -> None:
    path = DATA / "mooncake_synthetic_trace.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    schedule = load_trace(path, max_prompt=10**6, max_output=10**6)
    assert [a.prompt_tokens for a in schedule.arrivals] == [line["input_length"] for line in lines]
    assert [a.output_tokens for a in schedule.arrivals] == [line["output_length"] for line in lines]
    assert schedule.arrivals[-1].time_s == pytest.approx(lines[-1]["timestamp"] / 1e3)
    assert "bucket" not in schedule.note  # this one is not quantised
    pairs = [(i, j) for i in range(40) for j in range(i)]
    prompts = [schedule.prompt(a, 50_000) for a in schedule.arrivals[:40]]
    for i, j in pairs:
        shared = common(lines[i]["hash_ids"], lines[j]["hash_ids"])
        assert common(prompts[i], prompts[j]) == min(shared * 512, len(prompts[i]), len(prompts[j]))
