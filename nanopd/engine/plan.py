"""What a step is: the scheduler's plan and its limits. The runner and the simulator read it; nobody else writes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanopd.engine.request import Request
from nanopd.errors import ConfigError

MOST_SEQS = 1 << 16  # buffers are allocated for so many: more is a slip of the pen, and would be a MemoryError


@dataclass(slots=True)
class ScheduledChunk:
    """Tokens ``[start, start + num_tokens)`` of one request, to be computed in this step.

    Their slots are reserved in ``request.table``; everything before ``start`` is computed. ``samplers`` are the
    requests that take a token from the chunk's last logits row: ``()`` mid-prompt, ``(request,)`` normally, up to
    ``n`` of them when siblings fork at the end of the prefill.
    """

    request: Request
    start: int
    num_tokens: int
    samplers: tuple[Request, ...]


@dataclass(slots=True)
class StepPlan:
    """One step: first ``num_decodes`` chunks of one token each, then prefill chunks.

    ``copies`` are physical (source, destination) block copies to run before the step stores anything; destinations
    are distinct and none is also a source, so they may run in any order. ``preempted`` lost their blocks just now.
    ``steady``: nobody waits or is in the middle of a prefill, so the next step will likely decode the same requests.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    num_decodes: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    steady: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks[self.num_decodes :])


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    * ``max_num_seqs``: requests prefilling or running at once.
    * ``max_num_batched_tokens``: tokens per step, decodes and prefill together. At least ``max_num_seqs``, so that
      decodes can never crowd out the prefill for good.
    * ``chunk_size``: prefill tokens per step; ``None`` means as many as the budget leaves.
    * ``max_model_len``: prompt and output together.

    Raises ConfigError.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunk_size: int | None = None
    max_model_len: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "chunk_size", "max_model_len"):
            value = getattr(self, name)
            if name == "chunk_size" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an int >= 1, got {value!r:.60}")
        if self.max_num_seqs > MOST_SEQS:  # a budget of tokens without limit is capped by the pool; seats are not
            raise ConfigError(f"max_num_seqs must be at most {MOST_SEQS:,}, got {self.max_num_seqs!r:.60}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): raise the budget or lower max_num_seqs"
            )
