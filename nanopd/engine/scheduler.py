"""Scheduler: which tokens of which requests the next step computes. Policy only: no tensors, no clock, no threads.

Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024):
every step takes one token of each running request first, then fills what is left of the token budget with prompt
chunks, first come, first served. Memory is paged and runs out late: the request that arrived last is then preempted
and recomputed (vLLM, Kwon et al., SOSP 2023).

Invariants, which the tests hold:

1. Nobody overtakes: whoever holds a seat (prefilling or running) arrived before whoever waits, and at most one
   request is in the middle of its prefill. So the oldest request has a seat and is never preempted: each step computes
   at least one of its tokens, which bounds the number of steps. (`attach` brings in requests from outside of this
   order; a request that they hold up preempts them.)
2. A request that is accepted fits the pool when it is alone in it. So the oldest can always finish.
3. Blocks enter the prefix cache in ``update``, after the step that computed them, never before.
4. While a step is in flight nothing it reads or writes is freed: what an abort gives up is freed in ``update``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

from nanopd.engine.admission import Admission
from nanopd.engine.plan import ScheduledChunk, SchedulerConfig, StepPlan
from nanopd.engine.queues import Queues
from nanopd.engine.request import FinishReason, Request, RequestState, Stamp
from nanopd.errors import IllegalTransitionError, StepFailedError, UnknownRequestError
from nanopd.kv.block_manager import BlockManager, BlockTable

__all__ = ["ScheduledChunk", "Scheduler", "SchedulerConfig", "StepPlan"]


class Scheduler:
    """Three queues, all in order of arrival, and the rules by which requests move between them.

    Drive it as ``plan = schedule(now)``, compute the plan, ``update(plan, tokens, now)``; or ``fail`` or ``cancel`` it.
    One step is in flight at a time. ``now`` is the driver's clock in seconds, real or virtual; it only goes into
    stamps. Not thread-safe: the engine puts a lock around it.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager, *, early_slots: bool = False) -> None:
        """``early_slots``: reserve a running request's next slot a step early if there is room, for a runner that
        launches steps ahead."""
        self.config = config
        self.block_manager = block_manager
        self.early_slots = early_slots
        self._queues = Queues()
        self._admission = Admission(config, block_manager, self._queues)
        self.reserved_seats = 0  # for requests that will be attached: nobody who waits here gets them
        self._in_flight: StepPlan | None = None
        self._ended_in_flight: list[Request] = []  # their blocks are freed when the step has ended

    @property
    def waiting(self) -> deque[Request]:
        return self._queues.waiting

    @property
    def prefilling(self) -> list[Request]:
        return self._queues.prefilling

    @property
    def running(self) -> list[Request]:
        return self._queues.running

    @property
    def transferring(self) -> dict[str, Request]:
        """Prefilled requests, by id, whose blocks are held until `detach`."""
        return self._queues.transferring

    @property
    def in_flight(self) -> StepPlan | None:
        """The plan that was scheduled and is not updated, failed or cancelled yet."""
        return self._in_flight

    @property
    def has_unfinished(self) -> bool:
        return len(self._queues) > 0

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens to compute before all who wait or prefill can decode."""
        return self._queues.uncomputed_tokens

    @property
    def num_free_seats(self) -> int:
        """How many more requests may prefill or run: ``max_num_seqs`` less those that do, less `reserved_seats`."""
        return self.config.max_num_seqs - self._queues.num_seated - self.reserved_seats

    # --- requests come and go --------------------------------------------------------------------------------

    def validate(self, request: Request, *, hand_off: bool | None = None) -> None:
        """Raise what ``add`` would raise (an InvalidRequestError), and change nothing.

        ``hand_off``: as if the request had it set so.
        """
        self._admission.validate(request, hand_off)

    def add(self, request: Request, now: float = 0.0) -> list[Request]:
        """Queue ``request`` and, for n > 1, its siblings. Returns all n sequences, the parent first.

        With ``request.table`` set, its slots were reserved by somebody who shares this pool: they are used first.
        With ``max_tokens`` 0 they are FINISHED (length) on return and were never queued.
        Raises EmptyPromptError, DuplicateRequestError or PromptTooLongError; nothing is queued then.
        """
        self._admission.validate(request)
        request.token_limit = min(request.token_limit, self.config.max_model_len)
        sequences = [request, *(request.spawn(index) for index in range(1, request.params.n))]
        self._queues.register(sequences)
        for sequence in sequences:
            sequence.stamps.append(Stamp(now, RequestState.WAITING.value))
        if request.params.max_tokens == 0:
            for sequence in sequences:
                self._end(sequence, FinishReason.LENGTH, now)
        else:
            request.pending_siblings = sequences[1:]
            self._queues.enter(request)
        return sequences

    def abort(self, request_id: str, now: float = 0.0) -> list[Request]:
        """End every unfinished sequence of the user's request ``request_id``, whatever its state. Returns them.

        Raises UnknownRequestError. Safe while a step is in flight: its tokens for these requests will be dropped.
        """
        sequences = self._queues.group(request_id)
        for sequence in reversed(sequences):  # siblings before their parent, whose end would queue them
            self.finish(sequence, FinishReason.ABORTED, now)
        return sequences

    def finish(self, request: Request, reason: FinishReason, now: float, error: BaseException | None = None) -> None:
        """End one sequence now: the engine found a stop string, or a caller gives up."""
        self._queues.leave(request)
        self._end(request, reason, now, error)

    def withdraw(self, request: Request, now: float = 0.0) -> None:
        """Take a request out so that another scheduler can have it: it gives its blocks up, keeps its outputs, waits.

        Raises IllegalTransitionError while a step with it is in flight, UnknownRequestError if it is not here.
        """
        if self._in_flight is not None and any(chunk.request is request for chunk in self._in_flight.chunks):
            raise IllegalTransitionError(f"request {request.request_id!r} is in the step in flight")
        self._queues.leave(request)
        self._queues.unregister(request)
        self._free(request)
        if request.state is not RequestState.WAITING:
            request.transition(RequestState.WAITING, now, event="preempted", num_tokens=request.num_computed_tokens)
        request.num_computed_tokens = 0

    def detach(self, request: Request) -> BlockTable:
        """Let a TRANSFERRING request go. Its table, all of it computed, is the caller's to pin and to free."""
        if request.request_id not in self.transferring or request.table is None:
            raise UnknownRequestError(f"request {request.request_id!r} is not waiting to be handed over")
        self._queues.leave(request)
        self._queues.unregister(request)
        table, request.table = request.table, None
        return table

    def check_attachable(self, request: Request) -> None:
        """Raise DuplicateRequestError or PromptTooLongError if ``attach`` could never take this request."""
        self._queues.check_new(request.request_id)
        self._admission.check_length(request, hand_off=False)

    def attach(self, request: Request, now: float = 0.0) -> None:
        """Run a request whose prompt was computed elsewhere: ``request.table`` holds its KV, in this pool, by now.

        It takes a seat at once, so grant seats (``num_free_seats``) and blocks before the transfer starts, and none
        while older requests wait: they would have to preempt it.
        """
        if request.table is None or request.remaining_prefill != 1:
            raise IllegalTransitionError(
                f"request {request.request_id!r} cannot run: {request.remaining_prefill} tokens have no KV, not 1"
            )
        if self.num_free_seats < 1:
            raise IllegalTransitionError(
                f"request {request.request_id!r} cannot run: all {self.config.max_num_seqs} seats are taken"
            )
        self.check_attachable(request)
        request.hand_off = False
        request.transition(RequestState.RUNNING, now)
        request.token_limit = min(request.token_limit, self.config.max_model_len)
        self._queues.register([request])
        self._queues.enter(request)

    # --- before a step ---------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Plan the next step and reserve its slots. A plan without chunks needs no ``update``."""
        if self._in_flight is not None:
            raise IllegalTransitionError("schedule() while a step is in flight: call update, fail or cancel first")
        self.block_manager.copies_done()
        plan = StepPlan()
        self._make_room(plan, now)
        self._schedule_decodes(plan)
        self._schedule_prefills(plan, now)
        plan.steady = not self.waiting and not self.prefilling
        if self.early_slots and plan.steady:
            self._reserve_early(plan)
        if plan.chunks:
            self._in_flight = plan
        return plan

    def _make_room(self, plan: StepPlan, now: float) -> None:
        """Preempt, latest arrival first, until every running request and everybody older can go on in this step."""
        while (latest := self._queues.latest()) is not None:
            wanted = self._blocks_wanted(latest)
            if self._overtook(latest):  # only after `attach`
                enough = self.num_free_seats > 0 and self._admission.would_match(self.waiting[0], reserve=wanted)
            else:
                enough = wanted <= self.block_manager.num_free_blocks
                if not enough and self._queues.num_seated == 1:
                    return  # alone, so somebody outside of this scheduler holds the blocks: wait for him
            if enough:
                return
            self._preempt(latest, plan, now)

    def _overtook(self, latest: Request) -> bool:
        return bool(self.waiting) and self.waiting[0].arrival_order < latest.arrival_order

    def _blocks_wanted(self, latest: Request) -> int:
        """Blocks without which a running request, or one older than ``latest``, would stand still."""
        needed = self.block_manager.blocks_needed
        wanted = 0
        for request in self.running:
            if request.num_computed_tokens >= request.table.num_tokens:  # type: ignore[union-attr]
                wanted += needed(request.table, 1)
        if self.prefilling and self.prefilling[0] is not latest:
            table = self.prefilling[0].table
            if self.prefilling[0].num_computed_tokens >= table.num_tokens:  # type: ignore[union-attr]
                wanted += needed(table, 1)
        return wanted

    def _preempt(self, request: Request, plan: StepPlan, now: float) -> None:
        """Take the blocks away and queue the request again; it keeps its outputs and recomputes their KV."""
        self._queues.leave(request)
        self._free(request)
        request.transition(RequestState.WAITING, now, event="preempted", num_tokens=request.num_computed_tokens)
        request.num_computed_tokens = 0
        self._queues.enter(request)
        plan.preempted.append(request)

    def _schedule_decodes(self, plan: StepPlan) -> None:
        chunks = plan.chunks
        for request in self.running:
            start = request.num_computed_tokens
            if start >= request.table.num_tokens and not self._grow(request.table, plan):  # type: ignore
                continue
            chunks.append(ScheduledChunk(request, start, 1, (request,)))
        plan.num_decodes = len(chunks)

    def _reserve_early(self, plan: StepPlan) -> None:
        """A new block for those whose slots end with this step. It is theirs alone, and copies nothing."""
        blocks = self.block_manager
        for chunk in plan.chunks:
            request, table = chunk.request, chunk.request.table
            assert table is not None
            if chunk.start + 1 < table.num_tokens or chunk.start + 2 >= request.token_limit:
                continue
            if table.num_tokens % blocks.block_size or blocks.num_free_blocks <= blocks.watermark_blocks:
                continue
            blocks.append_slots(table, blocks.block_size)

    def _grow(self, table: BlockTable | None, plan: StepPlan) -> bool:
        """Reserve the rest of a block at once: it costs the same, and the next steps need not ask."""
        assert table is not None
        blocks = self.block_manager
        num_slots = blocks.block_size - table.num_tokens % blocks.block_size
        if not blocks.can_append(table, num_slots):
            return False
        plan.copies += blocks.append_slots(table, num_slots)
        return True

    def _schedule_prefills(self, plan: StepPlan, now: float) -> None:
        budget = self.config.max_num_batched_tokens - plan.num_decodes
        if self.config.chunk_size is not None:
            budget = min(budget, self.config.chunk_size)
        for request in self.prefilling:
            budget -= self._schedule_chunk(request, budget, plan, now)
        while budget > 0 and self.waiting:
            request = self.waiting[0]
            if not self._admit(request, plan, now):
                return
            budget -= self._schedule_chunk(request, budget, plan, now)

    def _admit(self, request: Request, plan: StepPlan, now: float) -> bool:
        """Give the head of ``waiting`` a seat and the blocks of its cached prefix, if all of its tokens would fit."""
        if self._seats(plan) < 1 or (table := request.table or self._admission.match(request)) is None:
            return False
        self._queues.leave(request)
        request.table, request.num_computed_tokens = table, table.num_committed
        request.transition(RequestState.PREFILLING, now, num_tokens=table.num_committed)
        self._queues.enter(request)
        return True

    def _schedule_chunk(self, request: Request, budget: int, plan: StepPlan, now: float) -> int:
        """Plan as many of the request's next prompt tokens as budget and blocks allow. Returns how many."""
        blocks, table = self.block_manager, request.table
        assert table is not None
        start = request.num_computed_tokens
        num_tokens = min(request.remaining_prefill, budget)
        missing = start + num_tokens - table.num_tokens  # slots may have been reserved beforehand
        if missing > 0 and not blocks.can_append(table, missing):
            capacity = (len(table.block_ids) + blocks.num_free_blocks) * blocks.block_size
            num_tokens = min(num_tokens, capacity - start)
            missing = start + num_tokens - table.num_tokens
        if num_tokens < 1:
            return 0
        if missing > 0:
            plan.copies += blocks.append_slots(table, missing)
        samplers: tuple[Request, ...] = ()
        if start + num_tokens == request.num_tokens:
            samplers = (request, *self._forking_siblings(request, plan))
        plan.chunks.append(ScheduledChunk(request, start, num_tokens, samplers))
        request.stamps.append(Stamp(now, "chunk_start", num_tokens))
        return num_tokens

    def _forking_siblings(self, parent: Request, plan: StepPlan) -> list[Request]:
        """Siblings that start with this step's end. The others queue up and compute the prompt themselves."""
        if not parent.pending_siblings:
            return []
        blocks = self.block_manager
        room = min(self._seats(plan), blocks.num_free_blocks - blocks.watermark_blocks)  # each soon takes a block
        joining, left_over = parent.pending_siblings[: max(room, 0)], parent.pending_siblings[max(room, 0) :]
        parent.pending_siblings = joining
        for sibling in left_over:
            self._queues.enter(sibling)
        return joining

    def _seats(self, plan: StepPlan) -> int:
        """Free seats, less those that the plan's forks will take."""
        joining = sum(max(len(chunk.samplers) - 1, 0) for chunk in plan.chunks[plan.num_decodes :])
        return self.num_free_seats - joining

    # --- after a step ----------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, tokens: Sequence[Sequence[int]], now: float = 0.0) -> list[Request]:
        """Book the step's result: ``tokens[c][s]`` was sampled for ``plan.chunks[c].samplers[s]``.

        Returns the requests that finished by it. Tokens of a request that was aborted meanwhile are dropped.
        Raises StepFailedError, before anything changes, if ``tokens`` are no ints or do not have the plan's shape.
        """
        if not plan.chunks and not tokens:
            return []
        self._check_in_flight(plan)
        self._check_tokens(plan, tokens)
        self._in_flight = None
        stamp = Stamp(now, "token", 1)  # shared: stamps are immutable, and one per step is cheaper than one per token
        finished = self._update_decodes(plan, tokens, stamp)
        for chunk, sampled in zip(plan.chunks[plan.num_decodes :], tokens[plan.num_decodes :], strict=True):
            if not chunk.request.is_finished:  # else aborted while the step ran
                finished += self._update_prefill(chunk, sampled, stamp)
        self._free_ended()
        return finished

    def _check_tokens(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> None:
        expected = [len(chunk.samplers) for chunk in plan.chunks]
        try:
            got, types = list(map(len, tokens)), set(map(type, chain.from_iterable(tokens)))
        except TypeError as error:
            raise StepFailedError(f"the runner returned no list of tokens per chunk: {tokens!r:.80}") from error
        if got != expected:
            raise StepFailedError(f"the runner returned {got} tokens per chunk, the plan asks for {expected}")
        if types - {int}:
            raise StepFailedError(f"the runner returned tokens that are no ints: {tokens!r:.80}")

    def _update_decodes(self, plan: StepPlan, tokens: Sequence[Sequence[int]], stamp: Stamp) -> list[Request]:
        block_size, running = self.block_manager.block_size, RequestState.RUNNING
        finished = []
        for chunk, sampled in zip(plan.chunks[: plan.num_decodes], tokens, strict=False):
            request = chunk.request
            if request.state is not running:
                continue  # aborted while the step ran
            request.num_computed_tokens = computed = chunk.start + 1
            if computed % block_size == 0:
                self._commit(request)
            token = sampled[0]
            request.append_token(token)
            request.stamps.append(stamp)
            if token in request.stop_ids or computed + 1 >= request.token_limit:
                self._end(request, _reason(request, token), stamp.time)
                finished.append(request)
        if finished:
            self._queues.drop_finished_running()
        return finished

    def _update_prefill(self, chunk: ScheduledChunk, sampled: Sequence[int], stamp: Stamp) -> list[Request]:
        request, now = chunk.request, stamp.time
        self._queues.prefilled(request, chunk.start + chunk.num_tokens)
        request.stamps.append(Stamp(now, "chunk", chunk.num_tokens))
        self._commit(request)
        self._admission.prefix_cache_grew()
        if not chunk.samplers:
            return []
        self._queues.leave(request)
        self._fork(request, chunk.samplers[1:])
        finished = []
        for sampler, token in zip(chunk.samplers, sampled, strict=True):
            if sampler.is_finished:
                continue
            sampler.transition(RequestState.TRANSFERRING if sampler.hand_off else RequestState.RUNNING, now)
            sampler.append_token(token)
            sampler.stamps.append(stamp)
            if token in sampler.stop_ids or sampler.num_tokens >= sampler.token_limit:
                self._end(sampler, _reason(sampler, token), now)
                finished.append(sampler)
            else:
                self._queues.enter(sampler)
        return finished

    def _fork(self, parent: Request, siblings: Sequence[Request]) -> None:
        assert parent.table is not None
        parent.pending_siblings = []
        for sibling in siblings:
            if not sibling.is_finished:
                sibling.table = self.block_manager.fork(parent.table)
                sibling.num_computed_tokens = parent.num_computed_tokens

    def _commit(self, request: Request) -> None:
        table = request.table
        assert table is not None
        tokens = request.all_token_ids[table.num_committed : request.num_computed_tokens]
        self.block_manager.commit(table, tokens)

    def fail(self, plan: StepPlan, error: BaseException, now: float = 0.0) -> list[Request]:
        """The step raised: its requests end as FAILED with ``error``, all others are untouched. Returns them."""
        self._check_in_flight(plan)
        self._in_flight = None
        failed: dict[Request, None] = {}  # a set that keeps the order
        for chunk in plan.chunks:
            failed.update(dict.fromkeys((*chunk.request.pending_siblings, *chunk.samplers, chunk.request)))
        ended = [request for request in failed if not request.is_finished]
        for request in sorted(ended, key=lambda r: r.sample_index, reverse=True):  # siblings before their parent
            self.finish(request, FinishReason.FAILED, now, error)
        self._free_ended()
        return ended

    def cancel(self, plan: StepPlan, now: float = 0.0) -> None:
        """The step was interrupted: nobody knows what it wrote, so its requests give up their blocks and recompute."""
        self._check_in_flight(plan)
        self._in_flight = None
        for chunk in plan.chunks:
            if not chunk.request.is_finished:
                self._preempt(chunk.request, plan, now)
        self._free_ended()

    # --- inside ----------------------------------------------------------------------------------------------

    def _check_in_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise IllegalTransitionError("this plan is not the step in flight: it ended before, or was never scheduled")

    def _end(self, request: Request, reason: FinishReason, now: float, error: BaseException | None = None) -> None:
        """FINISHED, out of the books, blocks given back. The caller takes it out of its queue."""
        request.finish(reason, now, error)
        self._queues.unregister(request)
        for sibling in request.pending_siblings:  # they lost their parent, not their right to run
            self._queues.enter(sibling)
        request.pending_siblings = []
        if self._in_flight is not None:
            self._ended_in_flight.append(request)
        else:
            self._free(request)

    def _free_ended(self) -> None:
        self.block_manager.copies_done()  # a commit does this too, but not every step commits
        ended, self._ended_in_flight = self._ended_in_flight, []
        for request in ended:
            self._free(request)

    def _free(self, request: Request) -> None:
        if request.table is not None:
            self.block_manager.free(request.table)
            request.table = None


def _reason(request: Request, token: int) -> FinishReason:
    return FinishReason.STOP if token in request.stop_ids else FinishReason.LENGTH
