"""LayerTimeline: when each layer computes and when its KV travels. Measured, or predicted exactly. No torch.

Layer i's KV may leave once layer i is computed, and the link carries one layer after the other:

    computed(i) = computed(i - 1) + compute(i)
    arrived(i)  = max(computed(i), arrived(i - 1)) + bytes / rate        streamed
    arrived(i)  = max(computed(L - 1), arrived(i - 1)) + bytes / rate    not streamed

plus a latency once. So streaming hides all of the transfer but the last layer's, if a layer travels faster than it
computes; otherwise all but the sum of what it takes longer. It cannot hide more than there is computing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanopd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """Milliseconds since the first layer began."""

    begin: float
    end: float

    @property
    def ms(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class LayerTimeline:
    """One prefill and its transfer. ``transfer`` has an entry per piece: per layer, if streamed layer by layer."""

    compute: tuple[Span, ...]
    transfer: tuple[Span, ...]
    streamed: bool
    latency_ms: float = 0.0  # after the last piece

    @property
    def compute_ms(self) -> float:
        return self.compute[-1].end

    @property
    def transfer_ms(self) -> float:
        """Time in which bytes move. Gaps in which the link waits do not count; pieces side by side count once."""
        moving, end = [], -math.inf
        for span in sorted(self.transfer, key=lambda span: span.begin):
            moving.append(max(0.0, span.end - max(span.begin, end)))
            end = max(end, span.end)
        return math.fsum(moving) + self.latency_ms

    @property
    def total_ms(self) -> float:
        """Until the decode side can begin."""
        return max([self.compute_ms, *(span.end + self.latency_ms for span in self.transfer)])

    @property
    def exposed_ms(self) -> float:
        """What the transfer adds to the prefill."""
        return self.total_ms - self.compute_ms

    @property
    def hidden_share(self) -> float:
        return hidden_share(self.compute_ms, self.transfer_ms, self.total_ms)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a record; spans as [begin, end]."""
        spans = {name: [[s.begin, s.end] for s in getattr(self, name)] for name in ("compute", "transfer")}
        return {**spans, "streamed": self.streamed, "latency_ms": self.latency_ms}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> LayerTimeline:
        """What ``as_dict`` returned. Raises ConfigError if it is something else."""
        try:
            compute, transfer = (tuple(Span(begin, end) for begin, end in record[n]) for n in ("compute", "transfer"))
            return cls(compute, transfer, record["streamed"], record["latency_ms"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no record of a timeline ({type(error).__name__}: {error})") from error


def hidden_share(prefill_ms: float, transfer_ms: float, together_ms: float) -> float:
    """Part of a transfer that costs no time beside the prefill: 1 - (together - prefill) / transfer.

    1: all hidden; 0: as slow as one after the other; negative: they disturb each other by more than overlap saves.
    """
    return 1.0 if transfer_ms == 0 else 1 - (together_ms - prefill_ms) / transfer_ms


def overlap_timeline(
    compute_ms: Sequence[float],
    layer_bytes: int,
    gb_s: float,
    *,
    latency_ms: float = 0.0,
    streamed: bool = True,
) -> LayerTimeline:
    """What the recurrence above predicts.

    Args:
        compute_ms: of each layer.
        layer_bytes: KV of the handoff in one layer.
        gb_s: of the link, 1e9 bytes per second.
        latency_ms: once, at the end.

    Raises ConfigError without layers, for times or bytes below 0, or a bandwidth that is not above 0.
    """
    if not compute_ms or min(compute_ms) < 0 or layer_bytes < 0 or latency_ms < 0 or not gb_s > 0:
        raise ConfigError(
            "a timeline needs at least one layer, times and bytes of at least 0 and a bandwidth above 0, got"
            f" {list(compute_ms)} ms, {layer_bytes} bytes, {gb_s} GB/s, {latency_ms} ms latency"
        )
    compute, now = [], 0.0
    for ms in compute_ms:
        compute.append(Span(now, now + ms))
        now += ms
    transfer, free = [], 0.0
    for span in compute:
        begin = max(span.end if streamed else now, free)
        free = begin + layer_bytes / gb_s / 1e6
        transfer.append(Span(begin, free))
    return LayerTimeline(tuple(compute), tuple(transfer), streamed, latency_ms)
