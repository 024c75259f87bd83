"""Roofline of a device, and where prefill and decode of a model lie on it.

Williams, Waterman and Patterson, "Roofline", CACM 2009: with I operations per byte moved, a device reaches at most
min(peak rate, I * bandwidth). Work here is counted, not measured: weights are read once per step, KV once per token
attended to, activations are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes

from nanopd.errors import ConfigError
from nanopd.viz.style import DECODE_COLOR, GREY, INK, PALETTE, PREFILL_COLOR, axes_for, styled


class ModelShape(Protocol):
    """The counts that decide work (`nanopd.model.ModelConfig` has them)."""

    @property
    def num_step_parameters(self) -> int: ...
    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int: ...
    def flops_per_token(self, context_len: int = 0, *, logits: bool = True) -> int: ...


@dataclass(frozen=True)
class Work:
    """What one step must do at least."""

    flops: float  # multiply and add count as two
    num_bytes: float  # moved from and to memory

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.num_bytes

    def seconds(self, copy_gb_s: float, matmul_tflop_s: float) -> float:
        """Least time on a device that moves ``copy_gb_s`` GB/s and computes ``matmul_tflop_s`` TFLOP/s."""
        return max(self.num_bytes / (copy_gb_s * 1e9), self.flops / (matmul_tflop_s * 1e12))

    def is_memory_bound(self, copy_gb_s: float, matmul_tflop_s: float) -> bool:
        return self.intensity < ridge(copy_gb_s, matmul_tflop_s)


@dataclass(frozen=True)
class RooflinePoint:
    """A labelled point. Without a measured rate it is drawn on the roof, hollow: the most that is possible."""

    label: str
    intensity: float  # operations per byte
    tflop_s: float | None = None  # measured
    color: str | None = None


def decode_work(config: ModelShape, batch: int, context: int, dtype_bytes: int = 2) -> Work:
    """One decode step: ``batch`` sequences, each attending to ``context`` tokens (the new one included)."""
    flops = batch * config.flops_per_token(context)
    kv = batch * (context + 1) * config.kv_bytes_per_token(dtype_bytes)  # read all, write one
    return Work(flops, config.num_step_parameters * dtype_bytes + kv)


def prefill_work(config: ModelShape, prompt: int, batch: int = 1, dtype_bytes: int = 2) -> Work:
    """One step that computes ``batch`` whole prompts of ``prompt`` tokens, with logits for the last token only."""
    per_token = config.flops_per_token(0, logits=False)
    per_attended = config.flops_per_token(1, logits=False) - per_token
    logits = config.flops_per_token(0) - per_token
    flops = batch * (prompt * per_token + per_attended * prompt * (prompt + 1) / 2 + logits)
    kv = batch * 2 * prompt * config.kv_bytes_per_token(dtype_bytes)  # written once, read once
    return Work(flops, config.num_step_parameters * dtype_bytes + kv)


def ridge(copy_gb_s: float, matmul_tflop_s: float) -> float:
    """Operations per byte at which the two limits are equal."""
    return matmul_tflop_s * 1e3 / copy_gb_s


def attainable(intensity: float, copy_gb_s: float, matmul_tflop_s: float) -> float:
    """The roof above ``intensity``, in TFLOP/s."""
    return min(matmul_tflop_s, intensity * copy_gb_s / 1e3)


def draw_roofline(
    copy_gb_s: float,
    matmul_tflop_s: float,
    points: Sequence[RooflinePoint] = (),
    *,
    span: tuple[float, float] | None = None,
    device: str = "",
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the roof given by a copy bandwidth in GB/s and a matrix-product rate in TFLOP/s, and ``points`` under it.

    ``span`` widens the intensity axis to reach from its first to its second value, so that pictures compare.

    Raises ConfigError if a ceiling or an intensity is not positive.
    """
    if min(copy_gb_s, matmul_tflop_s, *(point.intensity for point in points)) <= 0:
        raise ConfigError("bandwidth, rate and intensities must be positive")
    knee = ridge(copy_gb_s, matmul_tflop_s)
    intensities = [*(point.intensity for point in points), *(span or ())]
    low = min([knee / 300, *(value / 3 for value in intensities)])
    high = max([knee * 30, *(value * 5 for value in intensities)])
    rates = [attainable(low, copy_gb_s, matmul_tflop_s), *(p.tflop_s for p in points if p.tflop_s)]
    with styled():
        ax = axes_for(ax, (8.5, 5))
        x = np.array([low, knee, high])
        (roof,) = ax.loglog(x, [attainable(v, copy_gb_s, matmul_tflop_s) for v in x], color=INK)
        roof.set_gid("roof")
        ax.axvspan(low, knee, color=DECODE_COLOR, alpha=0.06, linewidth=0)
        ax.axvspan(knee, high, color=PREFILL_COLOR, alpha=0.08, linewidth=0)
        ax.minorticks_off()  # they say nothing here, and cost half of the drawing time
        ax.set_xlim(low, high)
        ax.set_ylim(min(rates) / 2, matmul_tflop_s * 3.5)
        _limits(ax, copy_gb_s, matmul_tflop_s, low, high)
        for point, color in zip(points, PALETTE * (1 + len(points) // len(PALETTE)), strict=False):
            _point(ax, point, copy_gb_s, matmul_tflop_s, point.color or color)
        ax.set_xlabel("arithmetic intensity (FLOP per byte moved)")
        ax.set_ylabel(f"rate{f' on {device}' if device else ''} (TFLOP/s)")
        if points:
            ax.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")
        if title:
            ax.set_title(title)
    return ax


def _limits(ax: Axes, copy_gb_s: float, matmul_tflop_s: float, low: float, high: float) -> None:
    knee = ridge(copy_gb_s, matmul_tflop_s)
    ax.plot([knee, knee], [0, matmul_tflop_s], color=GREY, linestyle=":", linewidth=1.2)
    ax.annotate(
        f"ridge: {_short(knee)} FLOP/byte", (knee, matmul_tflop_s), (0, 8), textcoords="offset points", ha="center"
    )
    for x, side, text in (
        (low, "left", f"memory-bound: {_short(copy_gb_s)} GB/s"),
        (high, "right", f"compute-bound: {_short(matmul_tflop_s)} TFLOP/s"),
    ):
        shift = 8 if side == "left" else -8
        ax.annotate(text, (x, 0.97), (shift, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                    ha=side, va="top", color=GREY, weight="bold")  # fmt: skip


def _point(ax: Axes, point: RooflinePoint, copy_gb_s: float, matmul_tflop_s: float, color: str) -> None:
    most = attainable(point.intensity, copy_gb_s, matmul_tflop_s)
    if point.tflop_s is None:
        label, y, face = f"{point.label}: at most {_short(most)} TFLOP/s", most, "white"
    else:
        share = point.tflop_s / most
        label, y, face = (
            f"{point.label}: {_short(point.tflop_s)} TFLOP/s, {share:.0%} of the roof",
            point.tflop_s,
            color,
        )
        ax.plot([point.intensity] * 2, [y, most], color=color, linestyle=":", linewidth=1.2)
    (line,) = ax.plot(
        [point.intensity], [y], "o", markersize=10, color=color, markerfacecolor=face, markeredgewidth=2.2, label=label
    )
    line.set_gid(f"point {point.label}")


def _short(value: float) -> str:
    """Three significant digits, thousands separated."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
