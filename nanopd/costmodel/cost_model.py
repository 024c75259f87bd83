"""What both cost models have in common: from a request and the load where it would go, an Estimate for each path."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

from nanopd.costmodel.estimate import Estimate
from nanopd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RequestSize:
    """A request as a cost model sees it, in tokens. ``cached_tokens`` of the prompt need not be computed.

    Raises ConfigError unless 0 <= cached_tokens < prompt_tokens and output_tokens >= 0.
    """

    prompt_tokens: int
    output_tokens: float  # may be a prediction
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ConfigError(
                f"cached_tokens must be in [0, prompt_tokens), got {self.cached_tokens!r} of {self.prompt_tokens!r}"
            )
        if not (math.isfinite(self.output_tokens) and self.output_tokens >= 0):
            raise ConfigError(f"output_tokens must be finite and >= 0, got {self.output_tokens!r}")

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class LoadState:
    """What a path is busy with when the request comes. Raises ConfigError for values below 0 or not finite.

    * ``num_decodes``, ``kv_tokens``: sequences that decode where the request would decode, and the KV that they read.
    * ``waiting_tokens``: prompt tokens to be computed before the request's own, where it would be prefilled.
    * ``link_bytes``: queued on the link that its KV would take.
    """

    num_decodes: float = 0
    kv_tokens: float = 0
    waiting_tokens: float = 0
    link_bytes: float = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name} of a load must be finite and >= 0, got {value!r}")


class CostModel(Protocol):
    """What a request costs on each path, in ms. Pure functions."""

    def collocated(self, request: RequestSize, load: LoadState) -> Estimate:
        """Prefill and decode in one place, which has this load."""
        ...

    def disaggregated(self, request: RequestSize, load: LoadState) -> Estimate:
        """Prefill in one place, then a transfer, then decode in another."""
        ...
