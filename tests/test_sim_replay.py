"""Recordings: runs of a real server, with threads and a wall clock, repeat event for event."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import ConfigError, DuplicateRequestError, RecordingError, SimulationError, UnknownRequestError
from nanopd.router.central import CentralConfig
from nanopd.router.policies import make_policy
from nanopd.router.predictor import OutputLengthPredictor
from nanopd.router.server import Server
from nanopd.sim.driver import VirtualDriver
from nanopd.sim.durations import listed
from nanopd.sim.recording import Recorder, Recording, load_recording
from nanopd.sim.replay import build_workers, replay
from nanopd.sim.runner import SimulatedRunner
from nanopd.workers.worker import Worker
from tests.fake_cluster import all_links, make_workers
from tests.sim_cases import cluster


class WireTransfer:
    """A copy between two fake pools, in a thread, that takes a while and may fail."""

    def __init__(self, link: Wire, handoff: Any) -> None:
        self.link, self.handoff, self.layers = link, handoff, 0
        self.sent, self.done, self.failed = threading.Event(), threading.Event(), False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.sent.wait(10.0)
        time.sleep(self.link.draw.uniform(0.0, 0.004))
        self.failed = self.failed or self.link.draw.random() < self.link.faults
        if not self.failed:
            size = self.link.source.block_manager.block_size
            read, write = self.link.source.runner.slots, self.link.destination.runner.slots
            for a, b in zip(self.handoff.source_blocks, self.handoff.destination_blocks, strict=True):
                write[b * size : (b + 1) * size] = read[a * size : (a + 1) * size]
        self.done.set()

    def send_layer(self, layer: int) -> None:
        self.sent.set()

    def wait(self, timeout: float | None = None) -> bool:
        if not self.done.wait(timeout):
            return False
        if self.failed:
            raise RuntimeError("the cable came off")
        return True

    def cancel(self) -> None:
        self.failed = True
        self.sent.set()


class Wire:
    def __init__(self, source: Worker, destination: Worker, faults: float) -> None:
        self.source, self.destination, self.faults = source, destination, faults
        self.draw = random.Random(1)

    def open(self, handoff: Any) -> WireTransfer:
        return WireTransfer(self, handoff)

    def send(self, handoff: Any) -> WireTransfer:
        transfer = self.open(handoff)
        transfer.send_layer(0)
        return transfer

    def close(self) -> None:
        """Nothing to close."""


class Pending:
    def __init__(self, tokens: list[list[int]]) -> None:
        self.tokens = tokens

    def wait(self) -> list[list[int]]:
        return self.tokens


def slow(worker: Worker, faults: float) -> None:
    """Give a worker's fake runner a duration, ``launch``, and now and then a failure."""
    runner, draw = worker.runner, random.Random(worker.name)
    execute = runner.execute

    def slowly(plan: Any) -> list[list[int]]:
        tokens: list[list[int]] = execute(plan)
        time.sleep(draw.uniform(0.0, 0.003))
        if draw.random() < faults:
            raise RuntimeError("the device said no")
        return tokens

    def launch(plan: Any, after_layer: Any) -> Pending:
        tokens = slowly(plan)
        after_layer(0)
        return Pending(tokens)

    runner.execute, runner.launch = slowly, launch


def served(
    names: str, *, faults: float = 0.0, aborts: bool = False, kill: str | None = None, **options: Any
) -> Recording:
    """A real server on real threads under a load that comes as it comes; what happened, recorded."""
    shared = options.pop("shared_pool", False)
    workers = make_workers(names, num_blocks=24, shared_pool=shared, max_num_seqs=4)
    by_name = {worker.name: worker for worker in workers}
    for worker in workers:
        slow(worker, faults)
    links = {pair: Wire(by_name[pair[0]], by_name[pair[1]], faults) for pair in all_links(workers)}
    config = CentralConfig(growth_tokens=4, max_retries=5, max_failed_steps=50, **options)
    draw = random.Random(3)
    server = Server(workers, make_policy("round-robin"), links=links, config=config, predictor=OutputLengthPredictor())
    with server:
        recorder = Recorder(server)
        for number in range(25):
            prompt = [3] * draw.randint(0, 12) + [draw.randint(1, 9) for _ in range(draw.randint(1, 25))]
            params = SamplingParams(n=draw.choice((1, 1, 2)), max_tokens=draw.randint(0, 15), seed=number)
            server.add_request(prompt, params, request_id=f"r{number}", on_output=lambda output: None)
            if aborts and number % 4 == 3:
                with suppress(UnknownRequestError):
                    server.abort(f"r{number - 2}")
            if kill is not None and number == 12:
                with server._lock:
                    server.central.worker_failed(by_name[kill], RuntimeError("unplugged"), server.clock())
            time.sleep(draw.uniform(0.0, 0.004))
        with pytest.raises(DuplicateRequestError):
            for _ in range(2):
                server.add_request([1] * 20, SamplingParams(max_tokens=15, seed=1), request_id="twice", on_output=print)
        assert server.drain(30.0)
    return recorder.recording


CASES = {
    "collocated": {"names": "c0 c1"},
    "apart": {"names": "p0 d0 d1"},
    "all roles": {"names": "c0 p0 p1 d0", "aborts": True},
    "shared pool": {"names": "c0 p0 d0", "shared_pool": True},
    "whole transfers": {"names": "c0 p0 d0", "stream_layers": False},
    "failures": {"names": "c0 p0 d0 d1", "faults": 0.1, "aborts": True},
    "a worker dies": {"names": "c0 p0 d0 d1", "kill": "d0"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_servers_run_repeats_event_for_event(case: str, tmp_path: Path) -> None:
    recording = served(**CASES[case])  # type: ignore[arg-type]
    kinds = {event.kind for event in recording.events}
    assert {"routed", "step", "finished"} <= kinds
    if case not in ("collocated",):
        assert {"granted", "arrived"} <= kinds
    if case in ("failures", "a worker dies"):
        assert "retried" in kinds
    read = load_recording(recording.save(tmp_path / "run.json"))
    assert read == Recording(
        recording.setup | {"links": [list(p) for p in recording.setup["links"]]}, read.calls, recording.events
    )
    events = replay(read, make_policy("round-robin"), predictor=OutputLengthPredictor())
    assert events == list(recording.events) and len(events) > 100


def simulated() -> Recording:
    """A small run to damage, from the virtual driver: a recorder listens there just as well."""
    driver = cluster(1, 1, 1).driver(make_policy("round-robin"))
    recorder = Recorder(driver)
    for number in range(6):
        driver.at(0.004 * number, lambda n=number: driver.add_request(bytes([n] * 90), SamplingParams(max_tokens=8)))  # type: ignore
    driver.run()
    return recorder.recording


def test_a_simulated_run_repeats_too() -> None:
    recording = simulated()
    assert replay(recording) == list(recording.events)


@pytest.mark.parametrize("field", ["now", "tokens", "order", "policy", "pool"])
def test_a_replay_that_differs_shows_where(field: str) -> None:
    """What decides the run is in the recording: change any of it, and the events are others."""
    recording = simulated()
    calls = [dict(row) for row in recording.calls]
    setup, policy = dict(recording.setup), None
    ends = [i for i, row in enumerate(calls) if row["call"] == "finish_step"]
    if field == "now":
        next(row for row in calls if row.get("planned"))["now"] += 1e-6
    elif field == "tokens":
        calls[ends[3]]["tokens"] = []
    elif field == "order":
        first = next(i for i in ends if calls[i + 1]["call"] == "begin_step" and calls[i + 1]["planned"])
        calls[first], calls[first + 1] = calls[first + 1], calls[first]
    elif field == "policy":
        policy = make_policy("collocated")
    else:
        setup["pools"] = [dict(pool, num_blocks=8) for pool in setup["pools"]]
    with pytest.raises(SimulationError):
        replay(replace(recording, calls=calls, setup=setup), policy)


def test_recorded_durations_drive_a_simulation_to_the_same_decisions() -> None:
    """No call is repeated here: the virtual driver takes its own steps, which last as long as the recorded ones."""
    recording = simulated()
    workers = build_workers(recording.setup)
    for worker in workers:
        worker.runner = SimulatedRunner(listed(recording.step_seconds(worker.name)))
    events: list[Any] = []
    made = cluster(1, 1, 1).driver(make_policy("round-robin"))
    driver = VirtualDriver(workers, make_policy("round-robin"), links=made.links, observe=events.append)
    for number in range(6):
        driver.at(0.004 * number, lambda n=number: driver.add_request(bytes([n] * 90), SamplingParams(max_tokens=8)))  # type: ignore
    driver.run()
    assert [e[1:] for e in map(_row, events)] == [e[1:] for e in map(_row, recording.events)]
    assert [e.time for e in events] == pytest.approx([e.time for e in recording.events])


def test_the_hosts_time_is_what_lies_between_steps_that_follow_each_other() -> None:
    begun = [(1.0, True), (2.5, True), (3.1, False), (9.0, True)]
    rows = [("begin_step", now, planned) for now, planned in begun]
    rows = sorted([*rows, *(("finish_step", now, False) for now in (2.0, 3.0, 9.5))], key=lambda row: row[1])
    calls = [{"call": call, "worker": "w", "now": now, "planned": planned} for call, now, planned in rows]
    recording = Recording({}, [*calls, {"call": "tick", "now": 10.0}], [])
    assert recording.host_seconds("w") == [0.5]  # not the 6 s without work
    assert recording.step_seconds("w") == [1.0, 0.5, 0.5] and recording.step_seconds("other") == []


def _row(event: Any) -> tuple[float, str, str, str]:
    return event.time, event.kind, event.subject, event.detail


def test_a_list_of_durations_ends() -> None:
    with pytest.raises(SimulationError, match="used up"):
        listed([])(None)  # type: ignore[arg-type]


def test_a_recording_begins_before_the_first_request() -> None:
    driver = cluster(1).driver(make_policy("collocated"))
    driver.add_request([1])
    with pytest.raises(ConfigError, match="before the first request"):
        Recorder(driver)
    driver.drain()  # nothing is in flight, and blocks and transfers have been numbered all the same
    with pytest.raises(ConfigError, match="before the first request"):
        Recorder(driver)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot read"):
        load_recording(tmp_path / "none.json")
    path = tmp_path / "run.json"
    path.write_text('{"format": "other"}')
    with pytest.raises(RecordingError, match="format"):
        load_recording(path)
    path.write_text('{"format": "nanopd-recording-1", "setup": {}}')
    with pytest.raises(RecordingError, match="damaged"):
        load_recording(path)
    recording = simulated()
    with pytest.raises(RecordingError, match="call 0"):
        replay(replace(recording, calls=[{"call": "submit", "now": 0.0}]))


def test_stop_strings_need_the_tokenizer() -> None:
    recording = simulated()
    row = dict(recording.calls[0])
    assert row["call"] != "tick"
    first = next(i for i, call in enumerate(recording.calls) if call["call"] == "submit")
    calls = [dict(call) for call in recording.calls]
    calls[first]["params"] = {**calls[first]["params"], "stop": ["end"]}
    with pytest.raises(RecordingError, match="tokenizer"):
        replay(replace(recording, calls=calls))
