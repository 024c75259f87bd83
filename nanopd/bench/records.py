"""What became of each request of a run: raw records, from which every number and picture is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any

from nanopd.bench.workload import Arrival
from nanopd.costmodel.checks import check_count, check_number, shown
from nanopd.engine.outputs import RequestOutput
from nanopd.engine.request import FinishReason
from nanopd.errors import ConfigError, ReportError


class Outcome(StrEnum):
    """How a request ended; all but the first are drops."""

    COMPLETED = "completed"
    REFUSED = "refused"  # the target raised instead of taking it
    TIMED_OUT = "timed out"  # the client gave up
    FAILED = "failed"  # the target gave up
    UNFINISHED = "unfinished"  # the run ended first


DROPS = tuple(outcome for outcome in Outcome if outcome is not Outcome.COMPLETED)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of a run. All times count from its *scheduled* arrival, in seconds.

    So a wait before a late send is part of its latency: without that a slow target would slow its own load down, and
    look fast (coordinated omission; Tene, "How NOT to Measure Latency").
    """

    index: int
    time_s: float  # scheduled arrival after the start of the run
    prompt_tokens: int
    output_tokens: int  # asked for
    outcome: Outcome
    reason: str = ""  # of a drop
    lateness_s: float | None = None  # sent that much after the scheduled arrival; None: never sent
    ttft_s: float | None = None
    tpot_s: float | None = None  # (last - first token) / (tokens - 1); None with fewer than two tokens
    second_token_gap_s: float | None = None  # where a P/D transfer shows
    e2e_s: float | None = None
    itls_s: tuple[float, ...] = ()  # gaps between tokens: as the client saw them if it streamed, else as stamped
    tokens: int = 0  # received
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    preemptions: int = 0

    def to_json(self) -> dict[str, Any]:
        """Without what is at its default, latencies to the microsecond."""
        defaults = {f.name: f.default for f in fields(self)}
        plain = {name: _rounded(value) for name, value in asdict(self).items() if value != defaults[name]}
        return plain | {"time_s": self.time_s}  # exactly: it decides who belongs to the warm-up

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> RequestRecord:
        """Raises ReportError for what ``to_json`` did not write."""
        try:
            values = {**row, "outcome": Outcome(row["outcome"]), "itls_s": tuple(row.get("itls_s", ()))}
            record = cls(**values)
            record._check()
            return record
        except (KeyError, ValueError, TypeError) as error:
            known = ", ".join(f.name for f in fields(cls))
            raise ReportError(f"not a request record ({error}); its fields are {known}: {row!r:.200}") from error

    def _check(self) -> None:
        """Raises ConfigError for what no run writes."""
        for name in ("index", "prompt_tokens", "output_tokens", "tokens", "cached_tokens", "preemptions"):
            check_count(name, getattr(self, name))
        check_number("time_s", self.time_s)
        for name in ("lateness_s", "ttft_s", "tpot_s", "second_token_gap_s", "e2e_s"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, least=-math.inf)
        for gap in self.itls_s:
            check_number("a gap of itls_s", gap, least=-math.inf)
        if not isinstance(self.reason, str):
            raise ConfigError(f"reason must be a text, got {shown(self.reason)}")


def finished_record(
    arrival: Arrival,
    output: RequestOutput,
    *,
    lateness_s: float | None = None,
    timeout_s: float | None = None,
    aborted_as: tuple[Outcome, str] | None = None,
    token_times_s: Sequence[float] = (),
) -> RequestRecord:
    """The record of a request whose last output has come.

    Args:
        timeout_s: a request that took longer has timed out, also if its last output just won the race.
        aborted_as: outcome and reason if the client has aborted it.
        token_times_s: when the client saw each token, if it streamed; else the target's own stamps are used.
    """
    metrics = output.metrics
    times: dict[str, Any] = (
        {}
        if metrics is None
        else {
            "ttft_s": metrics.ttft,
            "tpot_s": metrics.tpot,
            "second_token_gap_s": metrics.second_token_gap,
            "e2e_s": metrics.latency,
            "tokens": metrics.num_output_tokens,
            "cached_tokens": metrics.num_cached_tokens,
            "preemptions": metrics.num_preemptions,
        }
    )
    gaps = tuple(b - a for a, b in pairwise(token_times_s)) or (metrics.itls if metrics else ())
    outcome, reason = _outcome(output, timeout_s, aborted_as)
    return RequestRecord(
        arrival.index,
        arrival.time_s,
        arrival.prompt_tokens,
        arrival.output_tokens,
        outcome,
        reason,
        lateness_s,
        itls_s=gaps,
        **times,
    )


def dropped_record(
    arrival: Arrival, outcome: Outcome, reason: str, lateness_s: float | None = None, tokens: int = 0
) -> RequestRecord:
    """The record of a request that has no last output."""
    return RequestRecord(
        arrival.index,
        arrival.time_s,
        arrival.prompt_tokens,
        arrival.output_tokens,
        outcome,
        reason,
        lateness_s,
        tokens=tokens,
    )


def _outcome(
    output: RequestOutput, timeout_s: float | None, aborted_as: tuple[Outcome, str] | None
) -> tuple[Outcome, str]:
    reasons = {sample.finish_reason for sample in output.outputs}
    if output.error is not None or FinishReason.FAILED in reasons:
        return Outcome.FAILED, f"{type(output.error).__name__}: {output.error}" if output.error else "failed"
    if FinishReason.ABORTED in reasons or None in reasons:
        return aborted_as or (Outcome.FAILED, "aborted by the target")
    latency = output.metrics.latency if output.metrics else None
    if latency is None:
        return Outcome.FAILED, "finished without metrics"
    if timeout_s is not None and latency > timeout_s:
        return Outcome.TIMED_OUT, f"took {latency:.3g} s, limit {timeout_s:g} s"
    return Outcome.COMPLETED, ""


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return [_rounded(item) for item in value] if isinstance(value, tuple) else value
