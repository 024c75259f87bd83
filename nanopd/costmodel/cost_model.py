"""What both cost models have in common: from a request and the load where it would go, an Estimate for each path."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

from nanopd.costmodel.checks import check_count, check_number
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
        check_count("prompt_tokens", self.prompt_tokens, least=1)
        check_count("cached_tokens", self.cached_tokens)
        if self.cached_tokens >= self.prompt_tokens:
            raise ConfigError(
                f"cached_tokens must be in [0, prompt_tokens), got {self.cached_tokens!r} of {self.prompt_tokens!r}"
            )
        check_number("output_tokens", self.output_tokens)

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
            check_number(f"{field.name} of a load", getattr(self, field.name))


class CostModel(Protocol):
    """What a request costs on each path, in ms. Pure functions."""

    def collocated(self, request: RequestSize, load: LoadState) -> Estimate:
        """Prefill and decode in one place, which has this load."""
        ...

    def disaggregated(self, request: RequestSize, load: LoadState) -> Estimate:
        """Prefill in one place, then a transfer, then decode in another."""
        ...
