"""Pictures of a hardware profile: is the step-time model right, what is a step's time made of, and where α, β, γ come
from. All drawn from the profile's raw points, never from the model against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from nanopd.costmodel.analytical_fit import fit_alpha, fit_beta, fit_gamma
from nanopd.costmodel.features import StepFeatures, StepPoint
from nanopd.costmodel.hardware_profile import WHOLE, HardwareProfile
from nanopd.costmodel.step_time import TERMS, StepTimeModel
from nanopd.errors import ConfigError
from nanopd.viz.style import ALERT_COLOR, DECODE_COLOR, GREY, INK, PALETTE, PREFILL_COLOR, axes_for, styled

# Text about each kind of step, and its colour: decode and prefill have theirs in every picture of the course.
MIXED_COLOR = PALETTE[3]


@dataclass(frozen=True)
class LabelledStep:
    """A step to take apart, and what to call it below its bar."""

    label: str
    features: StepFeatures


def draw_predictions(
    profile: HardwareProfile, place: str = WHOLE, *, held_out_only: bool = False, ax: Axes | None = None
) -> Axes:
    """Measured against predicted time of each step: held-out points filled, fitted ones hollow, a band of ±10 %.

    Raises ConfigError if the profile has no model or no points of ``place``.
    """
    model = profile.step_model(place)
    points = [p for p in _points(profile, place) if p.held_out or not held_out_only]
    judged = [p for p in points if p.held_out] or points
    errors = [abs(model.step_ms(p.features) / p.ms - 1) for p in judged]
    with styled():
        ax = axes_for(ax, (7, 5.5))
        low = min(min(p.ms, model.step_ms(p.features)) for p in points) / 1.3
        high = max(max(p.ms, model.step_ms(p.features)) for p in points) * 1.3
        line = np.array([low, high])
        ax.fill_between(line, line * 0.9, line * 1.1, color=GREY, alpha=0.2, linewidth=0, label="within 10 %")
        ax.plot(line, line, color=INK, linewidth=1)
        for name, color, chosen in _by_phase(points):
            for held_out in (False, True):
                group = [p for p in chosen if p.held_out == held_out]
                if group:
                    (marks,) = ax.plot(
                        [p.ms for p in group],
                        [model.step_ms(p.features) for p in group],
                        "o",
                        color=color,
                        markerfacecolor=color if held_out else "none",
                        markersize=6,
                        label=f"{name}, {'held out' if held_out else 'fitted to'}",
                    )
                    marks.set_gid(f"{name} {'held out' if held_out else 'fitted'}")
        ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        for axis in (ax.xaxis, ax.yaxis):
            _plain_numbers(axis)
        ax.set_xlabel("measured step time (ms)")
        ax.set_ylabel("predicted step time (ms)")
        where = "unseen" if judged[0].held_out else "fitted"
        ax.set_title(f"Off by {np.median(errors):.1%} in the median on {len(judged)} {where} steps")
        ax.legend(loc="upper left", fontsize=9)
    return ax


def draw_step_terms(model: StepTimeModel, steps: Sequence[LabelledStep], *, ax: Axes | None = None) -> Axes:
    """What each step's time is made of: one bar a step, one colour a term.

    Raises ConfigError without steps.
    """
    if not steps:
        raise ConfigError("no step to draw: at least 1 is needed")
    parts = [model.terms(step.features) for step in steps]
    totals = [sum(part.values()) for part in parts]
    with styled():
        ax = axes_for(ax, (8, 0.9 + 0.55 * len(steps) + 1.2))
        rows, left = np.arange(len(steps)), np.zeros(len(steps))
        for term, color in zip(TERMS, PALETTE, strict=True):
            widths = np.array([part[term] for part in parts])
            if widths.any():
                bars = ax.barh(rows, widths, left=left, color=color, edgecolor="white", label=term, height=0.7)
                for bar in bars:
                    bar.set_gid(term)
                left += widths
        for row, total in zip(rows, totals):
            ax.annotate(f"{total:.3g} ms", (total, row), (5, 0), textcoords="offset points", va="center")
        ax.set_yticks(rows, [step.label for step in steps])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlim(0, max(totals) * 1.15)
        ax.set_xlabel("predicted time (ms)")
        dearest = int(np.argmax(totals))
        term = max(parts[dearest], key=lambda name: parts[dearest][name])
        share = parts[dearest][term] / totals[dearest] if totals[dearest] else 0.0
        ax.set_title(f"{steps[dearest].label}: {term} are {share:.0%} of {totals[dearest]:.3g} ms")
        ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.18 - 0.2 / len(steps)), ncols=3, fontsize=9)
    return ax


def draw_analytical_fits(profile: HardwareProfile, place: str = WHOLE, *, figure: Figure | None = None) -> Figure:
    """The three regressions behind α, β with B*, and γ, over the points that they were fitted to.

    Raises ConfigError without points, FitError if they do not suffice.
    """
    points = _points(profile, place)
    if figure is None:
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=(13, 4), layout="constrained")
    with styled():
        left, middle, right = figure.subplots(1, 3)
        _draw_alpha(left, points)
        _draw_beta(middle, points)
        _draw_gamma(right, points)
    return figure


# --- inside ------------------------------------------------------------------------------------------------------


def _draw_alpha(ax: Axes, points: Sequence[StepPoint]) -> None:
    fit = fit_alpha(points)
    chosen = [p for p in points if p.kind == "prefill" and not p.held_out]
    lengths = np.array([p.features.prefill_tokens for p in chosen])
    ax.plot(lengths, [p.ms for p in chosen], "o", color=PREFILL_COLOR, label="measured")
    ends = np.array([0, lengths.max()])
    line = fit.intercept_ms + fit.alpha_ms_per_token * ends
    label = f"{fit.intercept_ms:.3g} ms + {fit.alpha_ms_per_token:.3g} ms per token"
    ax.plot(ends, line, color=INK, linewidth=1.5, label=label)
    ax.set(xlabel="prompt length (tokens)", ylabel="prefill (ms)", ylim=(0, None))
    ax.set_title(f"α = {fit.alpha_ms_per_token:.3g} ms/token{_r2(fit.quality.r2)}")
    ax.legend()


def _draw_beta(ax: Axes, points: Sequence[StepPoint]) -> None:
    fit = fit_beta(points)
    chosen = [p for p in points if p.kind == "decode" and not p.held_out]
    batch = np.array([p.features.num_decodes for p in chosen])
    context = np.array([p.features.kv_tokens / max(p.features.num_decodes, 1) for p in chosen])
    marks = ax.scatter(batch, [p.ms for p in chosen], c=context, cmap="viridis", norm="log", zorder=3)
    bar = ax.figure.colorbar(marks, ax=ax)
    bar.set_label("context (tokens)")
    x = np.geomspace(1, batch.max(), 50)
    ax.plot(x, fit.beta_ms * np.maximum(1, x / fit.batch_thresh), color=INK, linewidth=1.5, label="β·max(1, b/B*)")
    ax.set(xlabel="decode batch (sequences)", ylabel="decode step (ms)", xscale="log", ylim=(0, None))
    _plain_numbers(ax.xaxis)
    ax.set_title(f"β = {fit.beta_ms:.3g} ms, B* = {fit.batch_thresh:.3g}: off by {fit.quality.median_error:.0%}")
    ax.legend(loc="upper left")


def _draw_gamma(ax: Axes, points: Sequence[StepPoint]) -> None:
    fit = fit_gamma(points)
    tokens, delays = zip(*fit.pairs)
    ax.plot(tokens, delays, "o", color=ALERT_COLOR, label="mixed step less the decodes alone")
    ends = np.array([0, max(tokens)])
    ax.plot(ends, fit.gamma_ms_per_token * ends, color=INK, linewidth=1.5, label="γ · tokens")
    ax.set(xlabel="prompt tokens in the step", ylabel="decodes delayed by (ms)")
    ax.set_title(f"γ = {fit.gamma_ms_per_token:.3g} ms/token{_r2(fit.quality.r2)}")
    ax.legend()


def _plain_numbers(axis: Axis) -> None:
    """1, 2, 5, 10, … instead of powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter("")


def _r2(value: float | None) -> str:
    return "" if value is None else f" (R² = {value:.2f})"


def _points(profile: HardwareProfile, place: str) -> list[StepPoint]:
    points = [point for point in profile.points if point.place == place]
    if not points:
        places = sorted({point.place for point in profile.points})
        raise ConfigError(f"the profile of {profile.device} has no points of {place!r}; it has {places}")
    return points


def _by_phase(points: Sequence[StepPoint]) -> list[tuple[str, str, list[StepPoint]]]:
    groups: dict[str, list[StepPoint]] = {"decode": [], "prefill": [], "mixed": []}
    for point in points:
        f = point.features
        groups["mixed" if f.num_decodes and f.num_prefills else "prefill" if f.num_prefills else "decode"].append(point)
    colors = {"decode": DECODE_COLOR, "prefill": PREFILL_COLOR, "mixed": MIXED_COLOR}
    return [(name, colors[name], chosen) for name, chosen in groups.items()]
