"""Load to measure workers with: decodes whose context hardly changes, prompts without end, and a thread per worker."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nanopd.engine.benchmark import prefilled_request
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import ConfigError, StepFailedError
from nanopd.workers.worker import Worker

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a worker that has ended."""

    end: float  # seconds
    num_decodes: int
    prefill_tokens: int
    fresh: bool  # the first after its decodes started over: the time before it is no gap between two tokens


def default_window(context: int) -> int:
    """Steps before decodes start over: their context then strays by a sixteenth at most."""
    return max(1, min(512, context // 8))


class Decodes:
    """A fixed batch of running requests whose context stays near ``context``.

    Each starts at ``context - window / 2`` tokens and, after ``window`` steps, all start over, so the mean context of
    a measurement is ``context``. Nobody computes the prompts: their KV is whatever the pool holds, and reading it
    takes the same time.
    """

    def __init__(self, worker: Worker, batch: int, context: int, window: int | None = None, seed: int = 0) -> None:
        self.worker = worker
        self.window = default_window(context) if window is None else window
        rng, start = random.Random(seed), max(1, context - self.window // 2)
        self._prompts = [[rng.randrange(1000)] * start for _ in range(batch)]
        self._params = SamplingParams(temperature=0.0, max_tokens=self.window + 2, ignore_eos=True)
        self._left = 0
        self._numbers = itertools.count()

    def refill(self) -> bool:
        """Start over if the window has ended. Returns whether it did."""
        self._left -= 1
        if self._left >= 0:
            return False
        scheduler, manager = self.worker.scheduler, self.worker.block_manager
        for request in list(scheduler.running):
            scheduler.abort(request.request_id)
        for prompt in self._prompts:
            request = prefilled_request(manager, f"decode{next(self._numbers)}", prompt, self._params)
            scheduler.attach(request)
        self._left = self.window - 1
        return True


class Prompts:
    """Prompts of ``num_tokens`` random tokens, always a few waiting. A request ends with its first token."""

    def __init__(self, worker: Worker, num_tokens: int, seed: int = 1, vocab_size: int = 1000) -> None:
        self.worker = worker
        rng = random.Random(seed)
        # Made beforehand: the thread that draws random numbers keeps others from running Python.
        self._prompts = [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(8)]
        self._params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._numbers = itertools.count()

    def refill(self) -> None:
        waiting = self.worker.scheduler.waiting
        while len(waiting) < 4:
            number = next(self._numbers)
            request = Request(f"prompt{number}", self._prompts[number % len(self._prompts)], self._params)
            self.worker.add(request, 0.0)


@dataclass
class Load:
    """A worker and what it computes. ``lock``: held while the books of its pool change, which others may share."""

    worker: Worker
    lock: threading.Lock
    decodes: Decodes | None = None
    prompts: Prompts | None = None
    clock: Clock = time.perf_counter
    steps: list[Step] = field(default_factory=list)

    def step(self) -> None:
        """As a driver takes one: plan, compute, book."""
        scheduler = self.worker.scheduler
        with self.lock:
            fresh = self.decodes is not None and self.decodes.refill()
            if self.prompts is not None:
                self.prompts.refill()
            plan = scheduler.schedule(self.clock())
        if not plan.chunks:
            raise StepFailedError(f"{self.worker.name} has nothing to compute: its pool is too small for this load")
        tokens = self.worker.runner.execute(plan)
        with self.lock:
            scheduler.update(plan, tokens, self.clock())
        self.steps.append(Step(self.clock(), plan.num_decodes, plan.num_prefill_tokens, fresh))

    def clear(self) -> None:
        """End all of its requests."""
        scheduler = self.worker.scheduler
        with self.lock:
            for request in [*scheduler.waiting, *scheduler.prefilling, *scheduler.running]:
                scheduler.abort(request.request_id)


def run_together(
    loads: Sequence[Load],
    seconds: float,
    *,
    warmup: int = 3,
    settle: float = 0.0,
) -> list[list[Step]]:
    """Run each load in a thread of its own, all at once. Returns the steps of each that ended in a common stretch.

    The stretch begins ``settle`` seconds after each has taken ``warmup`` steps, and lasts ``seconds``, and longer if a
    load would have fewer than two steps in it.

    Raises what the first step raised that failed; ConfigError if ``settle`` is no finite number of seconds.
    """
    if not 0 <= settle < math.inf:
        raise ConfigError(f"settle {settle}: a load settles for a finite number of seconds, 0 or more")
    stop, errors = threading.Event(), []
    marks = [threading.Semaphore(0) for _ in loads]  # one for each step taken

    def run(load: Load, mark: threading.Semaphore) -> None:
        try:
            with load.worker.enter():
                while not stop.is_set():
                    load.step()
                    mark.release()
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            mark.release(warmup + 2)

    for load in loads:
        load.steps.clear()
    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in zip(loads, marks)]
    for thread in threads:
        thread.start()
    try:
        for mark in marks:
            for _ in range(warmup):
                mark.acquire()
        stop.wait(settle)
        begin = loads[0].clock()
        stop.wait(seconds)
        while not stop.is_set() and any(sum(s.end > begin for s in load.steps) < 3 for load in loads):
            stop.wait(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for load in loads:
            load.clear()
    if errors:
        raise errors[0]
    end = min(load.steps[-1].end for load in loads)
    return [[step for step in load.steps if begin < step.end <= end] for load in loads]


def gaps_ms(steps: Sequence[Step]) -> list[float]:
    """Times between the ends of successive steps: what a decoding request waits for its next token."""
    return [(b.end - a.end) * 1e3 for a, b in itertools.pairwise(steps) if not b.fresh]


def prefill_rate(steps: Sequence[Step]) -> float:
    """Prompt tokens per ms, between the ends of the first and the last step, less the time of starting over."""
    pairs = [(a, b) for a, b in itertools.pairwise(steps) if not b.fresh]
    return sum(b.prefill_tokens for _, b in pairs) / sum((b.end - a.end) * 1e3 for a, b in pairs)
