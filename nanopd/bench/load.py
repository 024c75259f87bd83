"""Open-loop load: requests are sent when they are due, whatever became of those before.

A pacer thread sends; it never waits for a response, and hands the *scheduled* time on as the arrival time, also when
it is late itself. The calling thread watches: it aborts what takes too long, and whatever is left at the end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nanopd.bench.flights import Flights
from nanopd.bench.records import Outcome, RequestRecord
from nanopd.bench.target import Target
from nanopd.bench.workload import Arrival, Schedule
from nanopd.costmodel.checks import check_number, shown
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import ConfigError, EngineClosedError, NanoPDError, UnknownRequestError

LEAD_S = 0.02  # the start lies that far in the future, so that the first request is not late by a thread's start
GRACE_S = 10.0  # for the last outputs of aborted requests: a step that runs must end first
GLANCE_S = 0.05  # how often the watcher looks
NAP_S = 3600.0  # the longest that a pacer sleeps at once: a thread cannot wait for 300 years


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a run is done. Raises ConfigError for times that are negative or not finite.

    * ``timeout_s``: a client gives up that long after the scheduled arrival: abort, counted as timed out.
    * ``drain_s``: how long after the end of the schedule to wait for what is in flight; the rest is ``unfinished``.
    * ``warmup_s``: requests scheduled before this are sent and not counted.
    * ``stream``: take an output after each token; the gaps are then the client's own, at some cost per token.
    """

    timeout_s: float | None = None
    drain_s: float = 60.0
    warmup_s: float = 0.0
    stream: bool = False

    def __post_init__(self) -> None:
        for name, value in (("timeout_s", self.timeout_s), ("drain_s", self.drain_s), ("warmup_s", self.warmup_s)):
            if value is not None or name != "timeout_s":
                check_number(name, value, unit="seconds")
        if not isinstance(self.stream, bool):
            raise ConfigError(f"stream must be True or False, got {shown(self.stream)}")


def run_load(
    target: Target,
    schedule: Schedule,
    *,
    vocab_size: int,
    options: LoadOptions = LoadOptions(),
    wait: Callable[[float], object] | None = None,
    use_tqdm: bool = True,
    label: str = "",
) -> list[RequestRecord]:
    """Send all arrivals of ``schedule``, on time and regardless of the answers; greedy, with exact output lengths.

    Args:
        vocab_size: prompts hold token ids below it.
        wait: how the pacer sleeps that many seconds; the default is real, a test may turn its own clock.
        label: stands before the progress bar.

    Returns: one record per arrival, in order. It comes at the latest ``drain_s`` and ten seconds after the last
        arrival, also if the target hangs.

    Raises: an error of the pacer that is no refusal, or KeyboardInterrupt; everything in flight is aborted before.
    """
    requests = [(a, schedule.prompt(a, vocab_size), _params(a)) for a in schedule.arrivals]
    flights = Flights(target, options.timeout_s, options.stream)
    pacer = _Pacer(target, requests, flights, options, wait)
    pacer.thread.start()
    try:
        with _progress(len(requests), use_tqdm, label) as show:
            _watch(target, flights, pacer, schedule.duration_s, options, show)
    finally:
        pacer.stop()
        _abort_rest(target, flights)
    if pacer.error is not None:
        raise pacer.error
    for arrival in schedule.arrivals:
        flights.give_up(arrival, "the run ended before it was sent")
    return flights.close()


class _Pacer:
    def __init__(
        self,
        target: Target,
        requests: list[tuple[Arrival, list[int], SamplingParams]],
        flights: Flights,
        options: LoadOptions,
        wait: Callable[[float], object] | None,
    ) -> None:
        self.target, self.requests, self.flights, self.options = target, requests, flights, options
        self.error: BaseException | None = None
        self.lateness = 0.0  # of the last send
        self.deadlines: deque[tuple[float, str]] = deque()  # of what was sent, in order
        self.start = target.clock() + LEAD_S
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        self.thread = threading.Thread(target=self._run, name="pacer", daemon=True)

    @property
    def done(self) -> bool:
        return not self.thread.is_alive()

    def stop(self) -> None:
        self._stopped.set()
        self.thread.join(GRACE_S)  # a target that hangs in add_request keeps it

    def _run(self) -> None:
        try:
            for arrival, prompt, params in self.requests:
                due = self.start + arrival.time_s
                while (rest := due - self.target.clock()) > 0 and not self._stopped.is_set():
                    self._wait(min(rest, NAP_S))
                if self._stopped.is_set():
                    return
                self._send(arrival, prompt, params, due)
        except BaseException as error:  # for the caller's thread to raise
            self.error = error

    def _send(self, arrival: Arrival, prompt: list[int], params: SamplingParams, due: float) -> None:
        self.lateness = late = self.target.clock() - due
        timeout = self.options.timeout_s
        if timeout is not None and late > timeout:
            self.flights.drop(arrival, Outcome.TIMED_OUT, f"not sent within {timeout:g} s", late)
            return
        name = self.flights.take_off(arrival, late)  # before it is sent: the answer may be there before add_request is
        try:
            self.target.add_request(
                prompt,
                params,
                request_id=name,
                arrival_time=due,
                stream=self.options.stream,
                on_output=self.flights.on_output,
            )
        except NanoPDError as error:
            self.flights.drop(arrival, Outcome.REFUSED, f"{type(error).__name__}: {error}", late)
            return
        except BaseException:  # a broken target: `run_load` raises it, and must not wait for this one
            self.flights.drop(arrival, Outcome.FAILED, "could not be sent", late)
            raise
        if timeout is not None:
            self.deadlines.append((due + timeout, name))


def _watch(
    target: Target,
    flights: Flights,
    pacer: _Pacer,
    duration_s: float,
    options: LoadOptions,
    show: Callable[[Flights, float], None],
) -> None:
    """Until all has landed or the drain is over: abort what is overdue, show progress."""
    end = pacer.start + duration_s + options.drain_s
    while not (pacer.done and flights.num_in_flight == 0):
        flights.wait_for_change(GLANCE_S)
        now = target.clock()
        while pacer.deadlines and pacer.deadlines[0][0] < now:
            _, name = pacer.deadlines.popleft()
            if flights.mark(name, Outcome.TIMED_OUT, f"over {options.timeout_s:g} s"):
                _abort(target, name)
        show(flights, pacer.lateness)
        if now > end or pacer.error is not None:
            return
    show(flights, pacer.lateness)


def _abort_rest(target: Target, flights: Flights) -> None:
    for name in flights.names():
        if flights.mark(name, Outcome.UNFINISHED, "in flight at the end of the run"):
            _abort(target, name)
    end = time.monotonic() + GRACE_S
    while flights.num_in_flight and time.monotonic() < end:
        flights.wait_for_change(GLANCE_S)


def _abort(target: Target, name: str) -> None:
    with suppress(UnknownRequestError, EngineClosedError):  # it has just finished
        target.abort(name)


def _params(arrival: Arrival) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True)


@contextmanager
def _progress(total: int, use_tqdm: bool, label: str) -> Iterator[Callable[[Flights, float], None]]:
    """A bar of ended requests; beside it what is in flight, dropped, and how late the last send was."""
    if not use_tqdm:
        yield lambda flights, lateness: None
        return
    from tqdm.auto import tqdm  # here, so that a simulator need not load it

    with tqdm(total=total, desc=label or "load", unit="req") as bar:
        shown = 0.0

        def show(flights: Flights, lateness: float) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown < 0.2 and flights.num_landed < total:
                return
            shown = now
            late = f", {lateness * 1e3:.0f} ms late" if lateness > 0.01 else ""
            bar.set_postfix_str(
                f"{flights.num_in_flight} in flight, {flights.num_dropped} dropped{late}", refresh=False
            )
            bar.n = flights.num_landed
            bar.refresh()

        yield show
