"""Ordering of the pipeline without a GPU: stages on fake streams, threads that are slow at random, joined by events.

The host enqueues and never waits, as on CUDA, so a missing event shows as a piece that arrives with another's content.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from nanopd.transfer import pipeline
from nanopd.transfer.marks import HostMark
from nanopd.transfer.pipeline import Pipeline, Stage

TIMEOUT = 20.0


class FakeStream:
    """Runs what it is given in order, in a thread of its own."""

    device = "fake"

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (call := self.work.get()) is not None:
            call()


class FakeMark:
    def __init__(self, stream: FakeStream) -> None:
        self.event = threading.Event()
        stream.work.put(self.event.set)

    def done(self) -> bool:
        return self.event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self.event.wait(TIMEOUT)


class Machine:
    """Four stages that pass a value through three rings of buffers, as the relay does."""

    def __init__(self, depth: int, delays: list[float]) -> None:
        self.current: FakeStream | None = None
        self.streams = [FakeStream() for _ in delays]
        self.rings = [[None] * depth for _ in delays[1:]]
        self.arrived: list[Any] = []
        self.enqueued = 0
        stages = [
            Stage(partial(partial, self.enqueue, i, delay), stream)
            for i, (stream, delay) in enumerate(zip(self.streams, delays))
        ]
        self.pipeline: Pipeline[Any] = Pipeline(stages, depth)  # type: ignore[arg-type]

    def enqueue(self, i: int, delay: float, item: Any, slot: int) -> None:
        assert self.current is self.streams[i], "a stage was enqueued on another stage's stream"

        def work() -> None:
            value = item if i == 0 else self.rings[i - 1][slot]
            time.sleep(delay)
            if i < len(self.rings):
                self.rings[i][slot] = value
            else:
                self.arrived.append(value)

        self.current.work.put(work)
        self.enqueued += 1

    def close(self) -> None:
        for stream in self.streams:
            stream.work.put(None)
        for stream in self.streams:
            stream.thread.join(TIMEOUT)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(depth: int, delays: list[float]) -> Machine:
        made.append(Machine(depth, delays))
        return made[-1]

    def follow(stream: FakeStream, earlier: Any) -> None:
        if isinstance(earlier, FakeMark):
            stream.work.put(lambda: earlier.event.wait(TIMEOUT))

    monkeypatch.setattr(pipeline, "mark", FakeMark)
    monkeypatch.setattr(pipeline, "follow", follow)
    monkeypatch.setattr(pipeline, "enter", lambda stream: setattr(made[-1], "current", stream))
    yield make
    for each in made:
        each.close()


SLOW = 0.004


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("slowest", [0, 1, 2, 3, None], ids=lambda i: f"slow {i}")
def test_every_piece_arrives_as_it_left(machine: Callable[..., Machine], depth: int, slowest: int | None) -> None:
    m = machine(depth, [SLOW if i == slowest else 0.0 for i in range(4)])
    ends = [m.pipeline.push(piece, HostMark())[1] for piece in range(12)]
    assert m.enqueued == 48
    assert ends[-1].wait() and ends[0].done()
    assert m.arrived == list(range(12))


def test_the_first_stage_waits_for_the_producer(machine: Callable[..., Machine]) -> None:
    m = machine(2, [0.0, 0.0])
    producer, content = FakeStream(), ["old"]
    producer.work.put(lambda: time.sleep(0.05))
    producer.work.put(lambda: content.__setitem__(0, "new"))
    ready = FakeMark(producer)
    m.pipeline.stages[0].prepare = lambda item, slot: partial(
        m.streams[0].work.put, lambda: m.rings[0].__setitem__(slot, content[0])
    )
    begin, end = m.pipeline.push(None, ready)
    assert not begin.done() and not end.done(), "the host waited"
    assert end.wait() and m.arrived == ["new"]
    producer.work.put(None)


def test_a_fence_is_behind_all_stages(machine: Callable[..., Machine]) -> None:
    m = machine(3, [0.0, 0.0, SLOW])
    for piece in range(5):
        m.pipeline.push(piece, HostMark())
    m.streams[0].work.put(lambda: time.sleep(0.05))  # as a stage that failed half way may leave behind
    m.streams[0].work.put(lambda: m.arrived.append("late"))
    assert m.pipeline.fence().wait() and set(m.arrived) == {0, 1, 2, 3, 4, "late"}


def test_a_stage_that_raises_leaves_the_pipeline_usable(machine: Callable[..., Machine]) -> None:
    m = machine(2, [0.0, 0.0, SLOW])
    stage = m.pipeline.stages[1]
    working = stage.prepare
    faults = {2: lambda *_: 1 / 0, 3: lambda *_: lambda: 1 / 0, 6: lambda *_: lambda: 1 / 0}  # before, or when enqueued
    for piece in range(9):
        stage.prepare = faults.get(piece, working)
        try:
            end = m.pipeline.push(piece, HostMark())[1]
        except ZeroDivisionError:
            assert piece in faults
    assert end.wait() and m.arrived == [0, 1, 4, 5, 7, 8]
