"""What the engine hands back: texts, tokens, and metrics computed from a request's stamps and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nanopd.engine.request import FinishReason, Request, Stamp


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds of the engine's clock. None: it never came to that.

    For n > 1 samples: the earliest start and first token, the latest end, the mean of the samples' TPOTs, and all gaps.
    """

    arrival_time: float  # when the client wanted to send it, so that queueing outside of the engine counts
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache when the request was first scheduled
    num_preemptions: int
    tpot: float | None  # (last token - first token) / (tokens - 1); None with fewer than two tokens
    second_token_gap: float | None  # second token - first token: where a P/D transfer shows
    itls: tuple[float, ...] = ()  # gaps between successive tokens, sample after sample

    @property
    def ttft(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def queue_time(self) -> float | None:
        """Arrival to first scheduled."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Arrival to end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    @classmethod
    def from_stamps(cls, samples: Sequence[Sequence[Stamp]]) -> RequestMetrics:
        """``samples``: the stamps of each of a request's n sequences, at least one."""
        tokens = [[s.time for s in stamps if s.event == "token"] for stamps in samples]
        starts = [s for stamps in samples for s in stamps if s.event in ("prefilling", "transferring")]
        ends = [s.time for stamps in samples for s in stamps if s.event == "finished"]
        tpots = [(t[-1] - t[0]) / (len(t) - 1) for t in tokens if len(t) > 1]
        first = min(starts, key=lambda s: s.time, default=None)
        return cls(
            arrival_time=min(s.time for stamps in samples for s in stamps if s.event == "arrived"),
            first_scheduled_time=first.time if first else None,
            first_token_time=min((t[0] for t in tokens if t), default=None),
            last_token_time=max((t[-1] for t in tokens if t), default=None),
            finished_time=max(ends) if len(ends) == len(samples) else None,
            num_output_tokens=sum(map(len, tokens)),
            num_cached_tokens=first.num_tokens if first else 0,
            num_preemptions=sum(s.event == "preempted" for stamps in samples for s in stamps),
            tpot=sum(tpots) / len(tpots) if tpots else None,
            second_token_gap=max((t[1] - t[0] for t in tokens if len(t) > 1), default=None),
            itls=tuple(b - a for t in tokens for a, b in pairwise(t)),
        )

    @classmethod
    def of(cls, sequences: Sequence[Request]) -> RequestMetrics:
        return cls.from_stamps([request.stamps for request in sequences])


@dataclass
class CompletionOutput:
    """One sample. ``token_ids`` holds every token sampled, also the one that stopped it; ``text`` leaves that out."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None while it goes on; equals "stop", "length", "aborted" or "failed"


@dataclass
class RequestOutput:
    """A request's outputs so far, or all of them when ``finished``. Its own copy: it does not change any more."""

    request_id: str
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None  # once finished
    error: BaseException | None = None  # why a sample has finish_reason "failed"
