"""Open-loop load in virtual time: the benchmark's arrivals, records and drops, without waiting for any of it."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from nanopd.bench.flights import Flights
from nanopd.bench.load import LoadOptions
from nanopd.bench.records import Outcome, RequestRecord
from nanopd.bench.workload import Arrival, Schedule
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import NanoPDError, UnknownRequestError
from nanopd.sim.driver import VirtualDriver


class Prompts:
    """Token ids of a schedule's prompts, as bytes: random below 256, equal wherever the schedule shares a prefix.

    Nothing in a simulation depends on a token but through the prefix caches, and those only ask which are equal. The
    schedule's own prompts would take fifty times as long to draw, and thirty times the memory.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._seed = f"{schedule.seed}/{schedule.salt}"
        self._blocks: dict[int, bytes] = {}  # shared ones that were drawn before

    def of(self, arrival: Arrival) -> bytes:
        shared = b"".join(self._block(block, arrival.prefix_block) for block in arrival.prefix)
        shared = shared[: arrival.prompt_tokens]
        own = random.Random(f"{self._seed}/request/{arrival.index}")
        return shared + own.randbytes(arrival.prompt_tokens - len(shared))

    def _block(self, block: int, size: int) -> bytes:
        if block not in self._blocks:
            self._blocks[block] = random.Random(f"{self._seed}/block/{block}").randbytes(size)
        return self._blocks[block]


def run_virtual(
    driver: VirtualDriver,
    schedule: Schedule,
    *,
    options: LoadOptions | None = None,
    use_tqdm: bool = False,
    label: str = "",
) -> list[RequestRecord]:
    """What ``nanopd.bench.run_load`` does, in virtual time: one record per arrival, in order.

    Requests are sent on the dot. At ``duration_s + drain_s`` after the start what is in flight is aborted, and counts
    as unfinished. Raises SimulationError if requests are in flight and nobody serves them.
    """
    client = _Client(driver, schedule, options or LoadOptions())
    with _progress(len(schedule), use_tqdm, label) as show, _rare_collections():
        while client.goes_on:
            driver.advance()
            show(client.flights)
    driver.check_alive()
    client.give_up()
    driver.drain()
    return client.flights.close()


class _Client:
    """Holds one event at a time in the driver's queue for the next arrival, and one for the next timeout."""

    def __init__(self, driver: VirtualDriver, schedule: Schedule, options: LoadOptions) -> None:
        self.driver, self.schedule, self.options = driver, schedule, options
        self.flights = Flights(driver, options.timeout_s, options.stream)
        self.start = driver.now
        self._prompts = Prompts(schedule)
        self._next = 0  # index of the next arrival
        self._deadlines: deque[tuple[float, str]] = deque()
        self._over = False
        self._events = {"end": driver.at(driver.now + schedule.duration_s + options.drain_s, self._stop)}
        self._expect_arrival()

    @property
    def goes_on(self) -> bool:
        return not self._over and self.flights.num_landed < len(self.schedule)

    def _stop(self) -> None:
        self._over = True

    def _expect_arrival(self) -> None:
        if self._next < len(self.schedule):
            time = self.start + self.schedule.arrivals[self._next].time_s
            self._events["arrival"] = self.driver.at(time, self._send)

    def _expect_timeout(self) -> None:
        if self._deadlines:
            self._events["timeout"] = self.driver.at(self._deadlines[0][0], self._time_out)

    def _send(self) -> None:
        arrival = self.schedule.arrivals[self._next]
        self._next += 1
        self._expect_arrival()
        due = self.start + arrival.time_s
        name = self.flights.take_off(arrival, 0.0)
        try:
            self.driver.add_request(
                self._prompts.of(arrival),
                SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True),
                request_id=name,
                arrival_time=due,
                stream=self.options.stream,
                on_output=self.flights.on_output,
            )
        except NanoPDError as error:
            self.flights.drop(arrival, Outcome.REFUSED, f"{type(error).__name__}: {error}", 0.0)
            return
        if self.options.timeout_s is not None:
            self._deadlines.append((due + self.options.timeout_s, name))
            if len(self._deadlines) == 1:
                self._expect_timeout()

    def _time_out(self) -> None:
        _, name = self._deadlines.popleft()
        if self.flights.mark(name, Outcome.TIMED_OUT, f"over {self.options.timeout_s:g} s"):
            self._abort(name)
        self._expect_timeout()

    def give_up(self) -> None:
        """End what is in flight, and leave no event behind."""
        for event in self._events.values():
            self.driver.call_off(event)
        for name in self.flights.names():
            if self.flights.mark(name, Outcome.UNFINISHED, "in flight at the end of the run"):
                self._abort(name)
        for arrival in self.schedule.arrivals[self._next :]:
            self.flights.drop(arrival, Outcome.UNFINISHED, "the run ended before it was sent")

    def _abort(self, name: str) -> None:
        with suppress(UnknownRequestError):  # it has just finished
            self.driver.abort(name)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Python looks for cycles after every 700 new objects; a simulation makes millions, and no cycle. Saves a sixth."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _progress(total: int, use_tqdm: bool, label: str) -> Iterator[Callable[[Flights], object]]:
    if not use_tqdm:
        yield lambda flights: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=label or "simulating", unit="req", mininterval=0.2) as bar:
        yield lambda flights: bar.update(flights.num_landed - bar.n)
