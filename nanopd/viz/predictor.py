"""Pictures of the output-length predictor: what it believes of each bucket, and whether its intervals hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from nanopd.errors import ConfigError
from nanopd.router.predictor import OutputLengthPredictor, bucket_of, bucket_span
from nanopd.viz.style import BLUE, GREY, INK, ORANGE, VERMILLION, axes_for, styled, tint

UNLIMITED = 1 << 40  # tokens: no limit cuts the prediction
LEVELS = (0.5, 0.8, 0.95)


def draw_posterior(
    predictor: OutputLengthPredictor,
    lengths: Iterable[tuple[int, int]] = (),
    *,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Predicted output length for each bucket of prompt lengths: median and central 50, 80, 95 % intervals.

    ``lengths``: (prompt tokens, output tokens) to draw as points. Buckets between the first and the last that have
    seen nothing are drawn in grey: they predict what all the others say.

    Raises ConfigError if the predictor has seen nothing.
    """
    known = {bucket_of(summary.low): summary for summary in predictor.buckets()}
    if not known:
        raise ConfigError("the predictor has seen no output yet, so there is no posterior to draw")
    every = range(min(known), max(known) + 1)
    with styled():
        ax = axes_for(ax, (8.5, 5))
        ax.set_yscale("log")
        for x, bucket in enumerate(every):
            prediction = predictor.distribution(bucket_span(bucket)[0], UNLIMITED)
            color = BLUE if bucket in known else GREY
            for level, depth in zip(reversed(LEVELS), (0.2, 0.4, 0.7)):
                low, high = prediction.interval(level)
                label = f"{level:.0%} of outputs" if x == 0 else None  # the first bucket has always seen something
                bar = ax.bar(x, high - low, 0.7, bottom=low, color=tint(color, depth), label=label)
                bar[0].set_gid(f"{level:.0%} of bucket {bucket}")
            ax.plot([x - 0.35, x + 0.35], [prediction.median] * 2, color=INK, linewidth=2)
        _points(ax, every, lengths)
        centre = float(np.exp(predictor.global_posterior.mean))
        ax.axhline(centre, color=VERMILLION, linestyle=":", label=f"all prompts: {centre:,.0f} tokens")
        counts = [known[b].observed + known[b].cut if b in known else 0.0 for b in every]
        ax.set_xticks(range(len(every)), [f"{_short(bucket_span(b)[0])}\n{n:.0f}" for b, n in zip(every, counts)])
        ax.set_xlabel("prompt length from ... tokens to twice as many; below: outputs seen")
        ax.set_ylabel("output length (tokens)")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, fontsize=9)
        ax.set_title(
            title or _posterior_finding([predictor.distribution(bucket_span(b)[0], UNLIMITED).median for b in known])
        )
    return ax


def _points(ax: Axes, every: range, lengths: Iterable[tuple[int, int]]) -> None:
    spread = np.random.default_rng(0)
    shown = [(bucket_of(prompt) - every.start, output) for prompt, output in lengths if bucket_of(prompt) in every]
    if shown:
        x, y = np.array(shown, dtype=float).T
        x = x + spread.uniform(-0.3, 0.3, len(x))
        ax.plot(x, np.maximum(y, 1), ".", color=ORANGE, markersize=3, alpha=0.5, label="outputs seen")


def _short(power_of_two: int) -> str:
    return f"{power_of_two // 1024}k" if power_of_two >= 1024 else str(power_of_two)


def _posterior_finding(medians: Sequence[float]) -> str:
    if len(medians) == 1:
        return f"Half of the outputs have at most {medians[0]:,.0f} tokens"
    return f"The typical output has {min(medians):,.0f} to {max(medians):,.0f} tokens, depending on the prompt"


@dataclass(frozen=True)
class Coverage:
    """How many lengths lay in the interval that was predicted for them before they were seen.

    ``nominal`` and ``real`` are shares; ``count`` lengths were predicted.
    """

    nominal: tuple[float, ...]
    real: tuple[float, ...]
    count: int

    @classmethod
    def of(
        cls,
        predictor: OutputLengthPredictor,
        lengths: Iterable[tuple[int, int]],
        nominal: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    ) -> Coverage:
        """Predict each (prompt tokens, output tokens), then let ``predictor`` learn it.

        Raises ConfigError without lengths.
        """
        inside, count = [0] * len(nominal), 0
        for prompt, output in lengths:
            prediction = predictor.distribution(prompt, UNLIMITED)
            for index, level in enumerate(nominal):
                low, high = prediction.interval(level)
                inside[index] += low <= output <= high
            predictor.learn(prompt, output)
            count += 1
        if not count:
            raise ConfigError("coverage needs at least 1 length, got 0")
        return cls(tuple(nominal), tuple(n / count for n in inside), count)

    @property
    def worst(self) -> float:
        """The largest difference between what was promised and what was kept."""
        return max(abs(real - nominal) for real, nominal in zip(self.real, self.nominal))


def draw_coverage(coverages: dict[str, Coverage], *, title: str | None = None, ax: Axes | None = None) -> Axes:
    """Share of lengths inside of the interval against the share promised; the band is two standard errors of chance.

    Raises ConfigError without coverages.
    """
    if not coverages:
        raise ConfigError("nothing to draw: no coverage was given")
    fewest = min(coverage.count for coverage in coverages.values())
    with styled():
        ax = axes_for(ax, (6.5, 5.5))
        x = np.linspace(0, 1, 101)
        error = 2 * np.sqrt(x * (1 - x) / fewest)
        ax.fill_between(
            x, x - error, x + error, color=tint(GREY, 0.3), linewidth=0, label=f"chance, {fewest:,} lengths"
        )
        ax.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2)
        for name, coverage in coverages.items():
            label = f"{name}: off by at most {100 * coverage.worst:.1f} points"
            (line,) = ax.plot(coverage.nominal, coverage.real, "o-", label=label)
            line.set_gid(f"coverage {name}")
        ax.set_xlim(0, 1)
        ax.set_ylim(0, 1)
        ax.set_xlabel("share of outputs that the interval promises to hold")
        ax.set_ylabel("share that it held")
        ax.legend(loc="upper left")
        worst = max(coverage.worst for coverage in coverages.values())
        ax.set_title(title or f"Intervals keep their word to within {100 * worst:.1f} points")
    return ax
