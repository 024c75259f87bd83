"""CentralScheduler: every request from its arrival to its end, over workers of all three roles.

A state machine in plain Python: no thread, no lock, no clock, no tensor. A driver calls it with its own ``now`` and
carries out what it answers: steps of workers, and handoffs on links. Threads do so in `nanopd.router.server`, a virtual
clock in `nanopd.sim`.

Collocated requests go to a worker's own queue at once. Disaggregated ones wait in the backlog, first come, first
served, until a decode worker has reserved blocks and a seat for them (admission by credit): whoever has been prefilled
can run. No step of one worker ever waits for a step of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from nanopd.costmodel.checks import shown
from nanopd.engine.desk import OutputDesk
from nanopd.engine.detokenizer import Tokenizer
from nanopd.engine.jobs import Job, OutputCallback
from nanopd.engine.plan import StepPlan
from nanopd.engine.request import FinishReason, Request, RequestState, Stamp
from nanopd.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidRequestError,
    LeaseExpiredError,
    NonFiniteLogitsError,
    OutOfBlocksError,
    OverloadedError,
    StepFailedError,
    UnknownRequestError,
    WorkerFailedError,
)
from nanopd.kv.block_manager import BlockManager
from nanopd.router.callbacks import harmless
from nanopd.router.decision import Path, Policy
from nanopd.router.entry import Backlog, Entry, Stage
from nanopd.router.moves import Moves
from nanopd.router.records import CentralConfig, Event, Predictor, WorkerStep
from nanopd.router.roster import Roster, load_of
from nanopd.router.snapshot import Snapshot, WorkerSnapshot
from nanopd.transfer.handoff import Handoff
from nanopd.workers.worker import PrefillWorker, Role, Worker

__all__ = ["CentralConfig", "CentralScheduler", "Event", "Predictor", "WorkerStep"]


class CentralScheduler:
    """Routes on arrival, plans steps, moves requests between workers.

    Args:
        workers: of any roles; names are unique.
        policy: decides each request's path.
        links: (prefill worker, decode worker) names between which KV can move, beside those that share a pool.
        kv_bytes_per_token, link_gb_s: for snapshots.
        observe: called with each `Event`.

    Raises ConfigError: no policy, no worker, a name twice, or layouts of two linked workers that differ.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        policy: Policy,
        *,
        config: CentralConfig | None = None,
        links: Collection[tuple[str, str]] = (),
        predictor: Predictor | None = None,
        tokenizer: Tokenizer | None = None,
        kv_bytes_per_token: int = 0,
        link_gb_s: float | None = None,
        observe: Callable[[Event], None] | None = None,
    ) -> None:
        if not callable(getattr(policy, "decide", None)):
            raise ConfigError(f"a policy has a method `decide`, see `make_policy`, got {shown(policy)}")
        self.config = config or CentralConfig()
        self.policy = policy
        self.predictor = predictor
        self.desk = OutputDesk()
        self._roster = Roster(workers, links)
        self.workers = self._roster.workers
        self.links = self._roster.links
        self._tokenizer = tokenizer
        self.kv_bytes_per_token, self.link_gb_s = kv_bytes_per_token, link_gb_s
        self.observe = observe
        self._num_accepted = 0
        self._num_ids = 0
        self._entries: dict[str, Entry] = {}
        self._backlog = Backlog()
        self._moves = Moves(self.config.lease_s)
        self._due: list[Handoff] = []  # for `take_handoffs`
        self._cancelled: list[int] = []  # for `take_cancelled`
        self._awake: set[str] = set()  # for `take_awake`
        self._blocked: set[str] = set()  # hold blocks, and could not go on when they last tried
        self._steps: dict[str, WorkerStep] = {}  # in flight, by worker
        self._failed_steps = dict.fromkeys(self.workers, 0)  # in a row
        self._kv_tokens_read = dict.fromkeys(self.workers, 0)  # by the last step's decodes

    # --- requests --------------------------------------------------------------------------------------------

    @property
    def is_fresh(self) -> bool:
        """Whether no request was ever accepted."""
        return self._num_accepted == 0

    @property
    def num_unfinished(self) -> int:
        """Sequences in flight."""
        return len(self._entries)

    def new_id(self) -> str:
        """A name for a request whose client has none: the next number that nobody bears."""
        while True:
            name, self._num_ids = str(self._num_ids), self._num_ids + 1
            if name not in self.desk.jobs:
                return name

    def submit(
        self,
        sequences: Sequence[Request],
        now: float,
        *,
        prompt: str | None = None,
        stream: bool = False,
        on_output: OutputCallback | None = None,
    ) -> None:
        """Accept a user's request: its n sequences, each with ``params.n`` 1 and the first one's ``parent_id``.

        Raises DuplicateRequestError, EmptyPromptError, PromptTooLongError, NoWorkerError or OverloadedError; then
        nothing was accepted.
        """
        first = sequences[0]
        names = {first.parent_id, *(s.request_id for s in sequences)}
        if any(name in self.desk.jobs or name in self._entries for name in names):
            raise DuplicateRequestError(f"request {first.parent_id!r} is still in flight")
        limit = self.config.max_unfinished
        if limit is not None and len(self._entries) + len(sequences) > limit:
            raise OverloadedError(
                f"request {first.parent_id!r}: {len(self._entries)} sequences are unfinished, the limit is {limit}"
            )
        predicted = None if self.predictor is None else self.predictor.predict(first)
        decision = self.policy.decide(first, self.snapshot(now, first), predicted)
        path = self._roster.possible_path(first, decision.path)
        self._num_accepted += len(sequences)
        self.desk.open(Job(prompt, sequences, self._tokenizer, stream=stream, on_output=on_output))
        for request in sequences:
            entry = Entry(request, decision, path, Stage.BACKLOG)
            self._entries[request.request_id] = entry
            self._note(now, "routed", request.request_id, path.value)
            if request.params.max_tokens == 0:
                request.stamps.append(Stamp(now, RequestState.WAITING.value))
                self._finish(entry, FinishReason.LENGTH, now)
            else:
                self._place(entry, now)
        self._grant(now)

    def abort(self, request_id: str, now: float) -> None:
        """End a user's request, wherever its sequences are. Raises UnknownRequestError."""
        job = self.desk.jobs.get(request_id)
        if job is None:
            raise UnknownRequestError(f"no request {request_id!r} is in flight")
        for request in job.sequences:
            entry = self._entries.get(request.request_id)
            if entry is not None:
                self._finish(entry, FinishReason.ABORTED, now)
        self._grant(now)

    def snapshot(self, now: float, request: Request | None = None) -> Snapshot:
        """What a policy may know, of ``request`` how much of it is cached. O(workers), and O(prompt) where it is."""
        alive = [worker for worker in self.workers.values() if worker.alive]
        cached: dict[BlockManager, int] = {}  # workers that share a pool find the same there
        if request is not None:
            pools = dict.fromkeys(worker.block_manager for worker in alive)
            cached = {pool: pool.peek_prefix(request.all_token_ids) for pool in pools}
        num_bytes = self._moves.num_tokens * self.kv_bytes_per_token
        return Snapshot(
            now=now,
            workers=tuple(self._snapshot(worker, cached.get(worker.block_manager, 0)) for worker in alive),
            backlog_requests=len(self._backlog),
            backlog_tokens=self._backlog.num_tokens,
            transfers=len(self._moves),
            transfer_bytes=num_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
            link_gb_s=self.link_gb_s,
        )

    def _snapshot(self, worker: Worker, cached_tokens: int) -> WorkerSnapshot:
        scheduler, blocks = worker.scheduler, worker.block_manager
        step = self._steps.get(worker.name)
        return WorkerSnapshot(
            name=worker.name,
            role=worker.role,
            profile=worker.profile,
            num_waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.uncomputed_tokens,
            num_running=len(scheduler.running),
            running_tokens=self._kv_tokens_read[worker.name],
            free_blocks=blocks.num_free_blocks,
            total_blocks=blocks.num_blocks,
            block_size=blocks.block_size,
            free_seats=scheduler.num_free_seats,
            step_started=None if step is None else step.start,
            takes_prompts=worker.serves(Role.COLLOCATED) and worker.role is Role.DECODE,
            cached_tokens=cached_tokens,
        )

    # --- steps -----------------------------------------------------------------------------------------------

    def begin_step(self, worker: Worker, now: float) -> WorkerStep | None:
        """Plan the worker's next step; None if it has nothing to do, until `take_awake` names it."""
        if not worker.alive:
            return None
        self._grant(now)
        plan = self._schedule(worker, now)
        while not plan.chunks and self._is_stuck(worker):
            self._let_go_of_latest(worker, now)
            plan = self._schedule(worker, now)
        if not plan.chunks:
            return None
        step = WorkerStep(worker, plan, now)
        if isinstance(worker, PrefillWorker) and self.config.stream_layers:
            self._stream(worker, step, now)
        self._blocked.discard(worker.name)
        self._steps[worker.name] = step
        if self.observe is not None:  # else nobody reads the text
            detail = f"{plan.num_decodes} decodes, {plan.num_prefill_tokens} prefill tokens"
            self._note(now, "step", worker.name, detail)
        return step

    def _schedule(self, worker: Worker, now: float) -> StepPlan:
        plan = worker.scheduler.schedule(now)
        if plan.preempted:  # never by a prefill worker, so nothing that was preempted is being streamed
            self._wake_pool(worker)
        return plan

    def _is_stuck(self, worker: Worker) -> bool:
        """Whether the workers of its pool, this one included, each wait for blocks that the others hold.

        One scheduler never gets there alone, see its invariants; unless it is a prefill worker that decode workers of
        two pools take from: in its own pool some requests have all their blocks beforehand, and others none.
        """
        pool = [other for other in self._roster.pool_of(worker) if other.alive]
        holders = [other for other in pool if _holding(other)]
        if worker in holders:
            self._blocked.add(worker.name)
        if len(holders) < 2 and not any(_lent(other) for other in holders):
            return False
        if any(other.name not in self._blocked for other in holders):
            return False
        return not any(move.source in pool or move.reservation.worker in pool for move in self._moves)

    def _let_go_of_latest(self, worker: Worker, now: float) -> None:
        """The latest arrival that holds blocks of this pool starts over, elsewhere or when there is room."""
        pool = self._roster.pool_of(worker)
        holding = [request for other in pool for request in _holding(other)]
        latest = max(holding, key=lambda request: (request.arrival_time, request.request_id))
        error = OutOfBlocksError(f"the pool of {worker.name} has no block left for {len(holding)} requests")
        self._retry(self._entries[latest.request_id], error, now, counted=False)
        self._wake_pool(worker)

    def _stream(self, worker: PrefillWorker, step: WorkerStep, now: float) -> None:
        for chunk in step.plan.chunks:
            entry = self._entries[chunk.request.request_id]
            handoff = self._moves.make(entry, worker, chunk.start + chunk.num_tokens, bool(chunk.samplers), now)
            if handoff is not None:
                step.handoffs.append(handoff)
                self._note(now, "handoff", handoff.request_id, handoff.destination)

    def finish_step(self, step: WorkerStep, tokens: Sequence[Sequence[int]], now: float) -> None:
        """Book the step's tokens: ``tokens[c][s]`` for ``plan.chunks[c].samplers[s]``."""
        worker, plan = step.worker, step.plan
        if not self._step_ends(step):
            return
        try:
            finished = worker.scheduler.update(plan, tokens, now)
        except StepFailedError as error:  # the runner broke its contract; nothing has changed yet
            self._steps[worker.name] = step
            self.fail_step(step, error, now)
            return
        self._failed_steps[worker.name] = 0
        decodes = plan.chunks[: plan.num_decodes]
        self._kv_tokens_read[worker.name] = sum(chunk.start for chunk in decodes) + len(decodes)
        progressed, ended = self.desk.look_at(request for chunk in plan.chunks for request in chunk.samplers)
        for request, reason in ended:
            worker.scheduler.finish(request, reason, now, self.desk.jobs[request.parent_id].error)
        for request in (*finished, *(request for request, _ in ended)):
            self._close(self._entries[request.request_id], now)
        if isinstance(worker, PrefillWorker):
            for request in list(worker.scheduler.transferring.values()):
                self._hand_over(self._entries[request.request_id], worker, now)
        self.desk.show_progress(progressed)
        self._grant(now)

    def fail_step(self, step: WorkerStep, error: BaseException, now: float) -> None:
        """The step raised: nobody knows what it wrote, so its requests are computed again, elsewhere if possible.

        A WorkerFailedError is about the worker and not about the step: the worker is given up.
        """
        worker = step.worker
        if not self._step_ends(step):
            return
        worker.scheduler.cancel(step.plan, now)
        if isinstance(error, WorkerFailedError):  # it says itself that it cannot go on
            self.worker_failed(worker, error, now)
            return
        self._failed_steps[worker.name] += 1
        failure = StepFailedError(f"a step of {worker.name} raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        guilty = set(error.request_ids) if isinstance(error, NonFiniteLogitsError) else set()
        for chunk in step.plan.chunks:
            entry = self._entries.get(chunk.request.request_id)
            if entry is None or entry.worker is not worker:
                continue  # aborted meanwhile
            if chunk.request.request_id in guilty:
                self._finish(entry, FinishReason.FAILED, now, error)
            elif not guilty:
                self._retry(entry, failure, now)
        if not guilty and self._failed_steps[worker.name] >= self.config.max_failed_steps:
            self.worker_failed(worker, failure, now)
        self._wake_pool(worker)
        self._grant(now)

    def _step_ends(self, step: WorkerStep) -> bool:
        """False for a step of a worker that was given up meanwhile."""
        if self._steps.get(step.worker.name) is not step:
            return False
        del self._steps[step.worker.name]
        self._wake_pool(step.worker)
        return True

    def worker_failed(self, worker: Worker, error: BaseException, now: float) -> None:
        """Give a worker up. Its requests move to others, or fail with a WorkerFailedError."""
        if not worker.alive:
            return
        worker.alive = False
        self._note(now, "worker_failed", worker.name, type(error).__name__)
        self._steps.pop(worker.name, None)
        if worker.scheduler.in_flight is not None:
            worker.scheduler.cancel(worker.scheduler.in_flight, now)
        for entry in list(self._entries.values()):
            reserved_there = entry.reservation is not None and entry.reservation.worker is worker
            if entry.worker is worker or (reserved_there and entry.stage is Stage.MOVING):
                self._retry(entry, error, now, counted=False)
            elif reserved_there:
                self._abandon(entry)  # its prefill goes on; a new home is found when it is handed over
                entry.lost = error
        for entry in self._backlog.clear():
            self._place(entry, now)  # where its path may be closed now
        self._grant(now)

    # --- handoffs --------------------------------------------------------------------------------------------

    def take_handoffs(self) -> list[Handoff]:
        """Handoffs that are to be sent now, whole, in this order."""
        due, self._due = self._due, []
        return due

    def take_cancelled(self) -> list[int]:
        """Transfer ids that nobody wants any more. The driver still says when they have ended."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def take_awake(self) -> set[str]:
        """Names of workers that may have something to do since the last call."""
        awake, self._awake = self._awake, set()
        return awake

    def transfer_done(self, transfer_id: int, now: float) -> None:
        """All bytes have arrived, and nothing reads or writes for this transfer any more."""
        self._transfer_ends(transfer_id, None, now)

    def transfer_failed(self, transfer_id: int, error: BaseException, now: float) -> None:
        """The transfer has ended without its data; nothing reads or writes for it any more."""
        self._transfer_ends(transfer_id, error, now)

    def _transfer_ends(self, transfer_id: int, error: BaseException | None, now: float) -> None:
        ended = self._moves.end(transfer_id, ok=error is None)
        if ended is None:
            return
        move, stale = ended
        entry, problem = move.entry, error or stale
        self._wake_pool(move.source)
        self._wake_pool(move.reservation.worker)
        if entry.reservation is move.reservation:
            if problem is not None:
                self._lose(entry, problem, now)
            elif entry.stage is Stage.MOVING and move.reservation.complete and move.reservation.open_moves == 0:
                self._arrive(entry, now)
        self._grant(now)

    def _lose(self, entry: Entry, error: BaseException, now: float) -> None:
        """KV of this entry did not arrive."""
        if entry.stage is Stage.MOVING:
            self._retry(entry, error, now)
        else:
            self._abandon(entry)  # still in prefill, which is not disturbed; see `_hand_over`
            entry.lost = error

    def tick(self, now: float) -> None:
        """Let leases run out. To be called at `next_deadline` at the latest; more often does no harm."""
        for move in self._moves.overdue(now):
            self._cancelled.append(move.handoff.transfer_id)
            self._note(now, "expired", move.handoff.request_id)
            self._wake_pool(move.source)
            if move.entry.reservation is move.reservation:
                waited = f"{self._moves.lease_s} s from {move.handoff.source} to {move.handoff.destination}"
                error = LeaseExpiredError(
                    f"the KV of request {move.handoff.request_id!r} did not arrive within {waited}"
                )
                self._lose(move.entry, error, now)
        self._grant(now)

    @property
    def next_deadline(self) -> float | None:
        """When `tick` has something to do, by the driver's clock."""
        return self._moves.next_deadline

    def close(self, now: float) -> None:
        """Abort everything. The driver has stopped its workers and closed its links: what was on them is dropped."""
        for worker in self.workers.values():
            self._steps.pop(worker.name, None)
            if worker.scheduler.in_flight is not None:
                worker.scheduler.cancel(worker.scheduler.in_flight, now)
        for entry in list(self._entries.values()):
            self._finish(entry, FinishReason.ABORTED, now)
        for move in list(self._moves):
            self._moves.end(move.handoff.transfer_id, ok=False)
        self._due.clear()

    # --- from place to place -----------------------------------------------------------------------------------

    def _place(self, entry: Entry, now: float, cause: BaseException | None = None) -> None:
        """Queue an entry that is nowhere on its path; on the other one if its own is closed for good.

        ``cause``: the failure that it comes from, if any.
        """
        try:
            entry.path = self._roster.possible_path(entry.request, entry.path)
        except InvalidRequestError as error:
            before = "" if cause is None else f"; before that, {cause}"
            failure = WorkerFailedError(f"no worker is left for request {entry.request.request_id!r}: {error}{before}")
            failure.__cause__ = cause
            self._finish(entry, FinishReason.FAILED, now, failure)
            return
        if entry.path is Path.DISAGGREGATED:
            entry.stage = Stage.BACKLOG
            self._backlog.append(entry)
            return
        worker = min(self._roster.takers(entry.request), key=load_of)
        worker.add(entry.request, now)
        entry.stage, entry.worker = Stage.WORKER, worker
        self._awake.add(worker.name)

    def _grant(self, now: float) -> None:
        """Start as many of the backlog, oldest first, as the decode side has room for."""
        while (entry := self._backlog.head) is not None and self._reserve(entry):
            self._backlog.remove(entry)
            assert entry.worker is not None and entry.reservation is not None
            entry.worker.add(entry.request, now)
            entry.stage = Stage.WORKER
            self._awake.add(entry.worker.name)
            self._note(now, "granted", entry.request.request_id, f"{entry.worker.name} {entry.reservation.worker.name}")

    def _reserve(self, entry: Entry) -> bool:
        """Reserve for ``entry`` on the decode worker with the most free blocks that takes it."""
        ahead, growth = self.config.prefill_ahead_tokens, self.config.growth_tokens
        for prefill, decode in sorted(self._roster.pairs(), key=lambda pair: (*load_of(pair[0]), *load_of(pair[1]))):
            if prefill.scheduler.uncomputed_tokens >= ahead:
                return False  # it has the least of all
            try:
                prefill.check(entry.request)
                if self._moves.reserve(entry, prefill, decode, growth):
                    entry.worker = prefill
                    return True
            except InvalidRequestError:
                continue  # too long for this one, not for all: `submit` has checked
        return False

    def _hand_over(self, entry: Entry, prefill: PrefillWorker, now: float) -> None:
        """The prefill is done: on to the decode worker, with the KV or behind it."""
        request, reservation = entry.request, entry.reservation
        if reservation is None:
            assert entry.lost is not None
            self._retry(entry, entry.lost, now)
            return
        decode = reservation.worker
        if self._is_lent(entry):
            request.table = prefill.give_away(request)
            self._arrive(entry, now)
            return
        if not self.config.stream_layers:
            handoff = self._moves.make(entry, prefill, request.num_computed_tokens, True, now)
            assert handoff is not None  # `match_prefix` leaves at least one token to send
            self._due.append(handoff)
            self._note(now, "handoff", request.request_id, decode.name)
        prefill.block_manager.free(prefill.give_away(request))  # the leases hold what is still to be read
        entry.stage, entry.worker = Stage.MOVING, None
        if reservation.complete and reservation.open_moves == 0:  # the transfer was quicker than the step's end
            self._arrive(entry, now)

    def _is_lent(self, entry: Entry) -> bool:
        return entry.reservation is not None and entry.reservation.table is None

    def _arrive(self, entry: Entry, now: float) -> None:
        assert entry.reservation is not None
        decode, entry.reservation = entry.reservation.worker, None
        decode.take_over(entry.request, now)
        entry.stage, entry.worker = Stage.WORKER, decode
        self._awake.add(decode.name)
        self._note(now, "arrived", entry.request.request_id, decode.name)

    def _retry(self, entry: Entry, error: BaseException, now: float, counted: bool = True) -> None:
        """Take the request out of where it is and compute it anew; its outputs so far stay. Or give it up."""
        request = entry.request
        entry.num_retries += counted
        if entry.num_retries > self.config.max_retries:
            self._finish(entry, FinishReason.FAILED, now, error)
            return
        self._note(now, "retried", request.request_id, type(error).__name__)
        self._abandon(entry)
        if entry.stage is Stage.WORKER and entry.worker is not None:
            entry.worker.scheduler.withdraw(request, now)
        elif entry.stage is Stage.MOVING:
            request.transition(RequestState.WAITING, now, event="preempted", num_tokens=request.num_computed_tokens)
            request.num_computed_tokens = 0
        request.hand_off = False
        entry.worker = None
        if self._roster.alive(Role.COLLOCATED) and entry.path is Path.DISAGGREGATED:
            entry.path = Path.COLLOCATED  # no second transfer
        self._place(entry, now, error)

    def _finish(self, entry: Entry, reason: FinishReason, now: float, error: BaseException | None = None) -> None:
        """End a sequence wherever it is."""
        if entry.stage is Stage.WORKER and entry.worker is not None:
            entry.worker.scheduler.finish(entry.request, reason, now, error)
            self._wake_pool(entry.worker)
        else:
            if entry.stage is Stage.BACKLOG:
                self._backlog.discard(entry)
            entry.request.finish(reason, now, error)
        self._close(entry, now)

    def _close(self, entry: Entry, now: float) -> None:
        """Books off a sequence that has finished."""
        request = entry.request
        self._abandon(entry)
        del self._entries[request.request_id]
        self.desk.close([request])
        if self.predictor is not None:
            harmless("the predictor", self.predictor.observe)(request)
        self._note(now, "finished", request.request_id, str(request.finish_reason))

    def _abandon(self, entry: Entry) -> None:
        """Give up the entry's reservation, if it has one; others may wait for its seat and its blocks."""
        reservation = entry.reservation
        self._moves.abandon(entry)
        if reservation is not None:
            self._wake_pool(reservation.worker)

    def _wake_pool(self, worker: Worker) -> None:
        """Blocks or seats were given back: everybody who takes from this pool may be able to go on."""
        names = {other.name for other in self._roster.pool_of(worker)}
        self._awake |= names
        self._blocked -= names

    def _note(self, now: float, kind: str, subject: str, detail: str = "") -> None:
        if self.observe is not None:
            self.observe(Event(now, kind, subject, detail))


def _lent(worker: Worker) -> list[Request]:
    """Who waits there with blocks already: those reserved for it on a decode worker of the same pool."""
    return [request for request in worker.scheduler.waiting if request.table is not None]


def _holding(worker: Worker) -> list[Request]:
    """Who holds blocks there."""
    return [*worker.scheduler.prefilling, *worker.scheduler.running, *_lent(worker)]
