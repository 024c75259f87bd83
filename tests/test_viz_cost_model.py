"""Pictures of a profile: the points and lines drawn are those of the profile, and titles state the finding."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

from matplotlib.axes import Axes

from nanopd.costmodel import HardwareProfile, StepFeatures, StepPoint, StepTimeModel
from nanopd.errors import ConfigError
from nanopd.viz import LabelledStep, draw_analytical_fits, draw_predictions, draw_step_terms
from nanopd.viz.style import bare_figure

MODEL = StepTimeModel(4.0, 0.02, kv_token_ms=1e-4)
PREFILLS = [StepPoint(StepFeatures().with_chunk(n), 5 + 0.02 * n, "prefill") for n in (100, 200, 400)]
DECODES = [StepPoint(StepFeatures.decode(b, 100 * b), 4.0, "decode") for b in (1, 2, 4)]
MIXED = [StepPoint(StepFeatures.decode(4, 400).with_chunk(n), 4 + 0.03 * n, "mixed") for n in (50, 100)]
HELD_OUT = [replace(DECODES[0], ms=5.0, held_out=True), replace(PREFILLS[0], ms=4 / 0.6, held_out=True)]
PROFILE = HardwareProfile(
    "toy", "m", "float32", 1.0, 1.0, 1.0, 1.0, 1,
    step_time={"whole device": MODEL}, points=(*PREFILLS, *DECODES, *MIXED, *HELD_OUT),
)  # fmt: skip


def canvas() -> Axes:
    return bare_figure(7, 5).add_subplot()


def drawn(ax: Axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_gid(): list(zip(*line.get_data())) for line in ax.lines if line.get_gid()}


def test_predictions_stand_over_measurements() -> None:
    ax = draw_predictions(PROFILE, ax=canvas())
    groups = {
        "decode fitted": DECODES, "prefill fitted": PREFILLS, "mixed fitted": MIXED,
        "decode held out": HELD_OUT[:1], "prefill held out": HELD_OUT[1:],
    }  # fmt: skip
    marks = drawn(ax)
    assert set(marks) == set(groups)
    for name, points in groups.items():
        assert marks[name] == [(p.ms, pytest.approx(MODEL.step_ms(p.features))) for p in points]
    errors = [abs(MODEL.step_ms(p.features) / p.ms - 1) for p in HELD_OUT]
    assert ax.get_title(loc="left") == f"Off by {np.median(errors):.1%} in the median on 2 unseen steps"
    assert "(ms)" in ax.get_xlabel() and "(ms)" in ax.get_ylabel()


def test_predictions_of_held_out_points_only_and_of_a_fit_without_any() -> None:
    assert set(drawn(draw_predictions(PROFILE, held_out_only=True, ax=canvas()))) == {
        "decode held out", "prefill held out",
    }  # fmt: skip
    fitted = replace(PROFILE, points=(*PREFILLS, *DECODES))
    assert "6 fitted steps" in draw_predictions(fitted, ax=canvas()).get_title(loc="left")


def test_the_bars_of_a_step_add_up() -> None:
    steps = [
        LabelledStep("decode", StepFeatures.decode(4, 10_000)),
        LabelledStep("mixed", StepFeatures.decode(4, 10_000).with_chunk(500)),
    ]
    ax = draw_step_terms(MODEL, steps, ax=canvas())
    for row, step in enumerate(steps):
        bars = [b for b in ax.patches if b.get_gid() and abs(b.get_y() + b.get_height() / 2 - row) < 0.1]
        assert {b.get_gid(): b.get_width() for b in bars if b.get_width()} == pytest.approx(
            {name: ms for name, ms in MODEL.terms(step.features).items() if ms}
        )
        assert max(b.get_x() + b.get_width() for b in bars) == pytest.approx(MODEL.step_ms(step.features))
    assert ax.get_title(loc="left") == "mixed: linear layers are 67% of 15.1 ms"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["decode", "mixed"]


def test_the_regressions_show_their_own_points() -> None:
    figure = draw_analytical_fits(PROFILE, figure=bare_figure(13, 4))
    alpha, beta, gamma = (ax for ax in figure.axes if ax.get_title(loc="left"))
    measured, line = alpha.lines
    assert list(zip(*measured.get_data())) == [(p.features.prefill_tokens, p.ms) for p in PREFILLS]
    assert list(line.get_ydata()) == pytest.approx([5.0, 13.0])
    assert alpha.get_title(loc="left") == "α = 0.02 ms/token (R² = 1.00)"
    assert sorted(beta.collections[0].get_offsets().tolist()) == [[1, 4], [2, 4], [4, 4]]
    measured, line = gamma.lines
    assert list(zip(*measured.get_data())) == [(50, pytest.approx(1.5)), (100, pytest.approx(3.0))]
    assert line.get_ydata()[-1] == pytest.approx(3.0)
    assert all(ax.get_xlabel() and ax.get_ylabel() for ax in (alpha, beta, gamma))


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="no step-time model for 'sm=8'"):
        draw_predictions(PROFILE, "sm=8")
    with pytest.raises(ConfigError, match="no points of 'whole device'"):
        draw_analytical_fits(replace(PROFILE, points=()))
    with pytest.raises(ConfigError, match="no step to draw"):
        draw_step_terms(MODEL, [])
