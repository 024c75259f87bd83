"""SimulatedLink: when KV that leaves now, or while a step computes it, will have arrived. Bandwidth, latency, queueing.

A `Lane` serves one transfer after the other at its bandwidth. A link has a lane of its own, and may share another one,
the bus, with other links; its transfers pass through both at once, and the slower decides.

A handoff that is streamed leaves layer by layer: layer i of L can leave once the step is i/L through. Its end is known
when the step has ended, since the last layer's bytes cannot leave before.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanopd.costmodel.checks import check_count, check_number, is_number, shown
from nanopd.errors import ConfigError
from nanopd.transfer.handoff import Handoff


class Lane:
    """First in, first out, at ``gb_s`` · 1e9 bytes per second. Raises ConfigError unless that is > 0 and finite."""

    def __init__(self, gb_s: float) -> None:
        if not is_number(gb_s) or gb_s <= 0:
            raise ConfigError(f"the bandwidth of a simulated link must be above 0 GB/s and finite, got {shown(gb_s)}")
        self.gb_s = float(gb_s)
        self.free_at = 0.0
        self.busy_s = 0.0

    def pass_through(self, sizes: Sequence[float], first: float, last: float, num_layers: int) -> list[float]:
        """When each of several transfers, begun together, has passed.

        Args:
            sizes: bytes of each. The transfers share the lane layer by layer: all first layers, all second ones, …
            first, last: when the first and the last of ``num_layers`` layers can leave; those between evenly so.

        Layers are pieces of equal size that are ready at equal intervals, so either the lane is never idle after the
        first one, or the last one passes as soon as it is ready: the pipeline ends at the later of the two.
        """
        rate = self.gb_s * 1e9
        total = sum(sizes) / rate
        end = max(max(self.free_at, first) + total, max(self.free_at, last) + total / num_layers)
        self.free_at = end
        self.busy_s += total
        passed, behind = [], total
        for size in sizes:
            behind -= size / rate
            passed.append(end - behind / num_layers)  # only last layers still wait behind a last layer
        return passed


class SimulatedLink:
    """One direction between two workers.

    Args:
        gb_s: 1e9 bytes per second.
        bytes_per_block: of KV; whole blocks move, as on the real links.
        num_layers: of the model, for handoffs that are streamed.
        latency_s: delays each transfer and does not occupy the link.
        bus: a lane shared with other links, such as the one PCIe root of a host.

    Raises ConfigError for a bandwidth that is not above 0, or a latency below 0.
    """

    def __init__(
        self, gb_s: float, bytes_per_block: float, num_layers: int = 1, latency_s: float = 0.0, bus: Lane | None = None
    ) -> None:
        check_number("latency_s of a simulated link", latency_s, unit="seconds")
        check_number("bytes_per_block of a simulated link", bytes_per_block, above=0.0)
        check_count("num_layers of a simulated link", num_layers, least=1)
        self.lane, self.bus = Lane(gb_s), bus
        self.bytes_per_block, self.num_layers, self.latency_s = bytes_per_block, num_layers, latency_s
        self.stalled = False  # set it, and what is sent from then on never arrives

    @property
    def path(self) -> str:
        return f"simulated({self.lane.gb_s:g} GB/s)"

    def send(self, handoff: Handoff, now: float) -> float | None:
        """When a handoff that is ready ``now`` arrives; None: never."""
        return self._arrivals([handoff], now, now, 1)[0]

    def stream(self, handoffs: Sequence[Handoff], start: float, end: float) -> list[float | None]:
        """When the handoffs arrive that were sent layer by layer during a step from ``start`` to ``end``."""
        first = start + (end - start) / self.num_layers
        return self._arrivals(handoffs, first, end, self.num_layers)

    def _arrivals(self, handoffs: Sequence[Handoff], first: float, last: float, num_layers: int) -> list[float | None]:
        if self.stalled:
            return [None] * len(handoffs)
        sizes = [handoff.num_blocks * self.bytes_per_block for handoff in handoffs]
        passed = self.lane.pass_through(sizes, first, last, num_layers)
        if self.bus is not None:
            passed = list(map(max, passed, self.bus.pass_through(sizes, first, last, num_layers)))
        return [time + self.latency_s for time in passed]
