"""Forecast: what becomes of a request at one worker, and of those who are there already, by a step-time model.

A worker's steps are predicted one kind at a time, so everything here is a step's time times a count of steps.
Assumptions, none of which a snapshot can check:

* Prompts are computed first come, first served, in chunks that fill each step's token budget (as the scheduler does).
* Who decodes now goes on decoding; whoever finishes is replaced. So the batch only grows by those who wait, and its KV
  by their prompts and by half of the request's own output.
* As much prefill as waits now will wait while the request decodes (the present load persists), and as many requests
  will queue behind it as queue now.
* Outputs of the others are as long as the request's own, and equally spread over their lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.router.snapshot import WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Place:
    """A worker, the model of its steps, and how many tokens a step may hold (``chunk_size``: of them, prefill).

    ``beside``: the model of its steps while its neighbour on the same card is busy; None: nobody slows it.
    """

    worker: WorkerSnapshot
    model: StepTimeModel
    max_num_batched_tokens: int
    chunk_size: int | None = None
    beside: StepTimeModel | None = None

    @property
    def chunk(self) -> int:
        """Prefill tokens of a full step beside the present decodes."""
        budget = self.max_num_batched_tokens - self.worker.num_running
        return max(1, budget if self.chunk_size is None else min(budget, self.chunk_size))

    @property
    def decodes(self) -> StepFeatures:
        """The decodes that run now."""
        return StepFeatures.decode(self.worker.num_running, self.worker.running_tokens)

    @property
    def present_tokens(self) -> int:
        """Prompt tokens still to compute for those who are here."""
        return self.worker.waiting_tokens

    def prefill_ms(self, tokens: int, mean_prompt: float) -> float:
        """Time of the steps that compute ``tokens`` of prompts of ``mean_prompt`` tokens, decodes in each step.

        All full steps are alike: each has the average number of query-key pairs per token, (mean_prompt + 1) / 2. For
        whole prompts that gives the exact sum, as long as the model is linear in the pairs.
        """
        full, rest = divmod(tokens, self.chunk)
        total = full * self._mixed_ms(self.chunk, mean_prompt) if full else 0.0
        return total + (self._mixed_ms(rest, mean_prompt) if rest else 0.0)

    def interference_ms(self, tokens: int, mean_prompt: float) -> float:
        """How much later each running decode gets its token because of these prompt tokens."""
        if not self.worker.num_running:
            return 0.0
        return self.prefill_ms(tokens, mean_prompt) - math.ceil(tokens / self.chunk) * self.model.step_ms(self.decodes)

    def loss_beside(self, step: StepFeatures) -> float:
        """The share of time that steps like this one lose while the neighbour is busy."""
        if self.beside is None or not step.num_tokens:
            return 0.0
        return max(0.0, 1.0 - self.model.step_ms(step) / self.beside.step_ms(step))

    def _mixed_ms(self, tokens: int, mean_prompt: float) -> float:
        now = self.decodes
        return self.model.step_ms(
            StepFeatures(
                prefill_tokens=tokens,
                prefill_pairs=tokens * (mean_prompt + 1) / 2,
                num_prefills=max(1, round(tokens / max(mean_prompt, 1.0))),
                num_decodes=now.num_decodes,
                kv_tokens=now.kv_tokens,
            )
        )


@dataclass(frozen=True, slots=True)
class PrefillForecast:
    """Until the first token, in ms. ``behind``: requests whose first token the prefill delays."""

    in_flight: float  # the rest of the step that runs now
    queue: float  # prompts ahead
    prefill: float  # the request's own steps
    interference: float  # by which these delay each decode that runs in the same steps, or beside them
    behind: int

    @property
    def before_ms(self) -> float:
        return self.in_flight + self.queue


def forecast_prefill(place: Place, tokens: int, now: float, ahead_tokens: int = 0, behind: int = 0) -> PrefillForecast:
    """Prefill ``tokens`` at ``place``, behind those who wait here and ``ahead_tokens`` that are to come here first.

    The step in flight has taken its chunk already. The last step of the queue has room left, which the request fills.
    """
    worker, chunk = place.worker, place.chunk
    ahead, in_flight = place.present_tokens, 0.0
    mean_ahead = ahead / max(worker.num_waiting, 1)
    if worker.step_started is not None:
        taken = min(chunk, ahead)
        step = place.prefill_ms(taken, mean_ahead) if taken else place.model.step_ms(place.decodes)
        in_flight = max(0.0, step - max(0.0, now - worker.step_started) * 1e3)
        ahead -= taken
    ahead += ahead_tokens
    shared = ahead % chunk
    own = place.prefill_ms(shared + tokens, (shared * mean_ahead + tokens * tokens) / (shared + tokens))
    queue = place.prefill_ms(ahead - shared, mean_ahead or tokens)
    return PrefillForecast(in_flight, queue, own, place.interference_ms(tokens, tokens), worker.num_waiting + behind)


@dataclass(frozen=True, slots=True)
class DecodeForecast:
    """After the first token, in ms a step, for ``others`` that decode here and the request that joins them."""

    steps: float  # of the request: output tokens less the first
    others: int
    alone_ms: float  # a step without the request
    step_ms: float  # a step with it
    mixing_ms: float  # in all: by the prompts that are computed in the same steps, or beside them

    @property
    def decoding_ms(self) -> float:
        """From the first token to the last if nothing disturbs."""
        return self.step_ms * self.steps

    @property
    def slower_ms(self) -> float:
        """By which the request's presence delays each other sequence, per step."""
        return self.step_ms - self.alone_ms if self.others else 0.0


def forecast_decode(place: Place, prompt_tokens: int, output_tokens: float, arriving: int = 0) -> DecodeForecast:
    """Join the decodes at ``place``, with those who wait here (as far as there are seats) and ``arriving`` others."""
    worker = place.worker
    steps = max(0.0, output_tokens - 1)
    others = worker.num_running + min(worker.num_waiting, max(worker.free_seats - 1, 0)) + arriving
    kv = worker.running_tokens + place.present_tokens
    alone = StepFeatures.decode(others, kv)
    joined = StepFeatures.decode(others + 1, kv + prompt_tokens + steps / 2)
    step = place.model.step_ms(joined)
    mixed = place.present_tokens / place.chunk  # steps with a full chunk
    mixing = 0.0
    if mixed and steps:
        length = round(min(place.chunk, place.present_tokens))
        mixing = min(steps, max(mixed, 1.0)) * place.model.interference_ms(joined.with_chunk(length))
    return DecodeForecast(steps, others, place.model.step_ms(alone) if others else 0.0, step, mixing)


def admission_wait_ms(place: Place, prompt_tokens: int, output_tokens: float, ahead: int, ahead_tokens: int) -> float:
    """Until there are a seat and blocks for the request and for ``ahead`` others, who get theirs first.

    Seats and blocks come back when decodes finish: with B of them, each after O steps, every O / B steps.
    """
    worker = place.worker
    seats = ahead + 1 - worker.free_seats
    blocks = -(-(prompt_tokens + 1 + ahead_tokens) // worker.block_size) - worker.free_blocks
    if max(seats, blocks) <= 0 or not worker.num_running:
        return 0.0
    held = max((worker.total_blocks - worker.free_blocks) / worker.num_running, 1.0)
    endings = max(seats, math.ceil(blocks / held), 0)
    return endings * output_tokens / worker.num_running * place.model.step_ms(place.decodes)
