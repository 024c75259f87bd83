"""VirtualDriver: the central scheduler under a virtual clock. Event after event, in one thread; same seed, same run.

It makes the calls that `nanopd.router.server.Server` makes from its threads, and carries out what the state machine
answers with stand-ins that only know how long things take. Scheduler, block managers, policies and central scheduler
are the server's own classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from nanopd.costmodel.checks import check_number, shown
from nanopd.engine.engine import StepRecord
from nanopd.engine.jobs import OutputCallback
from nanopd.engine.prompts import Prompt, check_params, check_seconds, encode_prompt
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import ConfigError, EngineClosedError, SimulationError, TransferError, WorkerFailedError
from nanopd.router.central import CentralConfig, CentralScheduler, Event, Predictor, WorkerStep
from nanopd.router.decision import Policy
from nanopd.router.server import OnStep, make_sequences
from nanopd.sim.events import Action, EventQueue
from nanopd.sim.link import SimulatedLink
from nanopd.sim.steps import FlyingStep, Neighbours
from nanopd.workers.worker import Worker


class VirtualDriver:
    """Serves requests in virtual time. `at` enters what the outside world does, `run` lets it happen.

    Args:
        workers: with a `SimulatedRunner` each, see `nanopd.sim.cluster`.
        links: by (prefill worker, decode worker) names.
        cards: names of workers that share a card, and slow each other down.
        policy, config, predictor, kv_bytes_per_token, link_gb_s, on_step, observe: as for ``Server``.
        host_s: seconds that the host takes to plan and launch a step, before the card has it.
        audit: called after each event, with this driver; see `nanopd.sim.checks`.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        policy: Policy,
        *,
        links: Mapping[tuple[str, str], SimulatedLink] | None = None,
        cards: Iterable[Collection[str]] = (),
        config: CentralConfig | None = None,
        predictor: Predictor | None = None,
        kv_bytes_per_token: int = 0,
        link_gb_s: float | None = None,
        on_step: OnStep | None = None,
        observe: Callable[[Event], None] | None = None,
        host_s: float = 0.0,
        audit: Callable[[VirtualDriver], None] | None = None,
    ) -> None:
        self.links = dict(links or {})
        self.central = CentralScheduler(
            workers,
            policy,
            config=config,
            links=list(self.links),
            predictor=predictor,
            kv_bytes_per_token=kv_bytes_per_token,
            link_gb_s=link_gb_s,
            observe=observe,
        )
        self.now = 0.0  # seconds
        self.num_events = self.num_steps = 0
        self.busy_s = dict.fromkeys(self.central.workers, 0.0)  # time in steps, by worker
        self.request_s = 0.0  # sum of the unfinished sequences over time: the L of Little's law, times the time
        self._events = EventQueue()
        self._on_step, self._audit, self._host_s = on_step, audit, host_s
        self._awake = set(self.central.workers)
        self._flying: dict[str, FlyingStep] = {}  # by worker
        self._neighbours = Neighbours(cards)
        self._transfers: dict[int, list[Any] | None] = {}  # their ends; None: not known (yet)
        self._settling = self._closed = False

    def clock(self) -> float:
        """Virtual time in seconds."""
        return self.now

    # --- requests, as with the server -------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt | bytes,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        stream: bool = False,
        on_output: OutputCallback | None = None,
    ) -> str:
        """Accept a prompt now. ``bytes`` are token ids below 256: they need no check, and take little memory.

        Raises an InvalidRequestError, or EngineClosedError; then nothing was accepted.
        """
        params = SamplingParams() if params is None else params
        check_params(params)
        if self._closed:
            raise EngineClosedError("the driver was closed")
        token_ids = list(prompt) if isinstance(prompt, bytes) else encode_prompt(prompt, None, None)[0]
        name = self.central.new_id() if request_id is None else request_id
        arrival = self.now if arrival_time is None else check_seconds("arrival_time", arrival_time)
        sequences = make_sequences(name, token_ids, params, arrival, ())
        self.central.submit(sequences, self.now, stream=stream, on_output=on_output or _ignore)
        self._settle()
        return name

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is. Raises UnknownRequestError."""
        self.central.abort(request_id, self.now)
        self._settle()

    def fail_worker(self, name: str, error: BaseException | None = None) -> None:
        """The worker dies now, in the middle of its step if it has one. Raises ConfigError if there is none."""
        if name not in self.central.workers:
            raise ConfigError(f"no worker {name!r}; there are {', '.join(self.central.workers)}")
        worker = self.central.workers[name]
        step = self._flying.pop(name, None)
        error = error or WorkerFailedError(f"{name} died at {self.now:g} s")
        self.central.worker_failed(worker, error, self.now)
        if step is not None:
            self._events.call_off(step.end)
            self._lose(handoff.transfer_id for handoff in step.step.handoffs)
        self._settle()

    # --- time ------------------------------------------------------------------------------------------------

    def at(self, time: float, action: Action) -> list[Any]:
        """Let ``action`` happen at ``time``; a time that is over means now. Returns a handle for `call_off`.

        Raises ConfigError for what is no time: an event at NaN would put the others out of order.
        """
        if not isinstance(time, int | float) or not time >= -math.inf:
            raise ConfigError(f"an event needs a time in seconds, got {shown(time)}")
        return self._events.enter(max(time, self.now), action)

    def call_off(self, handle: list[Any]) -> None:
        """What was entered with `at` does not happen; if it has, nothing changes."""
        self._events.call_off(handle)

    def advance(self) -> bool:
        """Let the next thing happen. False: nothing will, unless somebody comes."""
        due = self._next_time()
        if due is None:
            return False
        self._to(due)
        if self._events.next_time == due:
            self._events.take()[1]()
        else:
            self.central.tick(self.now)
        self.num_events += 1
        self._settle()
        if self._audit is not None:
            self._audit(self)
        return True

    def _next_time(self) -> float | None:
        event, lease = self._events.next_time, self.central.next_deadline
        if event is None or lease is None:
            return lease if event is None else event
        return min(event, lease)

    def _to(self, time: float) -> None:
        time = max(time, self.now)
        self.request_s += self.central.num_unfinished * (time - self.now)
        self.now = time

    def run(self, until: float | None = None) -> None:
        """Let everything happen that is due up to ``until``, which is the time then; None: until nothing is left."""
        if until is not None:
            check_number("until", until, least=-math.inf, unit="seconds")
        while (due := self._next_time()) is not None and (until is None or due <= until):
            self.advance()
        if until is not None:
            self._to(until)

    def drain(self) -> None:
        """Run until no request is unfinished and no step or transfer is under way; later events stay.

        Raises SimulationError if requests are left and nothing happens any more.
        """
        while self.central.num_unfinished or self._flying or self._transfers:
            self.check_alive()
            self.advance()

    def check_alive(self) -> None:
        """Raise SimulationError if requests are unfinished and no step or transfer is under way: nobody serves them."""
        if self.central.num_unfinished and not self._flying and not self._transfers:
            left = list(self.central.desk.jobs)
            raise SimulationError(
                f"the simulation stands still at {self.now:g} s with {len(left)} unfinished requests: {left[:5]}"
            )

    def close(self) -> None:
        """Abort what is left. Twice does no harm."""
        self._closed = True
        self._events, self._flying, self._transfers = EventQueue(), {}, {}
        self.central.close(self.now)
        self.central.desk.run_callbacks()

    def __enter__(self) -> VirtualDriver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- what the state machine wants -------------------------------------------------------------------------

    def _settle(self) -> None:
        """Carry out all that can be done at this moment. A callback may add requests, which is why it is a loop."""
        if self._settling:
            return
        self._settling = True
        try:
            desk = self.central.desk
            self._start_steps()
            while desk.has_callbacks:
                desk.run_callbacks()
                self._start_steps()
        finally:
            self._settling = False
        for name in self._neighbours.changed(self._flying):
            flying = self._flying[name]
            self._events.call_off(flying.end)
            flying.change_pace(self.now)
            self._expect_end(name, flying)

    def _start_steps(self) -> None:
        """Let every idle worker that was woken look for work, in the order of the workers."""
        central = self.central
        while True:
            self._lose(central.take_cancelled())
            self._awake |= central.take_awake()
            awake, self._awake = self._awake, set()
            if not awake:
                return
            for name, worker in central.workers.items():
                if name in awake and name not in self._flying:
                    self._begin(worker)
                    self._awake |= central.take_awake() - {name}

    def _begin(self, worker: Worker) -> None:
        step = self.central.begin_step(worker, self.now)
        if step is None:
            return
        for handoff in step.handoffs:
            self._transfers[handoff.transfer_id] = None
        alone_s, beside_s = worker.runner.seconds(step.plan)
        flying = self._flying[worker.name] = FlyingStep(step, alone_s, beside_s, self._host_s)
        if not flying.launched:
            self._events.enter(flying.since, partial(self._launch, flying))
        self._expect_end(worker.name, flying)

    def _launch(self, flying: FlyingStep) -> None:
        """Its neighbours feel it from now on; `_settle` sees to that."""
        flying.launched = True

    def _expect_end(self, name: str, flying: FlyingStep) -> None:
        flying.end = self._events.enter(flying.due, partial(self._end, name))

    def _end(self, name: str) -> None:
        step = self._flying.pop(name).step
        worker = step.worker
        self.num_steps += 1
        self.busy_s[name] += self.now - step.start
        try:
            tokens = worker.runner.execute(step.plan)
        except Exception as error:
            self.central.fail_step(step, error, self.now)
            self._lose(handoff.transfer_id for handoff in step.handoffs)
        else:
            self._stream(step)
            self.central.finish_step(step, tokens, self.now)
        self._send_due()
        if self._on_step is not None:
            queues = worker.scheduler
            lengths = (len(queues.waiting), len(queues.prefilling), len(queues.running))
            self._on_step(name, StepRecord(step.start, self.now, step.plan, *lengths))

    def _stream(self, step: WorkerStep) -> None:
        """Book the arrivals of what left while the step ran."""
        wanted = [handoff for handoff in step.handoffs if handoff.transfer_id in self._transfers]
        for pair in dict.fromkeys((handoff.source, handoff.destination) for handoff in wanted):
            together = [handoff for handoff in wanted if (handoff.source, handoff.destination) == pair]
            arrivals = self.links[pair].stream(together, step.start, self.now)
            for handoff, time in zip(together, arrivals, strict=True):
                self._expect(handoff.transfer_id, time)

    def _send_due(self) -> None:
        for handoff in self.central.take_handoffs():
            self._expect(handoff.transfer_id, self.links[handoff.source, handoff.destination].send(handoff, self.now))

    def _expect(self, transfer_id: int, time: float | None) -> None:
        """The transfer ends at ``time``; None: never, so that its lease must run out."""
        arrival = None if time is None else self._events.enter(time, partial(self._arrived, transfer_id))
        self._transfers[transfer_id] = arrival

    def _arrived(self, transfer_id: int) -> None:
        del self._transfers[transfer_id]
        self.central.transfer_done(transfer_id, self.now)

    def _lose(self, transfer_ids: Iterable[int]) -> None:
        """These transfers end without their data, now."""
        for transfer_id in transfer_ids:
            if transfer_id in self._transfers:
                end = self._transfers.pop(transfer_id)
                if end is not None:
                    self._events.call_off(end)
                error = TransferError(f"transfer {transfer_id} was cancelled")
                self.central.transfer_failed(transfer_id, error, self.now)


def _ignore(output: object) -> None:
    """For callers who only want to see what happens."""
