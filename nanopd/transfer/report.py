"""LinkReport: which way a link goes, how fast it was when it was probed, and what else was tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What probing found."""

    path: str
    gb_s: float | None  # 1e9 bytes per second from source to destination; None: nothing has to move
    backward_gb_s: float | None  # from destination to source, over the same kind of path
    latency_s: float  # what a transfer takes, until the host knows, beyond its bytes over the bandwidth
    verified: bool  # random bytes arrived unchanged, both ways, and nothing else was written
    points: tuple[tuple[int, float], ...] = ()  # (bytes, seconds by the link's clock) forward
    tried: tuple[tuple[str, str], ...] = ()  # paths that come before this one, and why not

    def __str__(self) -> str:
        rate = "nothing moves" if self.gb_s is None else f"{self.gb_s:.1f} GB/s, {self.latency_s * 1e6:.0f} µs"
        refused = "".join(f"; not {path}: {why}" for path, why in self.tried)
        return f"{self.path} ({rate}{refused})"
