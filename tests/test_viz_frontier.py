"""The frontier's picture: every point where it was measured, and a title that says who wins."""

from __future__ import annotations

from typing import Any

import matplotlib
import pytest
from matplotlib.axes import Axes

matplotlib.use("Agg")

from nanopd.errors import ConfigError
from nanopd.viz import draw_frontier, draw_frontiers
from nanopd.viz.style import bare_figure


def point(tpot: float, rate: float | None = None) -> dict[str, Any]:
    times = {"mean_ms": tpot, "p50_ms": tpot, "p99_ms": 1.2 * tpot, "steps": 100}
    return times if rate is None else {**times, "prefill_tokens_per_ms": rate}


def state(ratios: dict[str, float]) -> dict[str, Any]:
    """64 decodes of 8k tokens, by DESIGN.md's figures."""
    return {
        "alone": point(21.5),
        "chunked": {
            "2048": point(69.5, 29.5), "256": point(25.4, 10.1), "512": point(31.6, 16.2), "1024": point(45.0, 22.7),
        },
        "split": {"48/84": point(35.5, 25.7), "64/68": point(30.1, 19.9)},
        "streams": {"2048": point(60.0, 20.0)},
        "at_equal_tpot": ratios,
    }  # fmt: skip


def canvas() -> Axes:
    return bare_figure(7, 5).add_subplot()


def curve(ax: Axes, gid: str) -> list[tuple[float, float]]:
    (line,) = [line for line in ax.lines if line.get_gid() == gid]
    return list(zip(*line.get_data()))


def test_points_stand_where_they_were_measured_in_order_of_tpot() -> None:
    ax = draw_frontier(state({"48/84": 1.42, "64/68": 1.35}), "b64_ctx8192", ax=canvas())
    assert curve(ax, "chunked") == [(25.4, 10.1), (31.6, 16.2), (45.0, 22.7), (69.5, 29.5)]
    assert curve(ax, "split") == [(30.1, 19.9), (35.5, 25.7)]
    assert curve(ax, "streams") == [(60.0, 20.0)]
    assert curve(ax, "alone")[0][0] == 21.5
    assert {"256", "48/84", "2048"} <= {text.get_text() for text in ax.texts}
    assert "(ms)" in ax.get_xlabel() and "(tokens/ms)" in ax.get_ylabel()
    assert ax.get_legend() is not None


@pytest.mark.parametrize(
    ("name", "ratios", "title"),
    [
        ("b4_ctx8192", {"48/84": 1.42, "2": 1.3}, "4 decodes, 8,192 tokens of context:\n48/84 prefills 1.42× chunking"),
        ("b16_ctx1024", {"32/100": 0.8}, "16 decodes, 1,024 tokens of context:\nchunking prefills 1.25× 32/100"),
        ("mine", {}, "mine:\nprefill against waiting decodes"),
        ("", {"1/1": 1.0}, "1/1 prefills 1.00× chunking"),
    ],
    ids=["split", "chunked", "open", "nameless"],
)  # fmt: skip
def test_the_title_says_who_wins(name: str, ratios: dict[str, float], title: str) -> None:
    assert draw_frontier(state(ratios), name, ax=canvas()).get_title(loc="left") == title


def test_curves_that_were_not_measured_are_left_out() -> None:
    partial = {**state({}), "split": {}, "streams": {}}
    ax = draw_frontier(partial, ax=canvas())
    assert {line.get_gid() for line in ax.lines} >= {"chunked", "alone"}
    assert not {line.get_gid() for line in ax.lines} & {"split", "streams"}
    with pytest.raises(ConfigError, match="b1 holds no point"):
        draw_frontier({**partial, "chunked": {}}, "b1", ax=canvas())


def test_a_figure_has_a_panel_for_each_state() -> None:
    import matplotlib.pyplot as plt

    states = {"b64_ctx8192": state({"48/84": 1.3}), "b16_ctx1024": state({})}
    results = {"model": "tiny", "prompt_tokens": 2048, "states": states}
    axes = draw_frontiers(results)
    assert [ax.get_title(loc="left").split(",")[0] for ax in axes] == ["64 decodes", "16 decodes"]
    assert axes[0].figure is axes[1].figure
    plt.close(axes[0].figure)
