"""What several workers did at the same time: a row per worker, a box per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from nanopd.viz.style import DECODE_COLOR, PAPER, PREFILL_COLOR, axes_for, styled
from nanopd.viz.timeline import StepLike

BAR = 0.7  # height of a step's box, in rows


def draw_worker_steps(
    steps: Mapping[str, Sequence[StepLike]],
    *,
    origin: float | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One row per worker; each step is a box as wide as it took, in the colour of what it computed.

    A step that mixes prefill and decodes has both colours, the decodes' below. Time is in ms since ``origin`` (seconds
    of the steps' clock; default: the start of the first step).

    Args:
        steps: worker name -> its step records (``on_step`` of a ``Server`` is called with both).
    """
    records = [step for row in steps.values() for step in row]
    if origin is None:
        origin = min((step.start for step in records), default=0.0)
    with styled():
        ax = axes_for(ax, (10, 1.2 + 0.55 * max(len(steps), 1)))
        for row, (name, of_worker) in enumerate(steps.items()):
            for number, step in enumerate(of_worker):
                _box(ax, row, step, origin, f"{name} step {number}")
        end = max((step.end for step in records), default=origin)
        ax.set_xlim(0, max((end - origin) * 1e3, 1e-9) * 1.01)
        ax.set_ylim(max(len(steps), 1) - 0.5, -0.5)
        ax.set_yticks(range(len(steps)), list(steps))
        ax.set_xlabel("time (ms)")
        ax.set_ylabel("worker")
        ax.grid(False, axis="y")
        handles = [Patch(color=PREFILL_COLOR, label="prefill"), Patch(color=DECODE_COLOR, label="decode")]
        ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1.0), ncols=2)
        if title:
            ax.set_title(title, pad=30)  # above the legend
    return ax


def _box(ax: Axes, row: int, step: StepLike, origin: float, gid: str) -> None:
    colors = [
        color
        for color, count in ((PREFILL_COLOR, step.plan.num_prefill_tokens), (DECODE_COLOR, step.plan.num_decodes))
        if count
    ]
    left, width = (step.start - origin) * 1e3, (step.end - step.start) * 1e3
    for part, color in enumerate(colors):
        height = BAR / len(colors)
        box = Rectangle((left, row - BAR / 2 + part * height), width, height, facecolor=color, gid=gid)
        box.set(edgecolor=PAPER, linewidth=0.4)
        ax.add_patch(box)
