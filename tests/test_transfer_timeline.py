"""The overlap model: exact arithmetic, against an event-by-event simulation and known cases."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanopd.errors import ConfigError
from nanopd.transfer import overlap_timeline
from nanopd.transfer.timeline import LayerTimeline, Span, hidden_share

MB = 10**6


def test_a_slow_link_hides_all_but_what_it_takes_longer() -> None:
    """Four layers of 1 ms, 3 ms each on the link: the first leaves at 1, the last arrives at 1 + 12."""
    line = overlap_timeline([1.0] * 4, 3 * MB, 1.0)
    assert [(span.begin, span.end) for span in line.transfer] == [(1, 4), (4, 7), (7, 10), (10, 13)]
    assert (line.compute_ms, line.transfer_ms, line.total_ms, line.exposed_ms) == (4, 12, 13, 9)
    assert line.hidden_share == 1 - 9 / 12


def test_a_fast_link_exposes_one_layer() -> None:
    line = overlap_timeline([2.0] * 4, MB, 1.0)
    assert [span.begin for span in line.transfer] == [2, 4, 6, 8]
    assert line.exposed_ms == 1 and line.hidden_share == 0.75


def test_without_streaming_nothing_is_hidden() -> None:
    line = overlap_timeline([2.0, 3.0], MB, 0.5, latency_ms=0.25, streamed=False)
    assert [(span.begin, span.end) for span in line.transfer] == [(5, 7), (7, 9)]
    assert line.total_ms == 9.25 and line.hidden_share == 0


@given(
    compute=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    travel=st.integers(0, 60),
    latency=st.integers(0, 9),
    streamed=st.booleans(),
)
def test_against_a_tick_by_tick_simulation(compute: list[int], travel: int, latency: int, streamed: bool) -> None:
    line = overlap_timeline([float(c) for c in compute], travel * MB, 1.0, latency_ms=latency, streamed=streamed)
    ready_at = [sum(compute[: i + 1]) if streamed else sum(compute) for i in range(len(compute))]
    clock, waiting, ends = 0, list(ready_at), []
    while waiting:  # one tick is a millisecond; the link takes the first layer that is ready
        if waiting[0] <= clock:
            clock += travel
            ends.append(clock)
            waiting.pop(0)
        else:
            clock += 1
    assert [span.end for span in line.transfer] == ends
    assert line.total_ms == max(sum(compute), ends[-1] + latency)
    assert line.compute_ms == sum(compute)
    moving = travel * len(compute) + latency
    expected_share = 1 - Fraction(int(line.total_ms) - sum(compute), moving) if moving else 1
    assert line.hidden_share == pytest.approx(float(expected_share))


def test_pieces_side_by_side_count_once() -> None:
    """A relay has several pieces on the way: 0 to 3, 1 to 2 within it, 2 to 5, and 7 to 8 after a gap."""
    spans = tuple(Span(*times) for times in ((0.0, 3.0), (1.0, 2.0), (2.0, 5.0), (7.0, 8.0)))
    line = LayerTimeline((Span(0.0, 4.0),), spans, streamed=True)
    assert line.transfer_ms == 6 and line.hidden_share == pytest.approx(1 - 4 / 6)


@given(
    compute=st.lists(st.floats(0.01, 10), min_size=1, max_size=40),
    layer_bytes=st.integers(1, 10**8),
    gb_s=st.floats(0.1, 1000),
)
def test_streaming_is_never_slower_and_never_free(compute: list[float], layer_bytes: int, gb_s: float) -> None:
    streamed, serial = (overlap_timeline(compute, layer_bytes, gb_s, streamed=mode) for mode in (True, False))
    assert streamed.total_ms <= serial.total_ms * (1 + 1e-9)
    assert streamed.exposed_ms >= layer_bytes / gb_s / 1e6 * (1 - 1e-6) - 1e-9, "the last layer travels after computing"


@pytest.mark.parametrize("share", [(10, 4, 10, 1.0), (10, 4, 14, 0.0), (10, 4, 16, -0.5), (10, 0, 10, 1.0)])
def test_hidden_share(share: tuple[float, float, float, float]) -> None:
    assert hidden_share(*share[:3]) == share[3]


@pytest.mark.parametrize(
    "arguments", [([], 1, 1.0), ([-1.0], 1, 1.0), ([1.0], -1, 1.0), ([1.0], 1, 0.0), ([1.0], 1, float("nan"))], ids=str
)
def test_bad_input(arguments: tuple) -> None:
    with pytest.raises(ConfigError, match="a timeline needs"):
        overlap_timeline(*arguments)
