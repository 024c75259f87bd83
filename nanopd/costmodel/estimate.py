"""Estimate: what a request is expected to cost on one path, term by term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nanopd.costmodel.checks import is_number, shown
from nanopd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Estimate:
    """Named terms in milliseconds. Their sum is what a policy compares; their names are what it can explain.

    Raises ConfigError for a term that is no finite number.
    """

    terms: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, value in self.terms.items():
            if not is_number(value):
                raise ConfigError(f"term {name!r} of an estimate must be a finite number of ms, got {shown(value)}")
        object.__setattr__(self, "terms", MappingProxyType(dict(self.terms)))

    @property
    def total_ms(self) -> float:
        return sum(self.terms.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {value:.4g}" for name, value in self.terms.items())
        return f"{self.total_ms:.4g} ms" + (f" = {parts}" if parts else "")
