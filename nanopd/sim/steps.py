"""Steps under way, and how workers that share a card slow each other down.

A step is a certain amount of work. Alone it takes ``alone_s``, beside a busy neighbour ``beside_s``; when the neighbour
starts or stops half-way, the rest goes on at the other pace. Before that the host plans and launches it for ``host_s``,
in which the worker is busy and its card is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanopd.router.central import WorkerStep


@dataclass(eq=False, slots=True)
class FlyingStep:
    """A step under way."""

    step: WorkerStep
    alone_s: float
    beside_s: float
    host_s: float = 0.0
    end: list[Any] = field(default_factory=list)  # its event
    beside: bool = False  # whether a neighbour is busy now
    left: float = 1.0  # share of the work that was still to be done at ``since``
    since: float = 0.0

    launched: bool = field(init=False)  # whether it is on the card

    def __post_init__(self) -> None:
        self.since = self.step.start + self.host_s
        self.launched = self.host_s == 0

    @property
    def due(self) -> float:
        """When it ends if nothing changes."""
        return self.since + self.left * (self.beside_s if self.beside else self.alone_s)

    def change_pace(self, now: float) -> None:
        """From now on the other pace."""
        pace = self.beside_s if self.beside else self.alone_s
        elapsed = max(0.0, now - self.since)
        self.left = max(0.0, self.left - elapsed / pace) if pace > 0 else 0.0
        self.since, self.beside = max(self.since, now), not self.beside


class Neighbours:
    """Which workers share a card. ``cards``: the names of those on each; a worker alone on its card needs no entry."""

    def __init__(self, cards: Iterable[Collection[str]]) -> None:
        groups = [tuple(card) for card in cards if len(card) > 1]
        self._others = {name: [other for other in card if other != name] for card in groups for name in card}

    def changed(self, flying: Mapping[str, FlyingStep]) -> list[str]:
        """Workers in a step beside which somebody has started or stopped computing."""
        return [
            name
            for name, others in self._others.items()
            if name in flying
            and flying[name].beside != any(other in flying and flying[other].launched for other in others)
        ]
