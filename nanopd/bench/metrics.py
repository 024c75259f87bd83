"""From records to numbers: counters that add up, percentiles that say what they cover, attainment, goodput.

Definitions (DistServe, Zhong et al., OSDI 2024, arXiv:2401.09670, for attainment and goodput):

* TTFT: scheduled arrival to first token. TPOT: (last - first token) / (tokens - 1). E2E: scheduled arrival to the end.
* Attainment: share of the *offered* requests that completed and met TTFT and TPOT together. A drop misses its SLO.
* Goodput: the highest rate per GPU with attainment of at least 90 % (`nanopd.bench.goodput` searches it).
* Percentiles: of completed requests, by linear interpolation between order statistics (NumPy's default).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nanopd.bench.records import DROPS, Outcome, RequestRecord
from nanopd.costmodel.checks import check_count, check_number, is_number, shown
from nanopd.errors import ConfigError, CounterError, ReportError


@dataclass(frozen=True, slots=True)
class SLO:
    """What a request must meet, in seconds. None: no limit.

    Raises ConfigError for limits that are not positive and finite.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if limit is not None:
                check_number(f"{name} of an SLO", limit, above=0.0, unit="seconds")

    def met_by(self, record: RequestRecord) -> bool:
        """Both limits together. A request of one token has no TPOT and cannot miss it."""
        if record.outcome is not Outcome.COMPLETED:
            return False
        if self.ttft_s is not None and (record.ttft_s is None or record.ttft_s > self.ttft_s):
            return False
        return self.tpot_s is None or record.tpot_s is None or record.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Counters:
    """Requests by what became of them. Raises CounterError unless offered = completed + dropped by reason."""

    offered: int
    completed: int
    dropped: Mapping[str, int]  # by the outcomes that are drops, all of them, zeros too

    def __post_init__(self) -> None:
        parts = [self.completed, *self.dropped.values()]
        if min(parts) < 0 or sum(parts) != self.offered:
            raise CounterError(f"{self.offered} offered, but {self.completed} completed and dropped {self.dropped}")

    @classmethod
    def of(cls, records: Iterable[RequestRecord], offered: int) -> Counters:
        """``offered`` comes from the schedule, not from the records: a lost record must show."""
        counts = Counter(record.outcome for record in records)
        return cls(offered, counts[Outcome.COMPLETED], {drop.value: counts[drop] for drop in DROPS})

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of ``count`` values from ``requests`` requests; None where there are no values."""

    count: int
    requests: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float], requests: int | None = None) -> Percentiles:
        ordered = sorted(values)
        if not ordered:
            return cls(0, 0)
        mean = math.fsum(ordered) / len(ordered)
        p50, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
        return cls(len(ordered), len(ordered) if requests is None else requests, mean, p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Times in seconds, rates per second. Only requests of the measured window count."""

    offered_rate: float  # requests per second that were scheduled in the window
    window_s: float  # the window of scheduled arrivals: after the warm-up, to the end of the schedule
    span_s: float  # from the start of the window to its end or, if later, to the last measured completion
    num_gpus: int
    counters: Counters
    slo: SLO
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    second_token_gap: Percentiles
    e2e: Percentiles
    lateness: Percentiles  # of the sends, drops included
    attained: int  # requests that met the SLO
    request_throughput: float  # completed requests per second of the span
    token_throughput: float  # output tokens of completed requests per second of the span
    input_throughput: float  # prompt tokens of completed requests per second of the span
    cached_share: float  # of the prompt tokens of completed requests: found in a prefix cache
    preemptions: int

    @property
    def offered(self) -> int:
        return self.counters.offered

    @property
    def attainment(self) -> float:
        """Share of the offered requests that met the SLO; 0 if none was offered."""
        return self.attained / self.offered if self.offered else 0.0

    @property
    def attained_rate_per_gpu(self) -> float:
        """Requests within their SLO per second and GPU."""
        return self.attained / self.window_s / self.num_gpus

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "attainment": self.attainment, "attained_rate_per_gpu": self.attained_rate_per_gpu}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Summary:
        """Raises ReportError for what ``to_json`` did not write."""
        parts = {"counters": Counters, "slo": SLO}
        parts |= dict.fromkeys(("ttft", "tpot", "itl", "second_token_gap", "e2e", "lateness"), Percentiles)
        try:
            plain = {k: v for k, v in row.items() if k not in ("attainment", "attained_rate_per_gpu")}
            made = cls(**{k: parts[k](**v) if k in parts else v for k, v in plain.items()})
            for name, value in asdict(made).items():
                _check_numbers(name, value)
            return made
        except (TypeError, AttributeError, ConfigError) as error:
            raise ReportError(f"not a summary: {error}") from error


def _check_numbers(name: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is a number, or None inside of a table of numbers."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner is not None:
                _check_numbers(f"{name}.{key}", inner)
    else:
        check_number(name, value, least=-math.inf)


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile of ascending values, interpolated linearly. Raises ConfigError without values."""
    if not ordered or not (is_number(q) and 0 <= q <= 100):
        raise ConfigError(f"a percentile needs values and q in [0, 100], got {len(ordered)} values and {shown(q)}")
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(
    records: Sequence[RequestRecord],
    slo: SLO,
    *,
    offered: int,
    duration_s: float,
    warmup_s: float = 0.0,
    num_gpus: int = 1,
) -> Summary:
    """Numbers of a run whose schedule lasted ``duration_s``; requests scheduled before ``warmup_s`` do not count.

    ``offered``: arrivals of the schedule at or after ``warmup_s``.

    Raises:
        CounterError: the measured records are not ``offered`` many, or one is there twice.
        ConfigError: the warm-up leaves no window, or there is no GPU.
    """
    check_number("duration_s", duration_s, above=0.0, unit="seconds")
    check_number("warmup_s", warmup_s, unit="seconds")
    check_count("offered", offered)
    check_count("num_gpus", num_gpus, least=1)
    if warmup_s >= duration_s:
        raise ConfigError(
            f"the warm-up must be at least 0 s and end before the {duration_s:g} s are over: {warmup_s:g}"
        )
    measured = [r for r in records if r.time_s >= warmup_s]
    if len({r.index for r in measured}) != len(measured):
        raise CounterError(f"{len(measured)} records of {len({r.index for r in measured})} requests")
    done = [r for r in measured if r.outcome is Outcome.COMPLETED]
    window_s = duration_s - warmup_s
    last = max((r.time_s + r.e2e_s for r in done if r.e2e_s is not None), default=0.0)
    span_s = max(duration_s, last) - warmup_s
    prompt_tokens = sum(r.prompt_tokens for r in done)
    return Summary(
        offered_rate=offered / window_s,
        window_s=window_s,
        span_s=span_s,
        num_gpus=num_gpus,
        counters=Counters.of(measured, offered),
        slo=slo,
        ttft=_values(r.ttft_s for r in done),
        tpot=_values(r.tpot_s for r in done),
        itl=Percentiles.of((gap for r in done for gap in r.itls_s), sum(bool(r.itls_s) for r in done)),
        second_token_gap=_values(r.second_token_gap_s for r in done),
        e2e=_values(r.e2e_s for r in done),
        lateness=_values(r.lateness_s for r in measured),
        attained=sum(map(slo.met_by, done)),
        request_throughput=len(done) / span_s,
        token_throughput=sum(r.tokens for r in done) / span_s,
        input_throughput=prompt_tokens / span_s,
        cached_share=sum(r.cached_tokens for r in done) / prompt_tokens if prompt_tokens else 0.0,
        preemptions=sum(r.preemptions for r in measured),
    )


def _values(values: Iterable[float | None]) -> Percentiles:
    return Percentiles.of(value for value in values if value is not None)
