"""TPOT against prefill throughput: points, how to compare two curves at equal TPOT, and a table. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanopd.errors import ConfigError


def summary(gaps_ms: Sequence[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and number of the times between two tokens.

    The percentile is the smallest gap that 99 % do not exceed: with fewer than 100 gaps, the largest.
    """
    if not gaps_ms:
        raise ConfigError("no step was timed: measure for longer")
    ordered = sorted(gaps_ms)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return {"mean_ms": sum(ordered) / len(ordered), "p50_ms": at(0.5), "p99_ms": at(0.99), "steps": len(ordered)}


def throughput_at(curve: Sequence[tuple[float, float]], tpot_ms: float) -> float:
    """What a curve of (TPOT in ms, prefill tokens per ms) allows at ``tpot_ms``, by straight lines between its points.

    0 below the first point; beyond the last one its throughput, since nothing is known there. A point that another
    one beats in both counts is left out: one would use that other one.
    """
    best: list[tuple[float, float]] = []
    for tpot, rate in sorted(curve):
        if not best or rate > best[-1][1]:
            best.append((tpot, rate))
    if not best or tpot_ms < best[0][0]:
        return 0.0
    for (left, low), (right, high) in itertools.pairwise(best):
        if tpot_ms <= right:
            return low + (high - low) * (tpot_ms - left) / (right - left)
    return best[-1][1]


def compare(state: Mapping[str, Any]) -> dict[str, float]:
    """name of a split -> its prefill throughput over that of chunking at the split's TPOT.

    ``state``: "alone" and "chunked" and "split" as ``frontier.measure_frontier`` makes them. The chunked curve starts
    at decodes alone, with no prefill.
    """
    curve = [(state["alone"]["mean_ms"], 0.0)]
    curve += [(point["mean_ms"], point["prefill_tokens_per_ms"]) for point in state["chunked"].values()]
    ratios = {}
    for name, point in state["split"].items():
        chunked = throughput_at(curve, point["mean_ms"])
        if chunked > 0:  # else the split decodes faster than the whole device: noise, or not the same state
            ratios[name] = point["prefill_tokens_per_ms"] / chunked
    return ratios


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    """The measured frontier as text, a line per point."""
    yield f"{results['model']}, prompts of {results['prompt_tokens']} tokens"
    yield f"{'':28}{'TPOT ms':>9}{'p50':>8}{'p99':>8}{'prefill tok/ms':>16}"
    for name, state in results["states"].items():
        yield f"{name}: {_line('decodes alone', state['alone'])}"
        for kind in ("chunked", "split", "streams"):
            for setting, point in state[kind].items():
                extra = ""
                if setting in state["at_equal_tpot"] and kind == "split":
                    alone = point["decode_alone"]
                    extra = (
                        f"   {state['at_equal_tpot'][setting]:.2f} x chunked; p99 {point['p99_of_alone']:.2f} x alone"
                    )
                    extra += f" ({alone['p50_ms']:.2f}, p99 {alone['p99_ms']:.2f} ms)"
                yield f"{'':4}{_line(f'{kind} {setting}', point)}{extra}"


def _line(name: str, point: Mapping[str, float]) -> str:
    rate = point.get("prefill_tokens_per_ms")
    numbers = f"{point['mean_ms']:9.2f}{point['p50_ms']:8.2f}{point['p99_ms']:8.2f}"
    return f"{name:24}{numbers}{'' if rate is None else f'{rate:16.2f}'}"
