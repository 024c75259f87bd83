"""What callers do to a server: bad options, callbacks that raise or call back, readers that go away, Ctrl-C."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from nanopd.engine.outputs import RequestOutput
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import (
    ConfigError,
    IllegalTransitionError,
    InvalidRequestError,
    LinkStalledError,
    TransferError,
    WorkerFailedError,
)
from nanopd.router.central import CentralConfig, Event
from nanopd.router.clients import ServerStream
from nanopd.router.server import Server
from nanopd.workers.worker import Worker
from tests.fake_cluster import make_workers
from tests.fake_link import FakeLink, FakeTransfer
from tests.fake_runner import oracle
from tests.server_cases import COLLOCATED, DISAGGREGATED, MAX_LEN, check_idle, no_new_threads, serve

LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
SHORT = SamplingParams(max_tokens=1, seed=0)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    with no_new_threads():
        yield


class Gate:
    """Holds a worker's steps back while it is closed."""

    def __init__(self, worker: Worker) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        execute, launch = worker.runner.execute, worker.runner.launch
        worker.runner.execute = lambda plan: self._pass(execute, plan)
        worker.runner.launch = lambda plan, after_layer=None: self._pass(launch, plan, after_layer)

    def _pass(self, call: Any, *args: Any) -> Any:
        self.reached.set()
        assert self._open.wait(10)
        return call(*args)

    def open(self) -> None:
        self._open.set()


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [{"poll_s": 0}, {"poll_s": math.nan}, {"poll_s": "1"}, {"clock": 5}, {"clock": None}, {"on_step": 3}]
    + [{"observe": "x"}],
    ids=lambda option: "-".join(f"{key}={value}" for key, value in option.items()),
)
def test_options_that_make_no_sense_are_named(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        Server(make_workers("c0"), COLLOCATED, **option)


@pytest.mark.parametrize("time", [math.nan, math.inf, True, "now", pytest.param(10**400, id="huge")])
def test_an_arrival_time_is_a_finite_number(time: Any) -> None:
    server = serve(make_workers("c0"), COLLOCATED)
    with pytest.raises(InvalidRequestError, match="arrival_time"):
        server.add_request([1], SHORT, arrival_time=time, on_output=print)
    check_idle(server)


def test_outputs_need_somebody_to_go_to() -> None:
    server = serve(make_workers("c0"), COLLOCATED)
    with pytest.raises(InvalidRequestError, match="on_output"):
        server.add_request([1], SHORT, on_output=None)  # type: ignore[arg-type]
    check_idle(server)


def test_links_that_another_server_has_closed_are_refused_where_they_are_needed() -> None:
    class Closing(FakeLink):
        closed = False

        def close(self) -> None:
            super().close()
            self.closed = True

    for shared in (True, False):
        workers = make_workers("p0 d0", shared_pool=shared)
        links = {("p0", "d0"): Closing(*workers)}
        Server(workers, DISAGGREGATED, links=links).close()
        if shared:  # nobody needs it
            Server(workers, DISAGGREGATED, links=links).close()
        else:
            with pytest.raises(ConfigError, match="p0 to d0 is closed"):
                Server(workers, DISAGGREGATED, links=links)


def test_workers_of_a_server_that_is_open_are_refused() -> None:
    workers = make_workers("p0 d0", shared_pool=True)
    first = serve(workers)
    with pytest.raises(ConfigError, match="p0, d0 of another server, which is still open"):
        serve(workers)
    assert len(first.generate([[1, 2], [3]], SHORT, use_tqdm=False)) == 2
    first.close()
    second = serve(workers)
    (output,) = second.generate([5, 6, 7], LONG, use_tqdm=False)
    first.close()  # once more: the workers are no longer its own
    with pytest.raises(ConfigError, match="of another server"):
        serve(workers)
    assert output.outputs[0].token_ids == oracle([5, 6, 7], LONG, 0, MAX_LEN)
    check_idle(second)


def test_a_server_that_was_refused_keeps_no_worker() -> None:
    workers = make_workers("c0 c1")
    with serve(workers[1:], COLLOCATED):
        with pytest.raises(ConfigError, match=r"^c1 of another server"):
            serve(workers, COLLOCATED)
        with serve(workers[:1], COLLOCATED) as server:
            assert len(server.generate([[1, 2]], SHORT, use_tqdm=False)) == 1


# --- callbacks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("a mistake"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.filterwarnings("ignore:an output callback raised")
def test_whatever_a_callback_raises_the_others_get_their_outputs(error: BaseException) -> None:
    server = serve(make_workers("c0"), COLLOCATED)
    finished: SimpleQueue[RequestOutput] = SimpleQueue()

    def broken(output: RequestOutput) -> None:
        raise error

    server.add_request([1], SHORT, on_output=broken)
    server.add_request([2], SHORT, on_output=finished.put)
    assert finished.get(timeout=5).finished
    check_idle(server)


@pytest.mark.filterwarnings("error")
def test_warnings_as_errors_end_no_thread(capfd: pytest.CaptureFixture[str]) -> None:
    server = serve(make_workers("c0"), COLLOCATED, on_step=lambda name, step: 1 / 0)
    finished: SimpleQueue[RequestOutput] = SimpleQueue()
    server.add_request([1], SHORT, on_output=lambda output: 1 / 0)
    server.add_request([2], SHORT, on_output=finished.put)
    assert finished.get(timeout=5).error is None
    check_idle(server)
    assert "division by zero" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["on_step", "observe"])
def test_an_observer_that_raises_changes_nothing(name: str) -> None:
    def broken(*args: object) -> None:
        raise ValueError("the observer's own mistake")

    with pytest.warns(UserWarning, match=f"{name} raised ValueError: the observer's own mistake"):
        server = serve(make_workers("p0 d0"), **{name: broken})
        (output,) = server.generate([5, 6, 7], LONG, use_tqdm=False)
        assert output.outputs[0].token_ids == oracle([5, 6, 7], LONG, 0, MAX_LEN)
        check_idle(server)


@pytest.mark.filterwarnings("ignore:the predictor raised ValueError")
def test_a_predictor_that_raises_loses_no_request() -> None:
    class Broken:
        def predict(self, request: object) -> float:
            return 5.0

        def observe(self, request: object) -> None:
            raise ValueError("not a number")

    server = serve(make_workers("p0 d0"), predictor=Broken())
    assert len(server.generate([[1, 2], [3, 4], [5]], SHORT, use_tqdm=False)) == 3
    check_idle(server)


@pytest.mark.parametrize("what", ["close", "drain", "generate", "reading a stream"])
def test_a_callback_that_would_wait_for_itself_is_told(what: str) -> None:
    server = serve(make_workers("c0"), COLLOCATED)
    calls = {
        "close": server.close,
        "drain": lambda: server.drain(5),
        "generate": lambda: server.generate([1], SHORT, use_tqdm=False),
        "reading a stream": lambda: next(server.stream([1], SHORT)),
    }
    errors: SimpleQueue[BaseException] = SimpleQueue()

    def call_back(output: RequestOutput) -> None:
        try:
            calls[what]()
        except BaseException as error:
            errors.put(error)

    server.add_request([1], SHORT, on_output=call_back)
    error = errors.get(timeout=5)
    assert isinstance(error, IllegalTransitionError) and str(error).startswith(what)
    assert server.drain(5)
    check_idle(server)


@pytest.mark.parametrize("what", ["abort", "add_request", "drain", "close"])
@pytest.mark.parametrize("kind", ["routed", "granted", "arrived"])
def test_an_observer_cannot_change_what_is_being_changed(what: str, kind: str) -> None:
    errors: list[BaseException] = []

    def call_back(event: Event) -> None:
        calls = {
            "abort": lambda: server.abort(event.subject),
            "add_request": lambda: server.add_request([1], SHORT, on_output=print),
            "drain": lambda: server.drain(5),
            "close": server.close,
        }
        if event.kind == kind:
            try:
                calls[what]()
            except IllegalTransitionError as error:
                errors.append(error)

    server = serve(make_workers("p0 d0"), observe=call_back)
    outputs = server.generate([[1, 2], [3, 4, 5], [6]], LONG, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40, 40, 40]
    assert len(errors) == 3
    check_idle(server)


def test_an_observer_cannot_read_a_stream_in_the_thread_of_its_caller() -> None:
    """It would hold the lock that the output must pass."""
    errors: list[BaseException] = []
    streams: list[ServerStream] = []

    def read(event: Event) -> None:
        if event.kind == "routed" and streams:
            try:
                next(streams[0])
            except IllegalTransitionError as error:
                errors.append(error)

    server = serve(make_workers("c0"), COLLOCATED, observe=read)
    streams.append(server.stream([1, 2], LONG))
    server.generate([[3, 4]], SHORT, use_tqdm=False)
    assert len(errors) == 1
    assert list(streams[0])[-1].outputs[0].token_ids == oracle([1, 2], LONG, 0, MAX_LEN)
    check_idle(server)


def test_a_callback_may_add_and_abort() -> None:
    server = serve(make_workers("p0 d0"))
    finished: SimpleQueue[RequestOutput] = SimpleQueue()

    def chain(output: RequestOutput) -> None:
        name = server.add_request([1, 2], LONG, on_output=finished.put)
        server.abort(name)

    server.add_request([1], SHORT, on_output=chain)
    assert finished.get(timeout=5).outputs[0].finish_reason == "aborted"
    check_idle(server)


# --- readers that go away ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_read", [0, 1])
def test_a_stream_that_is_dropped_ends_its_request(num_read: int) -> None:
    workers = make_workers("p0 d0")
    server = serve(workers)
    steps: list[str] = []
    server._on_step = lambda name, step: steps.append(name)  # type: ignore[assignment]
    gate = Gate(workers[num_read])  # the first token comes from the prefill worker
    stream = server.stream([5, 6, 7], LONG)
    if num_read:
        next(stream)
    del stream
    gc.collect()
    gate.open()
    assert server.drain(5)
    assert len(steps) < LONG.max_tokens
    check_idle(server)


def test_the_garbage_collector_may_come_while_the_lock_is_held() -> None:
    """Dropping a stream in the middle of the state machine's work changes nothing there."""
    workers = make_workers("p0 d0")
    gate = Gate(workers[1])
    server = serve(workers)
    stream = server.stream([5, 6, 7], LONG)
    next(stream)
    with server._lock:
        del stream
        gc.collect()
        assert server.central.num_unfinished == 1
    gate.open()
    assert server.drain(5)
    check_idle(server)


def test_a_closed_stream_is_at_its_end() -> None:
    server = serve(make_workers("p0 d0"))
    with server.stream([5, 6, 7], LONG) as stream:
        next(stream)
    assert list(stream) == []
    assert server.drain(5)
    check_idle(server)


def test_a_stream_ends_when_the_server_closes() -> None:
    workers = make_workers("p0 d0")
    gate = Gate(workers[0])
    server = serve(workers)
    stream = server.stream([5, 6, 7], LONG)
    assert gate.reached.wait(5)
    threading.Timer(0.05, gate.open).start()
    server.close()
    (last,) = stream
    assert last.finished and last.outputs[0].finish_reason == "aborted"
    check_idle(server)


def test_ctrl_c_waits_for_the_state_machine_and_then_aborts_everything() -> None:
    """The interrupt comes right behind `submit`: what was accepted is known, and ends."""
    workers = make_workers("p0 d0")
    gate = Gate(workers[0])
    server = serve(workers)
    submit = server.central.submit

    def interrupted(*args: Any, **options: Any) -> None:
        submit(*args, **options)
        os.kill(os.getpid(), signal.SIGINT)

    server.central.submit = interrupted  # type: ignore[method-assign]
    # A process that a script starts in the background ignores the signal, and its tests would too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            server.generate([[1, 2], [3, 4]], LONG, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert server.central.num_unfinished == 0
    gate.open()
    check_idle(server)


# --- links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_link_may_raise_what_it_likes(streamed: bool) -> None:
    workers = make_workers("p0 d0")
    server = serve(workers, config=CentralConfig(stream_layers=streamed, max_retries=3))
    (link,) = server._links.values()
    whole, count = link.open, iter(range(100))

    def broken(handoff: Any) -> FakeTransfer:
        if next(count) < 2:
            raise RuntimeError("the device fell off the bus")
        return whole(handoff)

    link.open = broken  # type: ignore[method-assign]
    (output,) = server.generate([5, 6, 7], LONG, use_tqdm=False)
    assert output.outputs[0].token_ids == oracle([5, 6, 7], LONG, 0, MAX_LEN)
    assert workers[0].alive
    check_idle(server)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_request_that_no_transfer_takes_fails_with_the_links_reason(streamed: bool) -> None:
    server = serve(make_workers("p0 d0"), config=CentralConfig(stream_layers=streamed, max_retries=1))
    (link,) = server._links.values()

    def closed(handoff: Any) -> FakeTransfer:
        raise OSError("the link is closed")

    link.open = closed  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="the link is closed"):
        server.generate([5, 6, 7], LONG, use_tqdm=False)
    check_idle(server)


def test_a_thread_that_dies_gives_its_requests_a_type() -> None:
    workers = make_workers("c0 c1")

    def dies(plan: Any) -> None:
        raise SystemExit("out of cores")

    for worker in workers:
        worker.runner.execute = dies
    before, threading.excepthook = threading.excepthook, lambda args: None
    try:
        server = serve(workers, COLLOCATED)
        with pytest.raises(WorkerFailedError, match="out of cores"):
            server.generate([5, 6, 7], LONG, use_tqdm=False)
        check_idle(server)
    finally:
        threading.excepthook = before


def test_transfers_that_never_end_are_cancelled_by_close() -> None:
    server = serve(make_workers("p0 d0"))
    (link,) = server._links.values()
    opened: SimpleQueue[FakeTransfer] = SimpleQueue()

    def stuck(handoff: Any) -> FakeTransfer:
        transfer = FakeTransfer(link, handoff)  # type: ignore[arg-type]
        transfer.send_layer = lambda layer: None  # type: ignore[method-assign]
        opened.put(transfer)
        return transfer

    link.open = stuck  # type: ignore[method-assign]
    finished: SimpleQueue[RequestOutput] = SimpleQueue()
    server.add_request([5, 6, 7], LONG, on_output=finished.put)
    transfer = opened.get(timeout=5)
    check_idle(server)
    assert finished.get(timeout=1).outputs[0].finish_reason == "aborted"
    with pytest.raises(TransferError, match="cancelled"):
        transfer.wait(0)


def test_a_link_that_cannot_be_closed_is_reported_when_all_else_is_closed() -> None:
    server = serve(make_workers("p0 p1 d0"))
    links = list(server._links.values())
    opened: SimpleQueue[FakeTransfer] = SimpleQueue()

    def stuck(handoff: Any) -> FakeTransfer:
        transfer = FakeTransfer(links[0], handoff)  # type: ignore[arg-type]
        transfer.send_layer = transfer.end = lambda layer=0: None  # type: ignore[method-assign]
        opened.put(transfer)
        return transfer

    def stalled() -> None:
        raise LinkStalledError("it has not stopped after 30 s")

    ends = [link.close for link in links]
    links[0].close, links[0].open, links[1].open = stalled, stuck, stuck  # type: ignore[method-assign]
    server.add_request([5, 6, 7], LONG, on_output=print)
    opened.get(timeout=5)
    with pytest.raises(LinkStalledError, match="30 s"):
        server.close()
    ends[0]()
    check_idle(server)
