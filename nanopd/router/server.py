"""Server: the central scheduler under the wall clock. A thread per worker, one per link, one for outputs.

One lock guards the state machine. It is held for bookkeeping only, never while a device or a link works, so no step of
one worker waits for a step of another. Outputs are handed out by a thread of their own: a client that is slow to take
them delays no step.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from nanopd.engine.detokenizer import Tokenizer
from nanopd.engine.engine import StepRecord
from nanopd.engine.interrupts import InterruptGuard
from nanopd.engine.jobs import OutputCallback
from nanopd.engine.outputs import RequestOutput
from nanopd.engine.prompts import Prompt, check_params, check_seconds, encode_prompt
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import (
    ConfigError,
    EngineClosedError,
    IllegalTransitionError,
    InvalidRequestError,
    UnknownRequestError,
    WorkerFailedError,
)
from nanopd.router.callbacks import complain, harmless
from nanopd.router.central import CentralConfig, CentralScheduler, Event, Predictor, WorkerStep
from nanopd.router.clients import ServerStream, generate_all
from nanopd.router.decision import Policy
from nanopd.transfer.handoff import Handoff
from nanopd.transfer.queued import failure
from nanopd.workers.worker import Worker

if TYPE_CHECKING:
    from nanopd.workers.cluster import Cluster

OnStep = Callable[[str, StepRecord], None]  # worker's name, step


class Transfer(Protocol):
    """What the server needs of a transfer; see ``nanopd.transfer.link``."""

    def send_layer(self, layer: int) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def cancel(self) -> None: ...


class Link(Protocol):
    """What the server needs of a link; see ``nanopd.transfer.link``."""

    def open(self, handoff: Handoff) -> Any: ...
    def send(self, handoff: Handoff) -> Any: ...
    def close(self) -> None: ...


class Server:
    """Serves requests on a set of workers. All methods may be called from any thread; those that wait (``close``,
    ``drain``, ``generate``, reading a stream) from any but the server's own, in which callbacks run; and none of
    them by ``observe``, which is called in the middle of a change.

    Args:
        workers: see ``nanopd.workers.Cluster``, which builds them.
        links: by (prefill worker, decode worker) names.
        policy: where requests go.
        config: limits of the central scheduler.
        tokenizer, vocab_size, eos_token_ids, seed, clock: as for ``Engine``.
        kv_bytes_per_token, link_gb_s: for policies that weigh a transfer.
        on_step: called with each worker's steps, in that worker's thread.
        observe: called with each decision (an ``Event``), under the lock.
        poll_s: how long a link's thread waits at a time before it looks for leases that ran out.

    What ``on_step``, ``observe`` or an output callback raises becomes a warning. Raises ConfigError: as
    ``CentralScheduler``, an option that makes no sense, a link that another server has closed, a worker of one
    that is still open.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        policy: Policy,
        *,
        links: Mapping[tuple[str, str], Link] | None = None,
        config: CentralConfig | None = None,
        predictor: Predictor | None = None,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        kv_bytes_per_token: int = 0,
        link_gb_s: float | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_step: OnStep | None = None,
        observe: Callable[[Event], None] | None = None,
        poll_s: float = 0.05,
    ) -> None:
        links = dict(links or {})
        _check_options({"clock": clock, "on_step": on_step, "observe": observe}, seed, poll_s)
        self.central = CentralScheduler(
            workers,
            policy,
            config=config,
            links=list(links),
            predictor=predictor,
            tokenizer=tokenizer,
            kv_bytes_per_token=kv_bytes_per_token,
            link_gb_s=link_gb_s,
            observe=None if observe is None else self._watched(harmless("observe", observe)),
        )
        _refuse_closed(links, self.central.workers)
        self.clock = clock
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        self.eos_token_ids = frozenset(eos_token_ids)
        self._links = links
        self._on_step = None if on_step is None else harmless("on_step", on_step)
        self._poll_s = poll_s
        self._random = random.Random(seed)
        self._closing = False  # no new requests
        self._stopping = False  # threads end
        self._links_closed = False
        self._closed = False  # and the workers are free for another server
        self._observer: int | None = None  # the thread that calls ``observe``, in the middle of a change
        self._abandoned: deque[str] = deque()  # to be aborted by whoever works next
        self.interrupt_guard = InterruptGuard()
        self._lock = threading.RLock()
        self._work = {worker.name: threading.Condition(self._lock) for worker in workers}
        self._outputs = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)  # nothing is unfinished
        self._on_links: dict[tuple[str, str], SimpleQueue[tuple[int, Transfer] | None]] = {
            pair: SimpleQueue() for pair in links
        }
        self._transfers: dict[int, Transfer] = {}
        self._workers = [self._thread(f"worker {w.name}", self._run_worker, w) for w in workers]
        self._pumps = [self._thread(f"link {a} to {b}", self._run_link, (a, b)) for a, b in links]
        self._speaker = self._thread("outputs", self._run_outputs)
        _take(workers)
        for thread in (*self._workers, *self._pumps, self._speaker):
            thread.start()

    @classmethod
    def of(cls, cluster: Cluster, policy: Policy, **options: Any) -> Server:
        """A server on a cluster, to be closed before it; ``options`` as for the constructor."""
        if cluster.closed:
            raise ConfigError("the cluster was closed: its workers have no model any more")
        return cls(
            cluster.workers,
            policy,
            **{
                "links": cluster.links,
                "tokenizer": cluster.tokenizer,
                "vocab_size": cluster.config.vocab_size,
                "eos_token_ids": cluster.config.eos_token_ids,
                "kv_bytes_per_token": cluster.workers[0].fingerprint.bytes_per_token,
                "link_gb_s": _slowest_gb_s(cluster.links.values()),
                **options,
            },
        )

    # --- requests --------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        stream: bool = False,
        on_output: OutputCallback,
    ) -> str:
        """Accept a prompt (text or token ids) and return its id. ``on_output`` gets its outputs in order.

        Raises an InvalidRequestError (see ``Engine.add_request``; also OverloadedError, NoWorkerError) or
        EngineClosedError; then nothing was accepted.
        """
        params = SamplingParams() if params is None else params
        check_params(params)
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id must be a str, got {request_id!r} ({type(request_id).__name__})")
        if not callable(on_output):
            raise InvalidRequestError(f"on_output must be a function, got {on_output!r:.80}")
        if arrival_time is not None:
            arrival_time = check_seconds("arrival_time", arrival_time)
        token_ids, text = encode_prompt(prompt, self.tokenizer, self.vocab_size)
        with self._bookkeeping():
            if self._closing:
                raise EngineClosedError("the server was closed")
            name = self.central.new_id() if request_id is None else request_id
            if params.seed is None:  # drawn once and kept, so that computing it anew gives the same tokens
                params = replace(params, seed=self._random.getrandbits(63))
            now = self.clock()
            arrival = now if arrival_time is None else arrival_time
            sequences = make_sequences(name, token_ids, params, arrival, self.eos_token_ids)
            self.central.submit(sequences, now, prompt=text, stream=stream, on_output=on_output)
            self._after_change()
        return name

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; its last output says so. Raises UnknownRequestError."""
        with self._bookkeeping():
            self.central.abort(request_id, self.clock())
            self._after_change()

    def abandon(self, request_id: str) -> None:
        """``abort`` for the garbage collector, which may run in any thread at any line, the lock held or not: takes
        no lock. The request ends before the next step, or when a link is looked after."""
        self._abandoned.append(request_id)

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            with suppress(UnknownRequestError):  # it has finished
                self.central.abort(self._abandoned.popleft(), self.clock())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run all prompts to their end, behind a progress bar. Raises what a request failed with; aborts the others."""
        return generate_all(self, prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> ServerStream:
        """The outputs of one request, growing. Queued at the call; leaving the loop early aborts it."""
        return ServerStream(self, prompt, params)

    @contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """The lock, and no interrupt before the end. Raises IllegalTransitionError in ``observe``."""
        self._refuse_observer()
        with self.interrupt_guard, self.interrupt_guard.uninterrupted(), self._lock:
            yield

    def _refuse_observer(self) -> None:
        """This thread holds the lock already, and what it is in the middle of must come to its end."""
        if self._observer == threading.get_ident():
            raise IllegalTransitionError("observe is called in the middle of a change: use a thread of your own")

    def _watched(self, observe: Callable[[Event], None]) -> Callable[[Event], None]:
        def call(event: Event) -> None:
            self._observer = threading.get_ident()
            try:
                observe(event)
            finally:
                self._observer = None

        return call

    def refuse_own_thread(self, what: str) -> None:
        """Raise IllegalTransitionError in a thread of this server, or in ``observe``: it would wait for itself."""
        self._refuse_observer()
        if threading.current_thread() in (*self._workers, *self._pumps, self._speaker):
            raise IllegalTransitionError(f"{what} in a callback waits for itself: use a thread of your own")

    # --- the end ---------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is unfinished. Returns whether that came to pass within ``timeout`` seconds."""
        self.refuse_own_thread("drain")
        with self._lock:
            return self._idle.wait_for(lambda: self.central.num_unfinished == 0, timeout)

    def close(self) -> None:
        """Abort what is left, stop all threads, close the links. Twice does no harm. See `drain`.

        Raises the first error of a link that could not be closed (LinkStalledError), when all else is.
        """
        self.refuse_own_thread("close")
        with self._bookkeeping():
            self._closing = True
            for request_id in list(self.central.desk.jobs):
                self.central.abort(request_id, self.clock())
            self._stopping = True
            self._after_change()
            for condition in self._work.values():
                condition.notify_all()
        for thread in self._workers:
            thread.join()
        problem = self._close_links()
        with self._lock:
            if not self._closed:  # or the workers may be another server's by now
                self._closed = True
                self.central.close(self.clock())
                for worker in self.central.workers.values():
                    worker.taken.release()
            self._outputs.notify_all()
        self._speaker.join()
        if problem is not None:
            raise problem

    def _close_links(self) -> Exception | None:
        """End what is on them, and their threads. Returns the first error."""
        with self._lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.cancel()  # or a slow link would have to finish it
        problem: Exception | None = None
        for pair, link in self._links.items():
            try:
                link.close()
            except Exception as error:
                problem = problem or error
            self._on_links[pair].put(None)
        self._links_closed = True  # what has not ended by now never will
        for thread in self._pumps:
            thread.join()
        self._links = {}  # they hold the pools
        return problem

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- threads ---------------------------------------------------------------------------------------------

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
        return threading.Thread(target=target, args=args, name=f"nanopd {name}", daemon=True)

    def _run_worker(self, worker: Worker) -> None:
        try:
            with worker.enter():
                while (step := self._next_step(worker)) is not None:
                    self._carry_out(step)
        except BaseException as error:  # of `enter`, or of our own bookkeeping: this thread cannot go on
            failed = WorkerFailedError(f"worker {worker.name} cannot go on: {type(error).__name__}: {error}")
            failed.__cause__ = error
            with self._lock:
                self.central.worker_failed(worker, failed, self.clock())
                self._after_change()
            if not isinstance(error, Exception):
                raise

    def _next_step(self, worker: Worker) -> WorkerStep | None:
        """Wait for work. None: stop."""
        with self._lock:
            while not self._stopping and worker.alive:
                self._abort_abandoned()
                step = self.central.begin_step(worker, self.clock())
                self._after_change(but=worker.name)
                if step is not None:
                    return step
                self._work[worker.name].wait()
        return None

    def _carry_out(self, step: WorkerStep) -> None:
        transfers: list[Transfer] = []
        error: BaseException | None = None
        tokens: list[list[int]] = []
        runner = step.worker.runner
        try:
            if step.handoffs:
                transfers = self._open(step.handoffs)
                tokens = runner.launch(step.plan, lambda layer: _send_layer(transfers, layer)).wait()
            else:
                tokens = runner.execute(step.plan)
        except Exception as raised:
            error = raised
            for transfer in transfers:
                transfer.cancel()
        with self._lock:
            now = self.clock()
            if error is None:
                self.central.finish_step(step, tokens, now)
            else:
                self.central.fail_step(step, error, now)
            due = self.central.take_handoffs()
            self._after_change(but=step.worker.name)
        for handoff in due:
            self._send(handoff)
        if self._on_step is not None:
            queues = step.worker.scheduler
            lengths = (len(queues.waiting), len(queues.prefilling), len(queues.running))
            self._on_step(step.worker.name, StepRecord(step.start, now, step.plan, *lengths))

    def _open(self, handoffs: Sequence[Handoff]) -> list[Transfer]:
        """Transfers to stream layer by layer. One that cannot be opened has failed; the others go on."""
        transfers = []
        for handoff in handoffs:
            try:
                transfer = self._links[handoff.source, handoff.destination].open(handoff)
            except Exception as error:
                self._transfer_ended(handoff.transfer_id, failure(handoff, error))
            else:
                self._watch(handoff, transfer)
                transfers.append(transfer)
        return transfers

    def _send(self, handoff: Handoff) -> None:
        try:
            transfer = self._links[handoff.source, handoff.destination].send(handoff)
        except Exception as error:
            self._transfer_ended(handoff.transfer_id, failure(handoff, error))
        else:
            self._watch(handoff, transfer)

    def _watch(self, handoff: Handoff, transfer: Transfer) -> None:
        with self._lock:
            self._transfers[handoff.transfer_id] = transfer
        self._on_links[handoff.source, handoff.destination].put((handoff.transfer_id, transfer))

    def _run_link(self, pair: tuple[str, str]) -> None:
        """Wait for the link's transfers, in order, and book their ends."""
        while (item := self._on_links[pair].get()) is not None:
            transfer_id, transfer = item
            problem: BaseException | None = None
            try:
                while not transfer.wait(self._poll_s) and not self._links_closed:
                    self._tick()
            except Exception as error:
                problem = error
            self._transfer_ended(transfer_id, problem)

    def _tick(self) -> None:
        with self._lock:
            self._abort_abandoned()
            self.central.tick(self.clock())
            self._after_change()

    def _transfer_ended(self, transfer_id: int, error: BaseException | None) -> None:
        with self._lock:
            self._transfers.pop(transfer_id, None)
            if error is None:
                self.central.transfer_done(transfer_id, self.clock())
            else:
                self.central.transfer_failed(transfer_id, error, self.clock())
            self._after_change()

    def _after_change(self, but: str | None = None) -> None:
        """Wake whoever the change concerns. The lock is held. ``but``: the caller, who is awake."""
        for name in self.central.take_awake():
            if name != but:
                self._work[name].notify()
        for transfer_id in self.central.take_cancelled():
            if transfer_id in self._transfers:
                self._transfers[transfer_id].cancel()
        if self.central.desk.has_callbacks:
            self._outputs.notify()
        if self.central.num_unfinished == 0:
            self._idle.notify_all()

    def _run_outputs(self) -> None:
        desk = self.central.desk
        while True:
            with self._lock:
                while not desk.has_callbacks:
                    if self._stopping and not any(t.is_alive() for t in (*self._workers, *self._pumps)):
                        return
                    self._outputs.wait()
            try:
                desk.run_callbacks()
            except BaseException as error:  # the client's own; it must not take the others' outputs down
                complain("an output callback", error)


def make_sequences(
    request_id: str, token_ids: list[int], params: SamplingParams, arrival_time: float, eos_token_ids: Collection[int]
) -> list[Request]:
    """The n sequences of a user's request, independent of each other: they may run on different workers.

    ``request_id#i`` for n > 1: no sequence then bears the name of the whole.
    """
    one = replace(params, n=1) if params.n > 1 else params
    names = [f"{request_id}#{i}" for i in range(params.n)] if params.n > 1 else [request_id]
    return [
        Request(
            name,
            token_ids,
            one,
            sample_index=index,
            parent_id=request_id,
            arrival_time=arrival_time,
            eos_token_ids=eos_token_ids,
        )
        for index, name in enumerate(names)
    ]


def _send_layer(transfers: Sequence[Transfer], layer: int) -> None:
    for transfer in transfers:
        transfer.send_layer(layer)


def _slowest_gb_s(links: Collection[Link]) -> float | None:
    """Of the links whose bandwidth was measured; None where no link copies anything."""
    measured = [report.gb_s for link in links if (report := getattr(link, "report", None)) is not None and report.gb_s]
    return min(measured, default=None)


def _check_options(functions: Mapping[str, Any], seed: Any, poll_s: Any) -> None:
    """Raises ConfigError."""
    for name, function in functions.items():
        if not callable(function) and (function is not None or name == "clock"):
            raise ConfigError(f"{name} must be a function, got {function!r:.80}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"seed must be an int or None, got {seed!r}")
    if isinstance(poll_s, bool) or not isinstance(poll_s, (int, float)) or not 0 < poll_s < math.inf:
        raise ConfigError(f"poll_s must be a finite number of seconds > 0, got {poll_s!r}")


def _take(workers: Sequence[Worker]) -> None:
    """Raises ConfigError: two servers would plan steps of one scheduler, neither knowing of the other's."""
    free = [worker for worker in workers if worker.taken.acquire(blocking=False)]
    if len(free) < len(workers):
        for worker in free:
            worker.taken.release()
        names = ", ".join(worker.name for worker in workers if worker not in free)
        raise ConfigError(f"{names} of another server, which is still open: close it first")


def _refuse_closed(links: Mapping[tuple[str, str], Any], workers: Mapping[str, Worker]) -> None:
    """Raises ConfigError. Within a shared pool nothing needs the link, so several servers may follow each other."""
    for (source, destination), link in links.items():
        if getattr(link, "closed", False) and not workers[source].shares_pool_with(workers[destination]):
            raise ConfigError(f"the link from {source} to {destination} is closed: a server closes its links with it")
