"""One look for all pictures: readable sizes, colours that colour-blind readers can tell apart, quiet axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe & Ito, "Color Universal Design" (2008): distinct with every common form of colour blindness.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
)
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW)
INK, GREY, LIGHT, PAPER = "#222222", "#8A8A8A", "#DDDDDD", "#FFFFFF"

# The same colour for the same thing in every picture of the course.
PHASE_COLORS: Mapping[str, str] = MappingProxyType(
    {"waiting": "#C4C4C4", "prefilling": ORANGE, "transferring": PURPLE, "running": BLUE}
)
PREFILL_COLOR, DECODE_COLOR, ALERT_COLOR = ORANGE, BLUE, VERMILLION

RC: Mapping[str, Any] = MappingProxyType(
    {
        "axes.edgecolor": GREY,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.labelcolor": INK,
        "axes.labelsize": 12,
        "axes.prop_cycle": cycler(color=PALETTE),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 13,
        "axes.titleweight": "bold",
        "figure.dpi": 100,
        "figure.facecolor": PAPER,
        "font.family": "DejaVu Sans",  # ships with Matplotlib: the same picture on every machine
        "font.size": 11,
        "grid.color": "#E6E6E6",
        "hatch.linewidth": 0.6,
        "legend.fontsize": 10,
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "text.color": INK,
        "xtick.color": INK,
        "xtick.labelsize": 11,
        "ytick.color": INK,
        "ytick.labelsize": 11,
    }
)


@contextmanager
def styled() -> Iterator[None]:
    """``with styled(): ...`` draws in this style and leaves the caller's Matplotlib settings alone.

    Not ``matplotlib.rc_context``: in a notebook the first figure switches the backend and turns interactive mode on,
    and undoing that at the end of the block would hide every later figure.
    """
    before = {name: matplotlib.rcParams[name] for name in RC}
    matplotlib.rcParams.update(RC)
    try:
        yield
    finally:
        matplotlib.rcParams.update(before)


def axes_for(ax: Axes | None, figsize: tuple[float, float]) -> Axes:
    """``ax``, or the axes of a new pyplot figure (which a notebook shows by itself at the end of the cell)."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=figsize, layout="constrained")[1]


def bare_figure(width: float, height: float) -> Figure:
    """A figure in inches that pyplot does not know of: whoever made it shows it, and nobody has to close it."""
    return Figure(figsize=(width, height), layout="constrained")


def hide_axes(ax: Axes) -> None:
    """For drawings that have no coordinates to read off."""
    ax.grid(False)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)


def tint(color: str, share: float) -> tuple[float, float, float]:
    """``share`` of ``color`` mixed with white."""
    r, g, b = matplotlib.colors.to_rgb(color)
    return (1 - share + share * r, 1 - share + share * g, 1 - share + share * b)
