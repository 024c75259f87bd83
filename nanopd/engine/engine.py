"""Engine: the loop around scheduler and runner. It knows no tensor and no device; runner and clock are arguments."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from nanopd.engine.desk import OutputDesk
from nanopd.engine.detokenizer import Tokenizer
from nanopd.engine.generate import OutputStream, generate_all
from nanopd.engine.interrupts import InterruptGuard
from nanopd.engine.jobs import Job, OutputCallback
from nanopd.engine.outputs import RequestOutput
from nanopd.engine.plan import StepPlan
from nanopd.engine.prompts import Prompt, check_params, check_seconds, encode_prompt, prompt_list
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineClosedError,
    InvalidRequestError,
    StepFailedError,
    UnknownRequestError,
)


class Runner(Protocol):
    """The mechanism below: carries out a plan and samples."""

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """Run ``plan.copies``, compute ``plan.chunks``; one token for each of each chunk's samplers, in order."""
        ...


@dataclass(frozen=True)
class StepRecord:
    """One step, for timelines and statistics. Times in seconds of the engine's clock."""

    start: float
    end: float
    plan: StepPlan
    num_waiting: int  # after the step
    num_prefilling: int
    num_running: int


class Engine:
    """Accepts requests, runs steps, hands out outputs.

    Threads: ``add_request`` and ``abort`` may be called from any thread at any time, also while a step runs, and never
    wait for the device. Steps are taken one at a time; whoever calls ``step``, ``stream`` or ``generate`` takes them,
    and every output finds the caller it belongs to. Callbacks run in the thread that took the step.

    A driver with a clock of its own calls ``begin_step``, decides when the step ends and what it sampled, and calls
    ``finish_step``, ``fail_step`` or ``cancel_step``; then ``poll`` for the outputs. ``step`` is that with a runner.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        vocab_size: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        seed: int | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """``vocab_size``: prompts with other token ids are refused. ``eos_token_ids``: default, the tokenizer's.
        ``seed``: makes the seeds reproducible that requests without one get. ``on_step``: called after each step.

        Raises ConfigError if clock or on_step is no function, or the seed no int.
        """
        if not callable(clock) or not (on_step is None or callable(on_step)):
            raise ConfigError(f"clock and on_step must be functions, got {clock!r} and {on_step!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"seed must be an int or None, got {seed!r}")
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.clock = clock
        self.vocab_size = vocab_size
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        self.eos_token_ids = frozenset(eos_token_ids)
        self.on_step = on_step
        self.num_steps = 0
        self.num_generated_tokens = 0
        self._random = random.Random(seed)
        self._desk = OutputDesk()
        self._abandoned: deque[str] = deque()  # to be aborted by whoever takes the lock next
        self._num_ids = 0
        self._step_start = 0.0
        self._closed = False
        self.interrupt_guard = InterruptGuard()
        self._lock = threading.RLock()  # guards all state; never held while the runner executes
        self._step_lock = threading.RLock()  # one step at a time; taken before the other

    # --- requests --------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        stream: bool = False,
        on_output: OutputCallback | None = None,
    ) -> str:
        """Queue a prompt (text, or token ids) and return its id; one is made up if none is given.

        ``arrival_time``: when the client wanted to send it, by the engine's clock; default now. ``stream``: an output
        after each of its steps instead of one at the end. ``on_output`` gets the outputs; else ``step`` returns them.

        Raises an InvalidRequestError (empty or too long prompt, bad token id, id in use) or EngineClosedError; then
        nothing was queued.
        """
        token_ids, text = encode_prompt(prompt, self.tokenizer, self.vocab_size)
        with self._bookkeeping():
            request = self._make_request(
                token_ids, SamplingParams() if params is None else params, request_id, arrival_time
            )
            self._queue(request, text, stream, on_output)
        self._desk.run_callbacks()
        return request.request_id

    def add_requests(
        self,
        tokenized: Sequence[tuple[list[int], str | None]],
        params: Sequence[SamplingParams],
        on_output: OutputCallback,
    ) -> list[str]:
        """Queue prompts from ``encode_prompt``, all of them or, if one is invalid, none. Returns their ids.

        Raises as ``add_request``.
        """
        with self._bookkeeping():
            self._check_open()
            requests = [self._make_request(ids, p, None, None) for (ids, _), p in zip(tokenized, params, strict=True)]
            for request, (_, text) in zip(requests, tokenized, strict=True):
                self._queue(request, text, False, on_output)
        self._desk.run_callbacks()
        return [request.request_id for request in requests]

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; what it has so far comes as its last output, reason ``aborted``.

        Raises UnknownRequestError if no request of this id is unfinished, or EngineClosedError.
        """
        with self._bookkeeping():
            self._check_open()
            if request_id not in self._desk.jobs:
                raise UnknownRequestError(f"no request {request_id!r} is in flight")
            self._desk.close(self.scheduler.abort(request_id, self.clock()))
        self._desk.run_callbacks()

    def abandon(self, request_id: str) -> None:
        """``abort`` for the garbage collector: never raises, and changes nothing in the middle of a change.

        A collection may start at any line of this thread, also one that holds the lock; the request then ends with
        the next step instead.
        """
        self._abandoned.append(request_id)
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            with suppress(UnknownRequestError, EngineClosedError, IndexError):
                self.abort(self._abandoned.popleft())

    @property
    def has_unfinished(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._desk.jobs)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._desk.jobs

    def close(self) -> None:
        """Abort everything, wait for the step that runs, free all blocks. Calls after this raise EngineClosedError."""
        with self._bookkeeping():
            self._closed = True
            for request_id in list(self._desk.jobs):
                self._desk.close(self.scheduler.abort(request_id, self.clock()))
        self._desk.run_callbacks()
        with self._step_lock, self._lock:
            if self.scheduler.in_flight is not None:  # begun by a driver that will not come back
                self.scheduler.cancel(self.scheduler.in_flight, self.clock())

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- steps -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Take one step, if there is anything to do, and return the outputs that are due.

        Due are the final outputs of requests that finished, and with ``stream`` a snapshot of those that got a token;
        not those of requests with an ``on_output`` of their own. A step that raises ends its requests as ``failed``,
        with a StepFailedError in ``error``; all others go on.
        """
        self.advance()
        return self.poll()

    def poll(self) -> list[RequestOutput]:
        """Outputs that are due, without taking a step."""
        with self._lock:
            return self._desk.poll()

    def advance(self) -> bool:
        """``step``, but leave the outputs to ``poll``. Returns whether there was anything to compute."""
        guard = self.interrupt_guard
        with self._step_lock, guard:
            try:
                with guard.uninterrupted():
                    plan = self.begin_step()
                if plan is None:
                    return False
                tokens = self._execute(plan)
                with guard.uninterrupted():
                    if isinstance(tokens, Exception):
                        self.fail_step(plan, tokens)
                    else:
                        self.finish_step(plan, tokens)
                return True
            except BaseException:  # an interrupt, mostly; an Exception of the runner does not get here
                # Whatever is in flight now is this step, as no driver steps while we do.
                with guard.uninterrupted():
                    if self.scheduler.in_flight is not None:
                        self.cancel_step(self.scheduler.in_flight)
                raise

    def _execute(self, plan: StepPlan) -> list[list[int]] | Exception:
        try:
            return self.runner.execute(plan)
        except Exception as error:
            return error

    def begin_step(self) -> StepPlan | None:
        """Schedule a step, or None if no request can go on now. Raises EngineClosedError."""
        self._abort_abandoned()
        with self._lock:
            self._check_open()
            self._step_start = self.clock()
            plan = self.scheduler.schedule(self._step_start)
        return plan if plan.chunks else None

    def finish_step(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> None:
        """Book the tokens of the step begun last, as ``Runner.execute`` returns them, and make outputs of them."""
        with self._lock:
            self._check_in_flight(plan)
            now = self.clock()
            try:
                finished = self.scheduler.update(plan, tokens, now)
            except StepFailedError as error:  # the runner broke its contract; nothing has changed yet
                self._fail(plan, error)
            else:
                self.num_generated_tokens += sum(map(len, tokens))
                progressed, ended = self._desk.look_at(r for chunk in plan.chunks for r in chunk.samplers)
                for request, reason in ended:
                    self.scheduler.finish(request, reason, now, self._desk.jobs[request.parent_id].error)
                self._desk.close([*finished, *(request for request, _ in ended)])
                self._desk.show_progress(progressed)
                self._end_step(plan, now)
        self._desk.run_callbacks()

    def fail_step(self, plan: StepPlan, error: BaseException) -> None:
        """The step begun last raised ``error``: its requests end as ``failed``."""
        with self._lock:
            self._check_in_flight(plan)
            self._fail(plan, error)
        self._desk.run_callbacks()

    def cancel_step(self, plan: StepPlan) -> None:
        """The step begun last was interrupted: its requests are queued again and recompute."""
        with self._lock:
            self._check_in_flight(plan)
            now = self.clock()
            self.scheduler.cancel(plan, now)
            self._end_step(plan, now)

    # --- whole requests --------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> OutputStream:
        """Queue a prompt now, and iterate over its outputs: a longer one after each of its steps.

        Taking an item takes steps, for other requests too. Raises as ``add_request``, and while iterating
        StepFailedError if a step with this request failed. Leaving the loop early aborts the request (``close``).
        """
        return OutputStream(self, prompt, params, request_id)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run all prompts to their end and return their outputs in the prompts' order, behind a progress bar.

        One prompt, or a list of them; one ``SamplingParams`` for all, or one for each. If any prompt is invalid it
        raises before any is queued. A failed step raises StepFailedError, an interrupt KeyboardInterrupt; both abort
        the prompts that are left. To keep the others' results, use ``add_request`` and ``step``.
        """
        return generate_all(self, prompt_list(prompts), sampling_params, use_tqdm)

    # --- inside ----------------------------------------------------------------------------------------------

    @contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """The lock, and no interrupt before the end."""
        with self.interrupt_guard, self.interrupt_guard.uninterrupted(), self._lock:
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed")

    def _check_in_flight(self, plan: StepPlan) -> None:
        """A closed engine has given its step up; otherwise the scheduler says what is wrong."""
        if self.scheduler.in_flight is not plan:
            self._check_open()

    def _fail(self, plan: StepPlan, error: BaseException) -> None:
        failure = StepFailedError(f"a step of {len(plan.chunks)} requests raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        now = self.clock()
        self._desk.close(self.scheduler.fail(plan, failure, now))
        self._end_step(plan, now)

    def _make_request(
        self, token_ids: list[int], params: SamplingParams, request_id: str | None, arrival_time: float | None
    ) -> Request:
        """A valid request, not queued yet."""
        self._check_open()
        check_params(params)
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id must be a str, got {request_id!r} ({type(request_id).__name__})")
        arrival_time = self.clock() if arrival_time is None else check_seconds("arrival_time", arrival_time)
        if params.seed is None:
            # Drawn once and kept, so that a request computed again after a preemption gets the same tokens.
            params = replace(params, seed=self._random.getrandbits(63))
        while True:
            name = request_id
            if name is None:
                name, self._num_ids = str(self._num_ids), self._num_ids + 1
            request = Request(name, token_ids, params, arrival_time=arrival_time, eos_token_ids=self.eos_token_ids)
            try:
                self.scheduler.validate(request)
                return request
            except DuplicateRequestError:
                if request_id is not None:
                    raise  # else: a user chose the name that we made up, or that of one of its samples

    def _queue(self, request: Request, prompt: str | None, stream: bool, on_output: OutputCallback | None) -> None:
        sequences = self.scheduler.add(request, self.clock())
        job = Job(prompt, sequences, self.tokenizer, stream=stream, on_output=on_output)
        self._desk.open(job)
        self._desk.close([sequence for sequence in sequences if sequence.is_finished])  # max_tokens 0

    def _end_step(self, plan: StepPlan, now: float) -> None:
        self.num_steps += 1
        if self.on_step is not None:
            queues = self.scheduler
            lengths = (len(queues.waiting), len(queues.prefilling), len(queues.running))
            self.on_step(StepRecord(self._step_start, now, plan, *lengths))
