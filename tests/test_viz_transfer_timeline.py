"""The transfer timeline: bars where the times say, and a widget that follows its slider."""

from __future__ import annotations

import matplotlib
import pytest
from matplotlib.axes import Axes

matplotlib.use("Agg")

from nanopd.errors import ConfigError
from nanopd.transfer import LayerTimeline, Span, overlap_timeline
from nanopd.viz import TransferTimelineWidget, draw_transfer_timeline
from nanopd.viz.style import bare_figure

MB = 10**6


def bars(ax: Axes) -> dict[str, tuple[float, float]]:
    return {
        patch.get_gid(): (patch.get_x(), patch.get_x() + patch.get_width()) for patch in ax.patches if patch.get_gid()
    }


def canvas() -> Axes:
    return bare_figure(9, 4).add_subplot()


def test_bars_stand_where_the_times_say() -> None:
    measured = LayerTimeline((Span(0, 2), Span(2, 5)), (Span(2.5, 4), Span(5.25, 7)), streamed=True)
    ax = draw_transfer_timeline(measured, title="finding", ax=canvas())
    assert bars(ax) == {
        "compute 0": (0, 2),
        "compute 1": (2, 5),
        "transfer 0": (2.5, 4),
        "transfer 1": (5.25, 7),
        "exposed": (5, 7),
    }
    assert ax.get_title(loc="left") == "finding" and ax.get_xlabel().endswith("(ms)")
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["compute", "transfer"]
    assert ax.get_xlim()[1] >= 7
    share = 1 - 2 / (1.5 + 1.75)
    assert any(f"+2 ms, {share:.0%} hidden" in text.get_text() for text in ax.texts)


def test_several_timelines_in_one_picture() -> None:
    lines = {mode: overlap_timeline([1.0] * 3, MB, 1.0, streamed=mode == "on") for mode in ("on", "off")}
    found = bars(draw_transfer_timeline(lines, ax=canvas()))
    assert found["on transfer 0"] == (1, 2) and found["off transfer 0"] == (3, 4)
    assert found["on exposed"] == (3, 4) and found["off exposed"] == (3, 6)


@pytest.mark.parametrize("lines", [{}, LayerTimeline((), (), True)], ids=["none", "no layers"])
def test_nothing_to_draw(lines: object) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        draw_transfer_timeline(lines, ax=canvas())  # type: ignore[arg-type]


def test_the_widget_follows_its_slider() -> None:
    widget = TransferTimelineWidget([2.0] * 4, 3 * MB)
    assert widget.slider.value == pytest.approx(1.5), "12 MB in 8 ms"
    first, limits = widget.image.value, widget.figure.axes[0].get_xlim()  # type: ignore[union-attr]
    widget.slider.value = 3.0
    assert widget.image.value != first
    ax = widget.figure.axes[0]  # type: ignore[union-attr]
    assert ax.get_xlim() == limits, "the axis moved with the slider"
    expected = overlap_timeline([2.0] * 4, 3 * MB, 3.0)
    assert bars(ax)["streamed: transfer 2"] == pytest.approx((expected.transfer[2].begin, expected.transfer[2].end))
    assert "a layer&#x27;s KV travels 1 ms" in widget.status.value
    assert "adds 4 ms to a prefill of 8 ms; streamed, 1 ms: 75% of it is hidden" in widget.status.value


def test_every_speed_of_the_widget_fits_its_axis() -> None:
    widget = TransferTimelineWidget([1.0, 2.0, 3.0], 7 * MB, latency_ms=0.5, gb_s=1e9)
    assert widget.slider.value == pytest.approx(10**widget.slider.max)
    for exponent in (widget.slider.min, widget.slider.max):
        widget.slider.value = 10**exponent
        assert all(line.total_ms <= widget.until_ms * (1 + 1e-9) for line in widget.lines.values())


@pytest.mark.parametrize("arguments", [([1.0], 0), ([0.0], 1), ([], 1)], ids=str)
def test_the_widget_needs_something_to_show(arguments: tuple) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        TransferTimelineWidget(*arguments)


def test_a_record_comes_back_as_it_was() -> None:
    line = overlap_timeline([1.0, 2.0], MB, 2.0, latency_ms=0.5)
    assert LayerTimeline.from_dict(line.as_dict()) == line
    with pytest.raises(ConfigError, match="no record of a timeline"):
        LayerTimeline.from_dict({"compute": [[0, 1]]})
