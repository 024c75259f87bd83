"""Beam search: keep the ``width`` likeliest beginnings, extend them all by one token per step.

Beams are sequences of the engine like any other, and what they have in common they share: a beam with several
successors forks its block table, one without successors frees it, and only a block that two beams would write
differently is copied (copy on write, before the step that writes).

Which beams live and which are returned follows transformers' ``generate(num_beams=width, do_sample=False)`` with its
default ``early_stopping=False``:

* Each step ranks all (beam, token) continuations by summed log-probability. Among the first ``width``, those that end
  (end-of-sequence token, or length limit) are finished; the ``width`` best that do not end live on.
* A finished sequence of n generated tokens, its end token included, scores ``sum of log-probabilities / n **
  length_penalty`` (Wu et al. 2016, without their constant); the ``width`` best are kept.
* The search stops when ``width`` sequences are finished and the best living beam, scored at its present length, does
  not beat the worst of them. For ``length_penalty > 0`` that is a heuristic: the beam might yet rise by growing longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanopd.engine.plan import ScheduledChunk, StepPlan
from nanopd.engine.request import FinishReason, Request
from nanopd.engine.sampling_params import SamplingParams, check_float, check_int, token_ids_tuple
from nanopd.errors import EmptyPromptError, InvalidSamplingParamsError, NonFiniteLogitsError
from nanopd.kv.block_manager import BlockManager

_MAX_LOG_LENGTH = 700.0  # e**700 is still a float, with room for the log-probability that it divides


class LogitsRunner(Protocol):
    """The part of ``ModelRunner`` that beam search drives."""

    def logits(self, plan: StepPlan) -> Tensor: ...  # [R, vocab], a row per chunk with samplers


@dataclass
class BeamOutput:
    """A finished sequence."""

    token_ids: list[int]  # generated tokens, the end token included
    cumulative_logprob: float  # natural logarithm
    score: float  # cumulative_logprob / len(token_ids) ** length_penalty
    finish_reason: FinishReason  # STOP: an end token; LENGTH: max_tokens
    text: str = ""  # filled in by whoever has a tokenizer


@dataclass
class _Candidate:
    """A beam and a token that might follow it."""

    parent: int  # index of a living beam
    token: int
    logprob: float  # of the whole sequence


class BeamSearch:
    """One search over one prompt. Takes its blocks from the pool and gives every one of them back, whatever happens.

    It may run between the steps of an engine that uses the same pool; it does not preempt that engine's requests.
    """

    def __init__(
        self,
        runner: LogitsRunner,
        block_manager: BlockManager,
        *,
        width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        end_token_ids: Iterable[int] = (),
        chunk_size: int = 2048,
    ) -> None:
        """``chunk_size``: prompt tokens per step.

        Raises InvalidSamplingParamsError if ``width``, ``max_tokens`` or ``chunk_size`` is no int of at least 1,
        ``length_penalty`` so large that a score cannot be computed, or an end token no token id.
        """
        for name, value in (("beam_width", width), ("max_tokens", max_tokens), ("chunk_size", chunk_size)):
            check_int(name, value, 1)
        check_float("length_penalty", length_penalty, low=-math.inf)
        if abs(length_penalty) * math.log(max_tokens) > _MAX_LOG_LENGTH:
            raise InvalidSamplingParamsError(
                f"length_penalty {length_penalty} is too far from 0: {max_tokens} tokens to its power are no float"
            )
        self._runner = runner
        self._manager = block_manager
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._end_tokens = frozenset(token_ids_tuple(end_token_ids, "end_token_ids"))
        self._chunk_size = chunk_size
        self._beams: list[Request] = []  # the living; each has a table
        self._logprobs: list[float] = []  # of the living

    def run(self, prompt_token_ids: Sequence[int]) -> list[BeamOutput]:
        """The ``width`` best finished sequences, best first; fewer only if the vocabulary does not offer as many.

        Raises EmptyPromptError, and OutOfBlocksError if the pool cannot hold the beams.
        """
        if not prompt_token_ids:
            raise EmptyPromptError("beam search needs a prompt of at least one token")
        finished: list[BeamOutput] = []
        try:
            logits = self._prefill(prompt_token_ids)
            for length in range(1, self._max_tokens + 1):
                candidates = self._rank(logits)
                ended, alive = self._split(candidates, length)
                finished = self._best([*finished, *ended])
                if not alive or self._hopeless(alive[0], finished, length):
                    break
                logits = self._advance(alive)
        finally:
            for beam in self._beams:
                self._release(beam)
            self._beams, self._logprobs = [], []
            self._manager.copies_done()  # of a step that failed half-way
        return finished

    # --- choosing ----------------------------------------------------------------------------------------------

    def _rank(self, logits: Tensor) -> list[_Candidate]:
        """The likeliest continuations of all beams, best first: enough that ``width`` of them do not end."""
        scores = torch.log_softmax(logits.float(), dim=-1)
        scores = scores + torch.tensor(self._logprobs, device=scores.device)[:, None]
        vocab = scores.shape[1]
        count = min(self._width * max(2, 1 + len(self._end_tokens)), scores.numel())
        top = torch.topk(scores.flatten(), count)  # NaN ranks above everything, so it shows in the first value
        values, indices = top.values.tolist(), top.indices.tolist()
        if math.isnan(values[0]):
            raise NonFiniteLogitsError("beam search met logits without a finite maximum")
        ranked = [_Candidate(index // vocab, index % vocab, value) for value, index in zip(values, indices)]
        return [candidate for candidate in ranked if candidate.logprob > -math.inf]

    def _split(self, candidates: list[_Candidate], length: int) -> tuple[list[BeamOutput], list[_Candidate]]:
        """Into sequences that end at this length and those that live on."""
        ended: list[BeamOutput] = []
        alive: list[_Candidate] = []
        for rank, candidate in enumerate(candidates):
            reason = self._finish_reason(candidate.token, length)
            if reason is None:
                if len(alive) < self._width:
                    alive.append(candidate)
            elif rank < self._width:
                tokens = [*self._beams[candidate.parent].output_token_ids, candidate.token]
                score = candidate.logprob / length**self._length_penalty
                ended.append(BeamOutput(tokens, candidate.logprob, score, reason))
        return ended, alive

    def _finish_reason(self, token: int, length: int) -> FinishReason | None:
        if token in self._end_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if length == self._max_tokens else None

    def _best(self, finished: list[BeamOutput]) -> list[BeamOutput]:
        return sorted(finished, key=lambda output: output.score, reverse=True)[: self._width]

    def _hopeless(self, best: _Candidate, finished: list[BeamOutput], length: int) -> bool:
        """Whether no living beam, scored as if it ended here, would enter the full list of finished ones."""
        return len(finished) == self._width and best.logprob / length**self._length_penalty <= finished[-1].score

    # --- computing ---------------------------------------------------------------------------------------------

    def _prefill(self, prompt_token_ids: Sequence[int]) -> Tensor:
        """Compute the prompt in chunks. Returns the last token's logits [1, vocab]."""
        root = Request("beam", prompt_token_ids, SamplingParams(temperature=0.0, max_tokens=self._max_tokens))
        root.table = self._manager.match_prefix(root.prompt_token_ids)
        self._beams, self._logprobs = [root], [0.0]
        start = root.table.num_tokens
        while True:
            n = min(self._chunk_size, root.num_tokens - start)
            last = start + n == root.num_tokens
            copies = self._manager.append_slots(root.table, n)
            logits = self._runner.logits(
                StepPlan([ScheduledChunk(root, start, n, (root,) if last else ())], copies=copies)
            )
            self._manager.commit(root.table, root.all_token_ids[start : start + n])
            if last:
                return logits
            start += n

    def _advance(self, alive: list[_Candidate]) -> Tensor:
        """Make the chosen continuations the living beams and compute them. Returns logits [len(alive), vocab]."""
        self._beams = self._successors(alive)
        self._logprobs = [candidate.logprob for candidate in alive]
        chunks, copies = [], []
        for beam in self._beams:
            assert beam.table is not None
            copies += self._manager.append_slots(beam.table, 1)
            chunks.append(ScheduledChunk(beam, beam.num_tokens - 1, 1, (beam,)))
        logits = self._runner.logits(StepPlan(chunks, num_decodes=len(chunks), copies=copies))
        for beam in self._beams:
            assert beam.table is not None
            self._manager.commit(beam.table, beam.all_token_ids[-1:])
        return logits

    def _successors(self, alive: list[_Candidate]) -> list[Request]:
        """One beam per candidate, with a fork of its parent's table; the parents' own tables are freed.

        An only successor thus ends up the sole owner of its blocks, and nothing will be copied for it.
        """
        parents, self._beams = self._beams, list(self._beams)
        for candidate in alive:
            parent = parents[candidate.parent]
            assert parent.table is not None
            child = Request("beam", parent.prompt_token_ids, parent.params)
            for token in (*parent.output_token_ids, candidate.token):
                child.append_token(token)
            child.table = self._manager.fork(parent.table)
            self._beams.append(child)  # at once, so that it is released if the next fork fails
        for parent in parents:
            self._release(parent)
        return self._beams[len(parents) :]

    def _release(self, beam: Request) -> None:
        if beam.table is not None:
            self._manager.free(beam.table)
            beam.table = None
