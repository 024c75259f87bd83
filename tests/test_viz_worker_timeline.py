"""Steps of several workers: boxes that are those steps, in the colours of what they computed."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib
import pytest

matplotlib.use("Agg")

from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from nanopd.viz import draw_worker_steps
from nanopd.viz.style import DECODE_COLOR, PREFILL_COLOR, bare_figure


@dataclass
class Plan:
    num_decodes: int
    num_prefill_tokens: int


@dataclass
class Step:
    start: float
    end: float
    plan: Plan


STEPS = {
    "prefill0": [Step(10.0, 10.5, Plan(0, 400))],
    "decode0": [Step(10.1, 10.2, Plan(3, 0)), Step(10.2, 10.4, Plan(2, 5))],
}


def boxes(origin: float | None = None) -> list[Rectangle]:
    ax = draw_worker_steps(STEPS, origin=origin, title="two workers", ax=bare_figure(8, 2).subplots())
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def test_a_box_is_as_wide_as_its_step() -> None:
    found = boxes()
    assert [box.get_gid() for box in found] == ["prefill0 step 0", "decode0 step 0", "decode0 step 1", "decode0 step 1"]
    assert [box.get_x() for box in found] == pytest.approx([0, 100, 200, 200])
    assert [box.get_width() for box in found] == pytest.approx([500, 100, 200, 200])
    assert boxes(origin=9.0)[0].get_x() == pytest.approx(1000)


def test_a_mixed_step_has_both_colours_one_above_the_other() -> None:
    prefill, decode, upper, lower = boxes()
    assert [box.get_facecolor() for box in (prefill, decode, upper, lower)] == [
        to_rgba(color) for color in (PREFILL_COLOR, DECODE_COLOR, PREFILL_COLOR, DECODE_COLOR)
    ]
    assert upper.get_y() + upper.get_height() == pytest.approx(lower.get_y())
    assert upper.get_height() + lower.get_height() == pytest.approx(decode.get_height())


def test_no_steps_make_an_empty_picture() -> None:
    assert not draw_worker_steps({"decode0": []}, ax=bare_figure(8, 2).subplots()).patches
