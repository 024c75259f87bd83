"""Flights: the requests of one run, from send to last output. All threads of a run meet here, behind one lock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from nanopd.bench.records import Outcome, RequestRecord, dropped_record, finished_record
from nanopd.bench.target import Target
from nanopd.bench.workload import Arrival
from nanopd.engine.outputs import RequestOutput


@dataclass(slots=True)
class _Flight:
    arrival: Arrival
    lateness_s: float
    aborted_as: tuple[Outcome, str] | None = None
    token_times_s: list[float] = field(default_factory=list)  # if it streams


class Flights:
    """Every arrival ends in exactly one record: the first that is made counts, later news of it is ignored."""

    def __init__(self, target: Target, timeout_s: float | None = None, stream: bool = False) -> None:
        self._clock = target.clock
        self._timeout_s = timeout_s
        self._stream = stream
        self._up: dict[str, _Flight] = {}
        self._records: dict[int, RequestRecord] = {}
        self._num_dropped = 0
        self._changed = threading.Condition()

    @property
    def num_in_flight(self) -> int:
        return len(self._up)

    @property
    def num_landed(self) -> int:
        return len(self._records)

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    def names(self) -> list[str]:
        """Ids of the requests in flight."""
        with self._changed:
            return list(self._up)

    def wait_for_change(self, seconds: float) -> None:
        """Until a request lands, at most that long."""
        with self._changed:
            self._changed.wait(seconds)

    def take_off(self, arrival: Arrival, lateness_s: float) -> str:
        """``arrival`` is about to be sent; returns the id to send it under."""
        name = f"bench-{arrival.index}"
        with self._changed:
            self._up[name] = _Flight(arrival, lateness_s)
        return name

    def on_output(self, output: RequestOutput) -> None:
        """The target's news of a request, from whatever thread."""
        now = self._clock()
        with self._changed:
            flight = self._up.get(output.request_id)
            if flight is None:
                return
            if self._stream:
                new = len(output.outputs[0].token_ids) - len(flight.token_times_s)
                flight.token_times_s += [now] * new
            if output.finished:
                del self._up[output.request_id]
                self._land(
                    finished_record(
                        flight.arrival,
                        output,
                        lateness_s=flight.lateness_s,
                        timeout_s=self._timeout_s,
                        aborted_as=flight.aborted_as,
                        token_times_s=flight.token_times_s,
                    )
                )

    def mark(self, name: str, outcome: Outcome, reason: str) -> bool:
        """Note why the client is about to abort a request. False: it is not in flight any more, or marked already."""
        with self._changed:
            flight = self._up.get(name)
            if flight is None or flight.aborted_as is not None:
                return False
            flight.aborted_as = (outcome, reason)
            return True

    def drop(self, arrival: Arrival, outcome: Outcome, reason: str, lateness_s: float | None = None) -> None:
        """``arrival`` ends without an output."""
        with self._changed:
            self._up.pop(f"bench-{arrival.index}", None)
            self._land(dropped_record(arrival, outcome, reason, lateness_s))

    def give_up(self, arrival: Arrival, reason: str) -> None:
        """The run is over: what has not landed is unfinished, or what it was aborted as."""
        with self._changed:
            flight = self._up.pop(f"bench-{arrival.index}", None)
            if flight is None:
                self._land(dropped_record(arrival, Outcome.UNFINISHED, reason))
            else:
                outcome, reason = flight.aborted_as or (Outcome.UNFINISHED, "no last output came")
                tokens = len(flight.token_times_s)
                self._land(dropped_record(arrival, outcome, reason, flight.lateness_s, tokens))

    def close(self) -> list[RequestRecord]:
        """The records in order of arrival."""
        with self._changed:
            return [self._records[index] for index in sorted(self._records)]

    def _land(self, record: RequestRecord) -> None:
        if record.index not in self._records:
            self._records[record.index] = record
            self._num_dropped += record.outcome is not Outcome.COMPLETED
            self._changed.notify_all()
