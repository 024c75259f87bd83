"""What the time of a step depends on: a handful of counts, read off the scheduler's plan. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from nanopd.costmodel.checks import check_number, shown
from nanopd.engine.plan import StepPlan
from nanopd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """One step's work.

    * ``prefill_tokens``: prompt tokens computed, of all chunks.
    * ``prefill_pairs``: query-key pairs of their attention. A chunk of n tokens behind ``start`` others has
      n · (start + (n + 1) / 2) of them; this is where a prompt's cost grows with its square.
    * ``num_prefills``: chunks.
    * ``num_decodes``: sequences that decode, one token each.
    * ``kv_tokens``: tokens of context that the decodes read, all together.

    Raises ConfigError for a value that is negative, not finite or no number.
    """

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    num_prefills: int = 0
    num_decodes: int = 0
    kv_tokens: float = 0

    def __post_init__(self) -> None:
        try:  # the simulator makes one of every step: one sum and one minimum tell, names only if something is wrong
            total = self.prefill_tokens + self.prefill_pairs + self.num_prefills + self.num_decodes + self.kv_tokens
            least = min(self.prefill_tokens, self.prefill_pairs, self.num_prefills, self.num_decodes, self.kv_tokens)
            if least >= 0 and math.isfinite(total):
                return
        except (TypeError, OverflowError):
            pass
        for field in fields(self):
            check_number(f"{field.name} of a step", getattr(self, field.name))
        raise ConfigError(f"the counts of a step must be finite and >= 0, and so must their sum, got {self}")

    @classmethod
    def of(cls, plan: StepPlan) -> StepFeatures:
        """The counts of a scheduler's plan."""
        prefills = plan.chunks[plan.num_decodes :]
        return cls(
            prefill_tokens=sum(chunk.num_tokens for chunk in prefills),
            prefill_pairs=sum(chunk_pairs(chunk.num_tokens, chunk.start) for chunk in prefills),
            num_prefills=len(prefills),
            num_decodes=plan.num_decodes,
            kv_tokens=sum(chunk.start + 1 for chunk in plan.chunks[: plan.num_decodes]),
        )

    @classmethod
    def decode(cls, num_decodes: int, kv_tokens: float) -> StepFeatures:
        """A step that only decodes; ``kv_tokens`` over all sequences."""
        return cls(num_decodes=num_decodes, kv_tokens=kv_tokens)

    def with_chunk(self, num_tokens: int, start: int = 0) -> StepFeatures:
        """The same step with one more prefill chunk: ``num_tokens`` tokens behind ``start`` computed ones."""
        return replace(
            self,
            prefill_tokens=self.prefill_tokens + num_tokens,
            prefill_pairs=self.prefill_pairs + chunk_pairs(num_tokens, start),
            num_prefills=self.num_prefills + 1,
        )

    @property
    def num_tokens(self) -> int:
        """Rows of the linear layers."""
        return self.prefill_tokens + self.num_decodes

    @property
    def chunk_context(self) -> float:
        """Context tokens that a chunk attends to on average over its queries, summed over the chunks.

        Exact for one chunk; several chunks are taken to be alike.
        """
        return self.num_prefills * self.prefill_pairs / self.prefill_tokens if self.prefill_tokens else 0.0

    @property
    def decodes_only(self) -> StepFeatures:
        """The step without its prefill chunks."""
        return StepFeatures.decode(self.num_decodes, self.kv_tokens)


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured step.

    ``kind`` says what it was measured for: "prefill", "decode", "mixed" (systematic) or "random". ``held_out`` points
    are never fitted to. Raises ConfigError for a time that is not positive and finite, and for fields of another kind.
    """

    features: StepFeatures
    ms: float
    kind: str = "random"
    place: str = "whole device"
    held_out: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.features, StepFeatures):
            raise ConfigError(f"features of a measured step must be StepFeatures, got {shown(self.features)}")
        check_number("the time of a measured step", self.ms, above=0.0, unit="ms")
        for name in ("kind", "place"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} of a measured step must be a text, got {shown(getattr(self, name))}")
        if not isinstance(self.held_out, bool):
            raise ConfigError(f"held_out of a measured step must be True or False, got {shown(self.held_out)}")


def chunk_pairs(num_tokens: int, start: int = 0) -> float:
    """Query-key pairs of the causal attention of ``num_tokens`` tokens that follow ``start`` others."""
    return num_tokens * (start + (num_tokens + 1) / 2)
