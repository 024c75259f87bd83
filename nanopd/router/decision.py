"""Decision: which path a request takes, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from nanopd.costmodel.estimate import Estimate
from nanopd.engine.request import Request
from nanopd.router.snapshot import Snapshot


class Path(StrEnum):
    COLLOCATED = "collocated"
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True)
class Decision:
    """A path, both estimates where the policy made them, and the reason in a sentence."""

    path: Path
    reason: str
    collocated: Estimate | None = None
    disaggregated: Estimate | None = None
    predicted_output: float | None = None  # tokens


class Policy(Protocol):
    """A pure function of the request and the snapshot: the same arguments give the same decision."""

    name: str

    def decide(self, request: Request, snapshot: Snapshot, predicted_output: float | None = None) -> Decision: ...
