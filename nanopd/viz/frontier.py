"""What a device's prefill costs its decodes: chunked steps, SM partitions and plain streams in one picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from nanopd.errors import ConfigError
from nanopd.viz.style import ALERT_COLOR, BLUE, GREEN, GREY, INK, axes_for, styled

_KINDS = (  # of points: name in the record, colour, marker, what the labels of its points are
    ("chunked", BLUE, "o", "chunked prefill, tokens per step"),
    ("split", GREEN, "s", "split device, decode/prefill"),
    ("streams", ALERT_COLOR, "X", "two streams, no partition"),
)


def draw_frontier(state: Mapping[str, Any], name: str = "", *, ax: Axes | None = None) -> Axes:
    """Prefill throughput against time per output token for one decode state; up and to the left is better.

    A thin line runs from each point to its 99th percentile.

    Args:
        state: one of the "states" of ``nanopd.workers.frontier.measure_frontier``.
        name: its name there, such as "b64_ctx8192".

    Raises ConfigError if nothing was measured but decodes alone.
    """
    kinds = [kind for kind in _KINDS if state[kind[0]]]
    if not kinds:
        raise ConfigError(f"the state {name or 'given'} holds no point with prefill")
    with styled():
        ax = axes_for(ax, (7.5, 5))
        alone = state["alone"]["mean_ms"]
        ax.axvline(alone, color=GREY, linestyle=":", linewidth=1.4).set_gid("alone")
        ax.annotate(
            f"decodes alone\n{alone:.3g} ms", (alone, 0.01), (5, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="bottom", color=GREY,
        )  # fmt: skip
        for kind, color, marker, label in kinds:
            _curve(ax, kind, state[kind], color, marker, label)
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("time per output token: mean, thin line to its 99th percentile (ms)")
        ax.set_ylabel("prefill throughput (tokens/ms)")
        ax.set_title(f"{describe_state(name)}{finding(state)}")
        ax.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")
    return ax


def draw_frontiers(results: Mapping[str, Any]) -> list[Axes]:
    """``draw_frontier`` for every state of ``results``, side by side in one figure."""
    import matplotlib.pyplot as plt

    states = results["states"]
    with styled():
        figure, grid = plt.subplots(1, len(states), figsize=(6.6 * len(states), 5), layout="constrained", squeeze=False)
        figure.suptitle(f"{results['model']}, prompts of {results['prompt_tokens']:,} tokens", color=INK)
    return [draw_frontier(state, name, ax=ax) for (name, state), ax in zip(states.items(), grid[0], strict=True)]


def describe_state(name: str) -> str:
    """ "b64_ctx8192" in words; any other name as it is."""
    match = re.fullmatch(r"b(\d+)_ctx(\d+)", name)
    return f"{match[1]} decodes, {int(match[2]):,} tokens of context:\n" if match else (f"{name}:\n" if name else "")


def finding(state: Mapping[str, Any]) -> str:
    """Who wins, in the words of a title: the best split against chunks that make decodes wait as long."""
    ratios = state["at_equal_tpot"]
    if not ratios:
        return "prefill against waiting decodes"
    best = max(ratios, key=ratios.__getitem__)
    ratio = ratios[best]
    return f"{best} prefills {ratio:.2f}× chunking" if ratio >= 1 else f"chunking prefills {1 / ratio:.2f}× {best}"


def _curve(ax: Axes, kind: str, points: Mapping[str, Mapping[str, float]], color: str, marker: str, label: str) -> None:
    ordered = sorted(points.items(), key=lambda item: item[1]["mean_ms"])
    x = [point["mean_ms"] for _, point in ordered]
    y = [point["prefill_tokens_per_ms"] for _, point in ordered]
    (line,) = ax.plot(x, y, marker=marker, markersize=8, color=color, label=label)
    line.set_gid(kind)
    for name, point in ordered:
        height = point["prefill_tokens_per_ms"]
        ax.plot([point["mean_ms"], point["p99_ms"]], [height, height], color=color, linewidth=0.8, alpha=0.7)
        above = kind != "chunked"  # the split's curve usually runs above the chunked one
        ax.annotate(
            name, (point["mean_ms"], height), (0, 8 if above else -8), textcoords="offset points",
            ha="right" if above else "left", va="bottom" if above else "top", color=color, fontsize=9,
        )  # fmt: skip
