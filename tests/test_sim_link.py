"""Simulated links against a simulation of every single layer, and the event queue against sorting."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanopd.errors import ConfigError
from nanopd.sim.events import EventQueue
from nanopd.sim.link import Lane, SimulatedLink
from nanopd.transfer.handoff import Handoff
from tests.fake_cluster import LAYOUT


def handoff(number: int, num_blocks: int) -> Handoff:
    blocks = tuple(range(num_blocks))
    return Handoff(number, f"r{number}", "p", "d", blocks, blocks, num_blocks, True, LAYOUT)


def one_by_one(
    sizes: Sequence[float], free: float, first: float, last: float, layers: int, rate: float
) -> tuple[list[float], float]:
    """Each layer of each transfer as a piece of its own, in the order of the links: all first layers, all second, …"""
    now, passed = free, [0.0] * len(sizes)
    for layer in range(layers):
        ready = last if layers == 1 else first + (last - first) * layer / (layers - 1)
        for index, size in enumerate(sizes):
            now = max(now, ready) + size / layers / rate
            passed[index] = now
    return passed, now


@given(
    sizes=st.lists(st.floats(1e3, 1e9), min_size=1, max_size=4),
    free=st.floats(0, 5),
    first=st.floats(0, 5),
    length=st.floats(0, 5),
    layers=st.integers(1, 40),
)
def test_layers_pass_as_if_each_were_sent_on_its_own(
    sizes: list[float], free: float, first: float, length: float, layers: int
) -> None:
    lane = Lane(1.0)
    lane.free_at = free
    passed = lane.pass_through(sizes, first, first + length, layers)
    expected, end = one_by_one(sizes, free, first, first + length, layers, 1e9)
    assert passed == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert lane.free_at == pytest.approx(end)


def test_transfers_queue_up_behind_each_other() -> None:
    link = SimulatedLink(2.0, bytes_per_block=1e6, latency_s=0.5)
    arrivals = [link.send(handoff(i, 1000), now=0.1) for i in range(3)]  # 0.5 s each
    assert arrivals == pytest.approx([1.1, 1.6, 2.1])  # the latency delays, and does not occupy
    assert link.send(handoff(3, 1000), now=10.0) == pytest.approx(11.0)
    assert link.lane.busy_s == pytest.approx(2.0)


def test_the_last_layer_leaves_when_the_step_has_ended() -> None:
    link = SimulatedLink(1.0, bytes_per_block=1e6, num_layers=10)
    assert link.stream([handoff(0, 10)], 0.0, 1.0) == pytest.approx([1.0 + 0.001])  # 0.01 s in all: one layer is left
    assert link.stream([handoff(1, 3000)], 2.0, 3.0) == pytest.approx([2.1 + 3.0])  # the link sets the pace


def test_a_bus_is_shared() -> None:
    bus = Lane(1.0)
    links = [SimulatedLink(1.0, 1e6, bus=bus) for _ in range(2)]
    assert [link.send(handoff(0, 1000), 0.0) for link in links] == pytest.approx([1.0, 2.0])
    alone = SimulatedLink(1.0, 1e6, bus=Lane(100.0))
    assert alone.send(handoff(0, 1000), 0.0) == pytest.approx(1.0)  # the slower of the two decides


def test_a_stalled_link_delivers_nothing() -> None:
    link = SimulatedLink(1.0, 1e6)
    link.stalled = True
    assert link.send(handoff(0, 1), 0.0) is None and link.stream([handoff(1, 1)] * 2, 0.0, 1.0) == [None, None]


@pytest.mark.parametrize("gb_s", [0, 0.0, -3.0, float("inf"), float("nan"), True, "fast"])
def test_a_bandwidth_is_a_positive_number(gb_s: object) -> None:
    with pytest.raises(ConfigError, match="above 0 GB/s"):
        Lane(gb_s)  # type: ignore[arg-type]


def test_latency_and_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="latency"):
        SimulatedLink(1.0, 1e6, latency_s=-1.0)
    with pytest.raises(ConfigError, match="num_layers"):
        SimulatedLink(1.0, 1e6, num_layers=0)


@pytest.mark.parametrize("seed", range(5))
def test_events_come_in_order_of_time_and_of_entry(seed: int) -> None:
    draw, queue = random.Random(seed), EventQueue()
    events = [(draw.randint(0, 9) / 1.0, number) for number in range(200)]
    happened: list[tuple[float, int]] = []
    handles = [queue.enter(time, lambda event=(time, n): happened.append(event)) for time, n in events]  # type: ignore
    off = set(draw.sample(range(200), 60))
    for number in off:
        queue.call_off(handles[number])
    while (due := queue.next_time) is not None:
        time, action = queue.take()
        assert time == due
        action()
    assert happened == sorted(event for event in events if event[1] not in off)
