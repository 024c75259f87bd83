"""Two cards: what the simulator foretold against what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from nanopd.costmodel.hardware_profile import preset
from nanopd.errors import ConfigError
from nanopd.ops import measure
from nanopd.ops.measure import recorded
from nanopd.sim.fidelity import simulate
from nanopd.sim.two_cards import WORKLOADS, compare_with_record, main, other_chunks, verdicts

PERCENTILES = [f"{metric}_{share}" for metric in ("ttft", "tpot", "e2e") for share in ("p50", "p90")]
# How far a median or 90th percentile may be off, at any rate: what was found, rounded up.
NAMED = {"heavy": 0.30, "long": 0.35, "light": 0.35}


def values(name: str) -> Any:
    record = recorded(name)
    assert record is not None
    return record["values"]


@pytest.fixture(scope="module")
def runs() -> Any:
    return compare_with_record(values("two_cards"), preset("h200"))


def test_simulated_latencies_are_near_measured_ones(runs: Any) -> None:
    assert set(runs) == set(NAMED)
    for load, by_rate in runs.items():
        errors = [row[f"{name}_error"] for ways in by_rate.values() for row in ways.values() for name in PERCENTILES]
        assert max(map(abs, errors)) <= NAMED[load], load


def test_which_way_keeps_more_was_foretold_where_it_is_clear(runs: Any) -> None:
    count = verdicts(runs, values("two_cards"))
    assert count == values("simulated_two_cards")["verdicts"]
    assert count["clear"] >= 20 and count["other"] <= 1 and count["none"] <= 1
    assert count["unfounded"] < (count["all"] - count["clear"]) / 4


def test_verdicts_by_hand() -> None:
    def ways(chunked: tuple[int, int], apart: tuple[int, int]) -> dict[str, Any]:
        return {"chunked": {"kept": {"10": chunked}}, "apart": {"kept": {"10": apart}}}

    rows = [
        ((5, 6), (8, 7)),  # the same lead, but simulated by a tenth only
        ((5, 6), (8, 9)),  # the same, and clear
        ((5, 7), (8, 6)),  # the other way's
        ((5, 7), (8, 7)),  # none
        ((9, 9), (1, 2)),  # the same, and clear
        ((5, 0), (6, 9)),  # measured too close, simulated clear
        ((5, 5), (6, 6)),  # too close in both
    ]
    found = {"load": {str(i): ways(*row) for i, row in enumerate(rows)}}
    record = {"runs": {"load": {rate: {"chunked": {"counters": {"offered": 10}}} for rate in found["load"]}}}
    expected = {"all": 7, "clear": 5, "same": 3, "same_clear": 2, "none": 1, "other": 1, "unfounded": 1}
    assert verdicts(found, record) == expected


def test_the_record_is_this_comparison(runs: Any) -> None:
    stored = values("simulated_two_cards")
    for load, by_rate in runs.items():
        for rate, ways in by_rate.items():
            for way, row in ways.items():
                old = dict(stored["runs"][load][rate][way])
                assert old.pop("kept") == row["kept"]
                assert old == pytest.approx({name: row[name] for name in old}, rel=1e-3), (load, rate, way)
                assert set(old) == set(row) - {"kept"}


def test_chunks_of_another_size_would_hardly_have_kept_more(runs: Any) -> None:
    """But where docs/en/workers.md says so. So apart was compared with a fair rival."""
    record, better = values("two_cards"), []
    chunks, served = other_chunks(record, preset("h200")), str(record["chunk_size"])
    assert chunks == values("simulated_two_cards")["chunks"]
    for load, by_rate in chunks.items():
        for rate, by_chunk in by_rate.items():
            assert by_chunk[served] == {ms: kept[1] for ms, kept in runs[load][rate]["chunked"]["kept"].items()}
            offered = record["runs"][load][rate]["chunked"]["counters"]["offered"]
            for ms, kept in by_chunk[served].items():
                if max(counts[ms] for counts in by_chunk.values()) - kept > 0.07 * offered:
                    better.append((load, rate, ms))
    assert better == [("light", "44", "12")]


def test_a_record_without_a_links_speed_or_of_a_cut_off_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    record = values("two_cards")
    for links in ({}, {"a to b": {"path": "shared pool", "gb_s": None}}):
        with pytest.raises(ConfigError, match="how fast"):
            simulate("apart", 2.0, {**record, "links": links}, preset("h200"), 0.0, WORKLOADS["long"])
    with pytest.raises(ConfigError, match="no strategy 'both'"):
        simulate("both", 2.0, record, preset("h200"), 0.0, WORKLOADS["long"])
    half = {**record, "runs": {"long": {"2": {"chunked": record["runs"]["long"]["2"]["chunked"]}}}}
    monkeypatch.setattr(measure, "recorded", lambda name, gpu: {"values": half})
    with pytest.raises(ConfigError, match="long at 2/s for chunked only"):
        main([])


def test_simulated_records_are_those_of_the_schedule() -> None:
    """Without the requests that put the documents into the cache, and on the schedule's clock."""
    schedule, records = simulate("apart", 8.0, values("two_cards"), preset("h200"), 0.0, WORKLOADS["heavy"])
    assert [record.index for record in records] == [arrival.index for arrival in schedule.arrivals]
    assert [record.time_s for record in records] == pytest.approx([arrival.time_s for arrival in schedule.arrivals])
    assert [r.prompt_tokens for r in records] == [arrival.prompt_tokens for arrival in schedule.arrivals]
