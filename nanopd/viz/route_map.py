"""Route map: which path a policy takes over load and prompt length, and by how much its estimates differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Patch
from numpy.typing import NDArray

from nanopd.errors import ConfigError
from nanopd.router.decision import Path, Policy
from nanopd.router.situation import imagined_request
from nanopd.router.snapshot import Snapshot
from nanopd.viz.style import BLUE, INK, ORANGE, PAPER, axes_for, styled, tint

PATH_COLORS = {Path.COLLOCATED: BLUE, Path.DISAGGREGATED: ORANGE}


@dataclass(frozen=True)
class RouteMap:
    """Decisions of one policy: rows are prompt lengths, columns are loads.

    ``advantage``: (collocated - disaggregated) / the larger, of the estimates' totals: 0.2 says that disaggregating
    saves a fifth. NaN where the policy made no estimates.
    """

    policy: str
    loads: tuple[int, ...]
    prompts: tuple[int, ...]
    disaggregated: NDArray[np.bool_]  # [prompts, loads]
    advantage: NDArray[np.float64]  # [prompts, loads]

    @classmethod
    def of(
        cls,
        policy: Policy,
        at_load: Callable[[int], Snapshot],
        loads: Sequence[int],
        prompts: Sequence[int],
        output_tokens: float = 200.0,
    ) -> RouteMap:
        """Ask ``policy`` at every point. ``at_load``: such as `nanopd.router.situation.Situation.at_load`.

        Raises ConfigError without loads or prompts, and what the policy raises.
        """
        if not loads or not prompts:
            raise ConfigError(f"a map needs loads and prompt lengths, got {len(loads)} and {len(prompts)}")
        situations = [at_load(load) for load in loads]
        taken = np.zeros((len(prompts), len(loads)), dtype=bool)
        advantage = np.full(taken.shape, np.nan)
        for row, prompt in enumerate(prompts):
            request = imagined_request(prompt, output_tokens)
            for column, situation in enumerate(situations):
                decision = policy.decide(request, situation, output_tokens)
                taken[row, column] = decision.path is Path.DISAGGREGATED
                if decision.collocated is not None and decision.disaggregated is not None:
                    costs = decision.collocated.total_ms, decision.disaggregated.total_ms
                    advantage[row, column] = (costs[0] - costs[1]) / max(*costs, 1e-9)
        return cls(policy.name, tuple(loads), tuple(prompts), taken, advantage)

    @property
    def finding(self) -> str:
        """The map in a sentence."""
        share = float(self.disaggregated.mean())
        if share in (0.0, 1.0):
            return f"{self.policy}: always {'disaggregated' if share else 'collocated'} here"
        if (self.disaggregated == self.disaggregated[0]).all():
            columns = self.disaggregated[0]
            if (np.diff(columns.astype(int)) >= 0).all():
                first = self.loads[int(columns.argmax())]
                return f"{self.policy}: disaggregated from load {first} on, whatever the prompt"
            return f"{self.policy}: the load alone decides"
        if (self.disaggregated == self.disaggregated[:, :1]).all():
            return f"{self.policy}: the prompt's length alone decides"
        return f"{self.policy}: disaggregated in {share:.0%} of the map"


def draw_route_map(
    route_map: RouteMap, *, point: tuple[int, int] | None = None, title: str | None = None, ax: Axes | None = None
) -> Axes:
    """Colour: the path; its depth: the estimates' relative difference, on a scale up to its largest absolute value.

    The line is where the decision changes; ``point`` is a (load, prompt) to mark. Without estimates the colours are
    plain. The drawn cells have an equal size each: axes are by index, labelled by value.
    """
    taken = route_map.disaggregated
    depth = np.abs(route_map.advantage)
    known = bool(np.isfinite(depth).any())
    most = float(np.nanmax(depth)) if known else 0.0
    strength = 0.25 + 0.75 * np.nan_to_num(depth) / most if most > 0 else np.full(taken.shape, 0.6)
    with styled():
        ax = axes_for(ax, (8.5, 5))
        ax.grid(False)
        image = ax.pcolormesh(np.where(taken, strength, -strength), cmap=_colours(), vmin=-1, vmax=1)
        image.set_gid("decisions")
        _boundary(ax, taken)
        _ticks(ax.xaxis, route_map.loads)
        _ticks(ax.yaxis, route_map.prompts)
        ax.set_xlabel("load (requests that decode, on each path)")
        ax.set_ylabel("prompt length (tokens)")
        if point is not None:
            place = (_index(route_map.loads, point[0]), _index(route_map.prompts, point[1]))
            (mark,) = ax.plot(
                *([v] for v in place), "o", markersize=11, color=PAPER, markeredgecolor=INK, markeredgewidth=2
            )
            mark.set_gid("point")
        handles = [Patch(color=tint(PATH_COLORS[path], 0.8), label=path.value) for path in Path]
        heading = f"depth: estimates differ by up to {most:.2%}" if known else "the policy made no estimates"
        ax.legend(
            handles=handles, title=heading, loc="lower left", bbox_to_anchor=(0, -0.32), ncols=2, alignment="left"
        )
        ax.set_title(title or route_map.finding)
    return ax


def _colours() -> LinearSegmentedColormap:
    collocated, disaggregated = PATH_COLORS[Path.COLLOCATED], PATH_COLORS[Path.DISAGGREGATED]
    return LinearSegmentedColormap.from_list("paths", [collocated, PAPER, disaggregated])


def _boundary(ax: Axes, taken: NDArray[np.bool_]) -> None:
    """Edges between cells of different paths."""
    segments: list[tuple[list[int], list[int]]] = []
    for row, column in zip(*np.nonzero(taken[:, 1:] != taken[:, :-1])):
        segments.append(([column + 1, column + 1], [row, row + 1]))
    for row, column in zip(*np.nonzero(taken[1:] != taken[:-1])):
        segments.append(([column, column + 1], [row + 1, row + 1]))
    for x, y in segments:
        ax.plot(x, y, color=INK, linewidth=1.6, solid_capstyle="round")


def _ticks(axis: object, values: tuple[int, ...]) -> None:
    step = max(1, -(-len(values) // 9))
    places = range(0, len(values), step)
    axis.set_ticks([i + 0.5 for i in places], [f"{values[i]:,}" for i in places])  # type: ignore[attr-defined]


def _index(values: tuple[int, ...], value: int) -> float:
    """Where ``value`` lies among the cells: their middles are half-integers."""
    return float(np.interp(value, values, np.arange(len(values)))) + 0.5
