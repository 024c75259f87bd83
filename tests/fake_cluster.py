"""Workers on fake runners, and a driver that takes every decision of timing at random.

`Monkey` plays the threads, the devices and the links: at each turn it begins or ends some worker's step, ends some
transfer, lets time pass, breaks something. Slots are read by a transfer when it *ends*, and written then, even when
nobody wants it any more: so a block that was given back too early shows as a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from nanopd.engine.outputs import RequestOutput
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import InvalidRequestError, NanoPDError, UnknownRequestError
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.fingerprint import LayoutFingerprint
from nanopd.router.central import CentralConfig, CentralScheduler, WorkerStep
from nanopd.router.decision import Decision, Path
from nanopd.router.server import make_sequences
from nanopd.router.snapshot import Snapshot
from nanopd.transfer.handoff import Handoff
from nanopd.workers.worker import CollocatedWorker, DecodeWorker, PrefillWorker, Worker
from tests.fake_runner import EOS, VOCAB, FakeRunner, oracle

LAYOUT = LayoutFingerprint("fake", "bfloat16", 4, 2, 1, 8)
TURNS = 200_000
ROLES = {
    "c": CollocatedWorker,
    "p": PrefillWorker,
    "d": DecodeWorker,
    "e": partial(DecodeWorker, takes_prompts=True),
}


class AtRandom:
    """A policy for tests: the request's id decides."""

    name = "at random"

    def decide(self, request: object, snapshot: Snapshot, predicted_output: float | None = None) -> Decision:
        path = random.Random(request.request_id).choice(list(Path))  # type: ignore[attr-defined]
        return Decision(path, "a coin was tossed")


def make_workers(
    names: str,
    *,
    num_blocks: int = 24,
    block_size: int = 4,
    shared_pool: bool = False,
    prefix_caching: bool = True,
    max_model_len: int = 64,
    chunk_size: int | None = 8,
    max_num_seqs: int = 6,
) -> list[Worker]:
    """``names`` like "c0 p0 p1 d0": the letter is the role."""
    config = SchedulerConfig(max_num_seqs, 16, chunk_size, max_model_len)
    workers: list[Worker] = []
    common: tuple[BlockManager, FakeRunner] | None = None
    for name in names.split():
        pool = (
            BlockManager(num_blocks, block_size, enable_prefix_caching=prefix_caching),
            FakeRunner(num_blocks, block_size),
        )
        if shared_pool and name[0] in "pde":
            common = pool = common or pool
        workers.append(ROLES[name[0]](name, Scheduler(config, pool[0]), pool[1], LAYOUT))
    return workers


def uneven_workers(names: str, seed: int) -> list[Worker]:
    """Workers of which no two need be alike: pools of any size, some of them shared, few seats, short chunks."""
    draw, size = random.Random(seed), LAYOUT.block_size
    common: tuple[BlockManager, FakeRunner] | None = None
    workers: list[Worker] = []
    for name in names.split():
        num_blocks = draw.choice((1, 2, 6, 16, 17, 40))
        caching, watermark = draw.random() < 0.7, draw.choice((0.01, 0.2))
        manager = BlockManager(num_blocks, size, enable_prefix_caching=caching, watermark=watermark)
        pool = (manager, FakeRunner(num_blocks, size))
        if draw.random() < 0.5:
            common = pool = common or pool
        seats = draw.choice((1, 2, 6))
        config = SchedulerConfig(seats, max(seats, draw.choice((1, 4, 64))), draw.choice((1, 8, None)), 64)
        workers.append(ROLES[name[0]](name, Scheduler(config, pool[0]), pool[1], LAYOUT))
    return workers


def all_links(workers: Sequence[Worker]) -> list[tuple[str, str]]:
    sources = [w for w in workers if isinstance(w, PrefillWorker)]
    return [
        (p.name, d.name) for p in sources for d in workers if isinstance(d, DecodeWorker) and not p.shares_pool_with(d)
    ]


class Monkey:
    """A driver without a clock of its own: a seed decides what happens next."""

    def __init__(self, workers: Sequence[Worker], seed: int, *, config: CentralConfig, faults: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.workers = list(workers)
        self.faults = faults
        self.now = 0.0
        self.central = CentralScheduler(workers, AtRandom(), config=config, links=all_links(workers))
        self.awake = {worker.name for worker in workers}  # as the server's threads: the others wait to be woken
        self.steps: dict[str, tuple[WorkerStep, list[list[int]]]] = {}
        self.on_links: dict[tuple[str, str], list[Handoff]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.num_outputs: dict[str, int] = {}
        self.expected: dict[str, list[list[int]]] = {}
        self.aborted: set[str] = set()
        self.refused = 0

    # --- what may happen

    def submit(self, name: str, max_prompt: int = 40, max_tokens: int = 20) -> None:
        draw = self.random
        # Prompts that begin alike, so that the prefix caches have something to find.
        prompt = [draw.choice((1, 2)) for _ in range(draw.randint(1, max_prompt))]
        if draw.random() < 0.5:
            prompt = [3] * min(12, max_prompt) + prompt[: max_prompt - 12]
        params = SamplingParams(
            n=draw.choice((1, 1, 1, 2)), max_tokens=draw.randint(0, max_tokens), seed=draw.randint(0, 99)
        )
        sequences = make_sequences(name, prompt, params, self.now, (EOS,))
        try:
            self.central.submit(sequences, self.now, on_output=self._receive)
        except InvalidRequestError:
            self.refused += 1
            return
        longest = self.workers[0].scheduler.config.max_model_len
        self.expected[name] = [oracle(prompt, params, i, longest) for i in range(params.n)]

    def _receive(self, output: RequestOutput) -> None:
        self.outputs[output.request_id] = output
        self.num_outputs[output.request_id] = self.num_outputs.get(output.request_id, 0) + 1

    def abort(self) -> None:
        if self.central.desk.jobs:
            name = self.random.choice(sorted(self.central.desk.jobs))
            self.central.abort(name, self.now)
            self.aborted.add(name)

    def begin(self, worker: Worker) -> bool:
        step = self.central.begin_step(worker, self.now)
        self.awake |= self.central.take_awake() - {worker.name}
        if step is None:
            self.awake.discard(worker.name)
            return False
        self.steps[worker.name] = (step, worker.runner.execute(step.plan))
        self._enqueue(step.handoffs)
        return True

    def end(self, name: str) -> None:
        step, tokens = self.steps.pop(name)
        self.awake.add(name)
        if self.random.random() < self.faults:
            self.central.fail_step(step, RuntimeError("the device said no"), self.now)
        else:
            self.central.finish_step(step, tokens, self.now)
        self._enqueue(self.central.take_handoffs())

    def _enqueue(self, handoffs: Sequence[Handoff]) -> None:
        for handoff in handoffs:
            self.on_links.setdefault((handoff.source, handoff.destination), []).append(handoff)

    def deliver(self, pair: tuple[str, str]) -> None:
        handoff = self.on_links[pair].pop(0)
        self._copy(handoff)  # also what was cancelled: a stalled link wakes up late
        if self.random.random() < self.faults:
            self.central.transfer_failed(handoff.transfer_id, RuntimeError("the cable came off"), self.now)
        else:
            self.central.transfer_done(handoff.transfer_id, self.now)
        self._enqueue(self.central.take_handoffs())

    def _copy(self, handoff: Handoff) -> None:
        source, destination = self.central.workers[handoff.source], self.central.workers[handoff.destination]
        size, read, write = LAYOUT.block_size, source.runner.slots, destination.runner.slots
        for a, b in zip(handoff.source_blocks, handoff.destination_blocks, strict=True):
            write[b * size : (b + 1) * size] = read[a * size : (a + 1) * size]

    def kill(self) -> None:
        alive = [worker for worker in self.workers if worker.alive]
        if len(alive) > 1:
            worker = self.random.choice(alive)
            self.steps.pop(worker.name, None)
            self.central.worker_failed(worker, RuntimeError("the worker died"), self.now)

    # --- the run

    def turn(self) -> bool:
        """One thing happens. False if nothing can."""
        self.now += self.random.random()
        self.awake |= self.central.take_awake()
        idle = [w for w in self.workers if w.name in self.awake and w.name not in self.steps and w.alive]
        pairs = [pair for pair, handoffs in self.on_links.items() if handoffs]
        choices = [("begin", w) for w in idle] + [("end", n) for n in self.steps] + [("deliver", p) for p in pairs]
        self.random.shuffle(choices)
        done = False
        for kind, what in choices:
            if kind == "begin":
                done = self.begin(what)  # type: ignore[arg-type]
            elif kind == "end":
                self.end(what)  # type: ignore[arg-type]
                done = True
            else:
                self.deliver(what)  # type: ignore[arg-type]
                done = True
            if done:
                break
        if self.random.random() < 0.2:
            self.central.tick(self.now)
        self.central.desk.run_callbacks()
        return done

    def run(
        self, num_requests: int, *, abort_share: float = 0.0, kill_share: float = 0.0, turns: int = 200_000
    ) -> None:
        """Submit requests now and then, until all have ended."""
        submitted = 0
        for _ in range(TURNS):
            if submitted < num_requests and self.random.random() < 0.3:
                self.submit(f"r{submitted}")
                submitted += 1
            if self.random.random() < abort_share:
                self.abort()
            if self.random.random() < kill_share:
                self.kill()
            if not self.turn() and submitted == num_requests and not self._able():
                if self.central.num_unfinished == 0:
                    return
                raise AssertionError(f"stuck with {self.central.num_unfinished} unfinished requests")
        raise AssertionError(f"still {self.central.num_unfinished} unfinished after {TURNS} turns")

    def _able(self) -> bool:
        return any(worker.name in self.awake and worker.alive for worker in self.workers)

    # --- what must hold at the end

    def check_tokens(self) -> None:
        """Who finished has the oracle's tokens; who did not has the first of them."""
        for name, samples in self.expected.items():
            output = self.outputs[name]
            assert self.num_outputs[name] == 1 and output.finished
            for sample, expected in zip(output.outputs, samples, strict=True):
                got = sample.token_ids
                if sample.finish_reason in ("stop", "length"):
                    assert got == expected, (name, got, expected)
                else:
                    assert got == expected[: len(got)], (name, got, expected)
                    assert sample.finish_reason == "aborted" or isinstance(output.error, NanoPDError | RuntimeError)

    def check_pools(self) -> None:
        assert not len(self.central._moves) and not self.central._entries
        for worker in self.workers:
            blocks = worker.block_manager
            assert blocks.num_free_blocks == blocks.num_blocks, worker
            blocks.check_integrity([], [])
            if isinstance(worker, DecodeWorker):
                assert not worker.reserved
            assert worker.scheduler.num_free_seats == worker.scheduler.config.max_num_seqs
            assert worker.scheduler.uncomputed_tokens == 0


__all__ = ["VOCAB", "AtRandom", "Monkey", "UnknownRequestError", "all_links", "make_workers", "uneven_workers"]
