"""The cluster designer: sliders, what they simulate, and what is refused."""

from __future__ import annotations

import matplotlib
import pytest

matplotlib.use("Agg")

from nanopd.bench.metrics import SLO
from nanopd.costmodel.hardware_profile import preset
from nanopd.errors import ConfigError
from nanopd.sim.layouts import Layout
from nanopd.viz.cluster_designer import LEAST, MOST, TOKENS, ClusterDesigner
from tests.sim_cases import profile

LIMITS = SLO(ttft_s=0.5, tpot_s=0.1)


def designer(gpus: int = 4) -> ClusterDesigner:
    return ClusterDesigner({"test": profile(), "rtx-4090": preset("rtx-4090")}, LIMITS, gpus=gpus)


def test_it_serves_the_chosen_roles_and_the_same_gpus_collocated() -> None:
    made = designer()
    assert made.chosen == Layout(prefill=1, decode=3)
    assert [served.layout for served in made.served] == [Layout(prefill=1, decode=3), Layout(collocated=4)]
    assert all(served.summary.attainment == 1.0 for served in made.served)
    assert [name for name, *_ in made.served[0].busy] == ["prefill0", "decode0", "decode1", "decode2"]
    assert made.figure is not None and bytes(made.image.value)[:4] == b"\x89PNG"
    labels = [text.get_text() for text in made.figure.axes[0].texts]
    assert "100%" in labels and "offered" in labels


def test_every_slider_counts() -> None:
    made = designer()
    seen = {made.status.value}
    changes = [(made.rate, 64), (made.prompt, 2048), (made.output, 8), (made.link, 1), (made.gpus, 2)]
    for control, value in [*changes, (made.hardware, "rtx-4090")]:
        control.value = value
        assert made.status.value not in seen, control.description
        seen.add(made.status.value)
    made.prefill.value = 0
    assert made.chosen == Layout(collocated=2) and len(made.served) == 1
    made.prefill.value = 3  # more than there are: one GPU must decode
    assert made.chosen == Layout(prefill=1, decode=1)


def test_the_link_slider_reaches_down_to_where_an_h20_is_held_up() -> None:
    made = ClusterDesigner({"h20": preset("h20")}, SLO(ttft_s=1.0, tpot_s=0.075))
    made.prefill.value, made.prompt.value, made.output.value, made.rate.value = 2, 2048, 16, 4
    assert made.served[0].summary.attainment == 1.0
    made.link.value = made.link.options[0]  # far below the KV that two prefills produce, 1 GB/s each
    assert made.served[0].summary.attainment < 0.5


def test_titles_name_the_busiest_worker() -> None:
    made = designer()
    name, _, share = max(made.served[0].busy, key=lambda worker: worker[2])
    assert made.figure is not None
    assert made.figure.axes[1].get_title(loc="left") == f"Busiest: {name}, {share:.0%} of the time"


def test_a_run_is_small_whatever_the_sliders_say() -> None:
    made = designer()
    made.output.value = made.output.options[-1]
    summary = made.served[0].summary
    assert LEAST / 2 < summary.offered < MOST and summary.offered * made.output.value < 4 * max(
        TOKENS, LEAST * made.output.value
    )


def test_goodput_is_below_its_bound() -> None:
    made = designer(gpus=2)
    made.gpus.value, made.output.value = 2, 4
    made._find()
    assert "goodput" in made.status.value and "by arithmetic" in made.status.value


def test_what_cannot_run_is_said() -> None:
    made = ClusterDesigner({"small": profile(num_blocks=30)}, LIMITS, gpus=2)
    made.prompt.value = 8192  # no worker can take it: all are refused, and the picture says 0
    assert made.served[0].summary.attained == 0
    none = ClusterDesigner({"x": profile(device="Abacus", num_blocks=None)}, LIMITS)
    assert "ConfigError" in none.status.value and none.served == []
    with pytest.raises(ConfigError, match="a designer needs"):
        ClusterDesigner({}, LIMITS)
