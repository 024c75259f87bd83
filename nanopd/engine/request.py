"""Request: one token sequence on its way through the engine, as a state machine with time stamps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import IllegalTransitionError

if TYPE_CHECKING:
    from nanopd.kv.block_manager import BlockTable


class RequestState(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


_S = RequestState
LEGAL_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    # -> RUNNING: a sample forked from its parent's finished prefill. -> TRANSFERRING: the decode side's own copy of a
    # request whose KV is on its way from another worker.
    _S.WAITING: frozenset({_S.PREFILLING, _S.TRANSFERRING, _S.RUNNING, _S.FINISHED}),
    # -> WAITING: preempted, recomputes from the start.
    _S.PREFILLING: frozenset({_S.RUNNING, _S.TRANSFERRING, _S.WAITING, _S.FINISHED}),
    _S.TRANSFERRING: frozenset({_S.RUNNING, _S.WAITING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


class Stamp(NamedTuple):
    """One thing that happened to a request. Metrics and timelines are read off these and nothing else.

    ``event`` is a state's name when that state was entered, or one of

    * ``arrived``: when the client wanted to send it (may lie before ``waiting``); num_tokens = prompt length
    * ``chunk_start`` / ``chunk``: a prefill chunk was scheduled / computed; num_tokens = its length
    * ``token``: an output token became readable; num_tokens = 1
    * ``preempted``: entered ``waiting`` again; num_tokens = computed tokens that were dropped

    For ``prefilling``, num_tokens counts the tokens found in the prefix cache; for other states it is 0.
    """

    time: float  # seconds of the engine's clock
    event: str
    num_tokens: int = 0


class Request:
    """One token sequence: prompt, outputs so far, KV blocks, state, history.

    ``n`` > 1 samples of a prompt are ``n`` requests with the same ``parent_id``: the parent (``sample_index`` 0) and
    siblings ``spawn``-ed from it, which fork the parent's blocks when its prefill is done.

    Invariant outside of a step: positions ``[0, num_computed_tokens)`` have their KV in ``table``; a RUNNING request
    has exactly one token, the last one sampled, still to compute. ``table`` may reserve slots beyond that, so the
    context length of a step is ``chunk.start + chunk.num_tokens``, never ``table.num_tokens``.
    """

    __slots__ = (
        "_tokens",
        "arrival_order",
        "arrival_time",
        "error",
        "finish_reason",
        "hand_off",
        "num_computed_tokens",
        "num_prompt_tokens",
        "output_token_ids",
        "params",
        "parent_id",
        "pending_siblings",
        "prompt_token_ids",
        "request_id",
        "sample_index",
        "stamps",
        "state",
        "stop_ids",
        "table",
        "token_limit",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        sample_index: int = 0,
        parent_id: str | None = None,
        arrival_time: float = 0.0,
        eos_token_ids: Iterable[int] = (),
        hand_off: bool = False,
    ) -> None:
        """``arrival_time``: seconds of the engine's clock. ``eos_token_ids``: end the output unless
        ``params.ignore_eos``. ``hand_off``: leave for another worker (TRANSFERRING) once the prefill is done."""
        self.request_id = request_id
        self.parent_id = request_id if parent_id is None else parent_id
        self.sample_index = sample_index
        self.prompt_token_ids: list[int] = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.params = params
        self.state = RequestState.WAITING
        self.table: BlockTable | None = None
        self.num_computed_tokens = 0
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.stamps: list[Stamp] = [Stamp(arrival_time, "arrived", self.num_prompt_tokens)]
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.arrival_time = arrival_time
        # Scheduling priority, smallest first. The scheduler numbers requests as they are added.
        self.arrival_order: tuple[int, int] = (0, sample_index)
        self.hand_off = hand_off
        self.stop_ids: frozenset[int] = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_ids |= frozenset(eos_token_ids)
        # Finish when num_tokens reaches this; the scheduler lowers it to the model's length.
        self.token_limit = self.num_prompt_tokens + params.max_tokens
        self.pending_siblings: list[Request] = []  # not forked yet
        self._tokens: list[int] = list(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and outputs; the live list, not a copy. Read only: use ``append_token``."""
        return self._tokens

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def remaining_prefill(self) -> int:
        """Tokens whose KV is missing before the next token can be sampled; after a preemption the outputs too."""
        return len(self._tokens) - self.num_computed_tokens

    @property
    def seed(self) -> int | None:
        return self.params.seed

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def sibling_id(self, sample_index: int) -> str:
        return f"{self.request_id}#{sample_index}"

    def spawn(self, sample_index: int) -> Request:
        """A sibling: the same prompt and parameters, another sample."""
        sibling = Request(
            self.sibling_id(sample_index),
            self.prompt_token_ids,
            self.params,
            sample_index=sample_index,
            parent_id=self.parent_id,
            arrival_time=self.arrival_time,
            hand_off=self.hand_off,
        )
        sibling.stop_ids = self.stop_ids
        sibling.token_limit = self.token_limit
        return sibling

    def transition(self, state: RequestState, now: float, *, event: str | None = None, num_tokens: int = 0) -> None:
        """Enter ``state`` and stamp it. Raises IllegalTransitionError, and changes nothing, without such an edge."""
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"request {self.request_id!r} cannot go from {self.state} to {state}")
        self.state = state
        self.stamps.append(Stamp(now, event or state.value, num_tokens))

    def finish(self, reason: FinishReason, now: float, error: BaseException | None = None) -> None:
        """Enter FINISHED, for good."""
        self.transition(RequestState.FINISHED, now)
        self.finish_reason = reason
        self.error = error

    def append_token(self, token: int) -> None:
        self.output_token_ids.append(token)
        self._tokens.append(token)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, prompt={self.num_prompt_tokens}, "
            f"output={len(self.output_token_ids)}, computed={self.num_computed_tokens})"
        )
