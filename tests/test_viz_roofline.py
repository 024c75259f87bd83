"""Roofline: the counted work, the lines and points drawn, the explorer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes

matplotlib.use("Agg")

from nanopd.errors import ConfigError
from nanopd.viz import RooflineExplorer, RooflinePoint, decode_work, draw_roofline, prefill_work
from nanopd.viz.style import bare_figure


@dataclass
class OneLayer:
    """A model small enough to count by hand: 100 weights in the layer, 50 in the head, 6 attention FLOP per token."""

    num_step_parameters: int = 150

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        return 4 * dtype_bytes

    def flops_per_token(self, context_len: int = 0, *, logits: bool = True) -> int:
        return 200 + (100 if logits else 0) + 6 * context_len


def canvas() -> Axes:
    return bare_figure(8, 5).add_subplot()


def test_work_of_a_decode_step() -> None:
    work = decode_work(OneLayer(), batch=3, context=10)
    assert work.flops == 3 * (200 + 100 + 60)
    assert work.num_bytes == 150 * 2 + 3 * (10 + 1) * 8
    assert work.intensity == work.flops / work.num_bytes


def test_work_of_a_prefill_is_the_sum_over_its_tokens() -> None:
    work = prefill_work(OneLayer(), prompt=7, batch=2, dtype_bytes=4)
    assert work.flops == 2 * (sum(200 + 6 * (i + 1) for i in range(7)) + 100)
    assert work.num_bytes == 150 * 4 + 2 * 2 * 7 * 16


def test_work_of_qwen3_8b_is_what_is_known_of_it() -> None:
    """DESIGN: 16.4 GB of weights (with the embedding table), decode floor 3.9 ms on a card that copies 4.2 TB/s."""
    from nanopd.model.presets import preset

    config = preset("qwen3-8b")
    step = decode_work(config, 1, 512)
    assert 3.5e-3 < step.seconds(4200, 770) < 3.9e-3 and step.is_memory_bound(4200, 770)
    prompt = prefill_work(config, 2048)
    assert not prompt.is_memory_bound(4200, 770)
    assert 2 * 7e9 * 2048 < prompt.flops < 2 * 8.2e9 * 2048


def test_time_is_the_larger_of_the_two_limits() -> None:
    work = decode_work(OneLayer(), 1, 1)
    assert work.seconds(1e-9, 1e9) == pytest.approx(work.num_bytes)
    assert work.seconds(1e9, 1e-12) == pytest.approx(work.flops)


def test_the_roof_and_the_points_are_where_they_belong() -> None:
    points = [RooflinePoint("slow", 2.0, 0.1), RooflinePoint("bound", 50.0), RooflinePoint("most", 1000.0, None)]
    ax = draw_roofline(1000, 100, points, device="toy", title="finding", ax=canvas())
    lines = {line.get_gid(): line for line in ax.lines if line.get_gid()}
    x, y = lines["roof"].get_data()
    assert np.allclose(y, np.minimum(100, np.asarray(x, dtype=float) * 1000 / 1e3))
    assert 100.0 in list(x), "the ridge, 100 FLOP per byte, is a corner"
    positions = {gid: (line.get_xdata()[0], line.get_ydata()[0]) for gid, line in lines.items() if gid != "roof"}
    assert positions == {"point slow": (2.0, 0.1), "point bound": (50.0, 50.0), "point most": (1000.0, 100.0)}
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["slow: 0.1 TFLOP/s, 5% of the roof", "bound: at most 50 TFLOP/s", "most: at most 100 TFLOP/s"]
    assert ax.get_title(loc="left") == "finding"
    assert ax.get_xlabel() == "arithmetic intensity (FLOP per byte moved)"
    assert ax.get_ylabel() == "rate on toy (TFLOP/s)"
    (low, high), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    assert all(low < px < high and bottom < py < top for px, py in positions.values())


@pytest.mark.parametrize("arguments", [(0, 1, 1.0), (1, -1, 1.0), (1, 1, 0.0)])
def test_ceilings_and_intensities_must_be_positive(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="positive"):
        draw_roofline(*arguments[:2], [RooflinePoint("p", arguments[2])], ax=canvas())


def test_explorer_follows_its_sliders() -> None:
    explorer = RooflineExplorer(OneLayer(), 10, 1, max_context=64)
    first = explorer.image.value
    limits = explorer.figure.axes[0].get_xlim()  # type: ignore[union-attr]
    explorer.batch.value, explorer.context.value, explorer.prompt.value = 64, 2, 32
    assert explorer.image.value != first
    ax = explorer.figure.axes[0]  # type: ignore[union-attr]
    x = {line.get_gid(): line.get_xdata()[0] for line in ax.lines if re.match("point", line.get_gid() or "")}
    assert x == {
        "point decode, batch 64": decode_work(OneLayer(), 64, 2).intensity,
        "point prefill, 32 tokens": prefill_work(OneLayer(), 32).intensity,
    }
    assert ax.get_xlim() == limits, "the axes moved with the sliders"
    assert "prefill" in explorer.status.value and "memory-bound" in explorer.status.value
    assert max(explorer.context.options) == 64
