"""Route maps, the route explorer, and the predictor's pictures: what is drawn is what the policies say."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes

matplotlib.use("Agg")

from router_cases import MODELS

from nanopd.costmodel.hardware_profile import preset
from nanopd.errors import ConfigError
from nanopd.router.decision import Path
from nanopd.router.policies import AlwaysCollocated, PrefillLengthThreshold, RoundRobin
from nanopd.router.predictor import OutputLengthPredictor
from nanopd.router.rule import SeedEstimate, SeedRule
from nanopd.router.situation import Situation, imagined_request
from nanopd.viz.predictor import Coverage, draw_coverage, draw_posterior
from nanopd.viz.route_explorer import LOADS, PROMPTS, RouteExplorer
from nanopd.viz.route_map import RouteMap, draw_route_map
from nanopd.viz.style import bare_figure


def canvas() -> Axes:
    return bare_figure(8, 5).add_subplot()


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


# --- the map ---------------------------------------------------------------------------------------------------


def a_map(policy: Any, name: str = "rtx-4090") -> RouteMap:
    return RouteMap.of(policy, Situation(preset(name)).at_load, range(0, 6), [100, 600, 5000], output_tokens=150.0)


def test_each_cell_is_the_policys_decision() -> None:
    policy = SeedEstimate("rtx-4090")
    route_map = a_map(policy)
    for row, prompt in enumerate(route_map.prompts):
        for column, load in enumerate(route_map.loads):
            decision = policy.decide(
                imagined_request(prompt, 150.0), Situation(preset("rtx-4090")).at_load(load), 150.0
            )
            assert route_map.disaggregated[row, column] == (decision.path is Path.DISAGGREGATED)
            assert decision.collocated is not None and decision.disaggregated is not None
            together, apart = decision.collocated.total_ms, decision.disaggregated.total_ms
            assert route_map.advantage[row, column] == pytest.approx((together - apart) / max(together, apart))


@pytest.mark.parametrize(
    ("policy", "finding"),
    [
        (SeedRule("rtx-4090"), "seed-rule: disaggregated from load 3 on, whatever the prompt"),
        (SeedRule("h20"), "seed-rule: disaggregated from load 1 on, whatever the prompt"),
        (AlwaysCollocated(), "collocated: always collocated here"),
        (RoundRobin(1.0), "round-robin: always disaggregated here"),
        (PrefillLengthThreshold(512), "threshold: the prompt's length alone decides"),
    ],
    ids=["4090", "h20", "collocated", "round-robin", "threshold"],
)
def test_the_title_says_what_the_map_shows(policy: Any, finding: str) -> None:
    assert draw_route_map(a_map(policy), ax=canvas()).get_title(loc="left") == finding


def test_colours_and_the_boundary_follow_the_decisions() -> None:
    route_map = a_map(SeedRule("rtx-4090"))
    ax = draw_route_map(route_map, point=(2, 600), ax=canvas())
    (image,) = (mesh for mesh in ax.collections if mesh.get_gid() == "decisions")
    shown = np.asarray(image.get_array()).reshape(3, 6)
    assert ((shown > 0) == route_map.disaggregated).all() and (shown != 0).all()
    edges = [line for line in ax.lines if line.get_gid() is None]
    assert {tuple(line.get_xdata()) for line in edges} == {(3, 3)} and len(edges) == 3
    (point,) = (line for line in ax.lines if line.get_gid() == "point")
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (2.5, 1.5)
    assert legend(ax) == ["collocated", "disaggregated"]
    assert "differ by up to" in ax.get_legend().get_title().get_text()
    assert ax.get_xlabel() == "load (requests that decode, on each path)"


def test_a_policy_without_estimates_is_drawn_plainly() -> None:
    ax = draw_route_map(a_map(PrefillLengthThreshold(512)), ax=canvas())
    (image,) = (mesh for mesh in ax.collections if mesh.get_gid() == "decisions")
    assert set(np.abs(np.asarray(image.get_array())).ravel()) == {0.6}
    assert ax.get_legend().get_title().get_text() == "the policy made no estimates"


def test_an_empty_map_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 and 1"):
        RouteMap.of(AlwaysCollocated(), Situation(preset("h20")).at_load, [], [100])


# --- the explorer ----------------------------------------------------------------------------------------------


def boundary(explorer: RouteExplorer) -> set[float]:
    """Columns at which the map shown changes colour."""
    ax = explorer.figure.axes[0]  # type: ignore[union-attr]
    return {line.get_xdata()[0] for line in ax.lines if line.get_gid() is None}


def test_the_explorer_starts_with_the_4090s_conclusion_and_follows_hardware_and_sliders() -> None:
    explorer = RouteExplorer()
    assert explorer.policy.options == ("seed-rule", "seed-estimate")
    assert boundary(explorer) == {LOADS.index(3)}
    assert "disaggregated. load 4 is above the threshold 2.105" in explorer.status.value
    explorer.load.value = 2
    assert "collocated. load 2 is not above the threshold 2.105" in explorer.status.value
    explorer.bandwidth.value = 392.154  # a 4090 with the H20's links
    assert boundary(explorer) == {LOADS.index(1)}
    explorer.gamma.value /= 100
    assert boundary(explorer) == {LOADS.index(7)}
    explorer.hardware.value = "h20"
    assert explorer.gamma.value == pytest.approx(0.130235) and explorer.profile == preset("h20")
    assert boundary(explorer) == {LOADS.index(1)} and "0.046" in explorer.status.value


def test_the_picture_changes_with_a_slider_and_once_per_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer, drawn = RouteExplorer(), []
    monkeypatch.setattr(explorer, "refresh", lambda: drawn.append(1))
    explorer.hardware.value = "h20"
    assert len(drawn) == 1
    explorer.prompt.value = PROMPTS[3]
    assert len(drawn) == 2


def test_step_time_models_bring_the_slo_policy() -> None:
    card = replace(preset("h20"), step_time=MODELS, bandwidth_gb_s=None)
    explorer = RouteExplorer({"card": card}, tpot_ms=20.0, prefill_place="half", decode_place="half")
    assert explorer.policy.options == ("seed-rule", "seed-estimate", "slo") and explorer.bandwidth.disabled
    explorer.policy.value = "slo"
    assert "expected SLO misses" in explorer.status.value or "equal SLO misses" in explorer.status.value
    explorer.hardware.value = "rtx-4090"
    assert explorer.policy.value == "seed-rule" and not explorer.bandwidth.disabled


def test_the_explorer_draws_a_small_machine_too() -> None:
    """A profile knows its pool; the map goes far beyond it."""
    tiny = replace(preset("rtx-4090"), step_time=MODELS, num_blocks=8, block_size=16)
    explorer = RouteExplorer({"tiny": tiny}, prefill_place="half", decode_place="half")
    for policy in explorer.policy.options:
        explorer.policy.value = policy
        assert explorer.decision.path in Path
    assert explorer.profile.num_blocks == 8


# --- the predictor ---------------------------------------------------------------------------------------------


def lengths(n: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    rng = random.Random(seed)
    for _ in range(n):
        prompt, mean = rng.choice([(20, 5.0), (200, 3.0)])
        yield prompt, max(1, round(rng.lognormvariate(mean, 0.6)))


def test_the_posterior_picture_shows_each_bucket_and_the_empty_ones_between() -> None:
    predictor = OutputLengthPredictor()
    with pytest.raises(ConfigError, match="seen no output"):
        draw_posterior(predictor, ax=canvas())
    seen = list(lengths(300))
    for prompt, output in seen:
        predictor.learn(prompt, output)
    ax = draw_posterior(predictor, seen, ax=canvas())
    bars = {bar.get_gid(): bar for bar in ax.patches}
    assert len(bars) == 4 * 3
    for bucket, prompt in ((4, 20), (7, 200), (5, 40)):
        low, high = predictor.distribution(prompt, 10**9).interval(0.8)
        bar = bars[f"80% of bucket {bucket}"]
        assert (bar.get_y(), bar.get_y() + bar.get_height()) == pytest.approx((low, high))
    labels = [text.get_text() for text in ax.get_xticklabels()]
    assert labels[0].startswith("16\n") and labels[1] == "32\n0" and labels[3].startswith("128\n")
    assert re.search(r"has (1[89]|2\d) to 1[3-6]\d tokens", ax.get_title(loc="left"))
    assert {"outputs seen", "50% of outputs", "80% of outputs", "95% of outputs"} <= set(legend(ax))


def test_the_coverage_picture_draws_what_was_counted() -> None:
    coverage = Coverage.of(OutputLengthPredictor(), lengths(800), nominal=(0.5, 0.9))
    assert coverage.count == 800 and coverage.worst < 0.06
    ax = draw_coverage({"synthetic": coverage}, ax=canvas())
    (line,) = (line for line in ax.lines if line.get_gid() == "coverage synthetic")
    assert list(zip(line.get_xdata(), line.get_ydata())) == list(zip(coverage.nominal, coverage.real))
    assert ax.get_title(loc="left") == f"Intervals keep their word to within {100 * coverage.worst:.1f} points"
    assert legend(ax)[1:] == [f"synthetic: off by at most {coverage.worst * 100:.1f} points"]


def test_a_wrong_predictor_is_seen_in_the_coverage() -> None:
    """Outputs that do not look like what was learnt fall out of the intervals."""
    predictor = OutputLengthPredictor()
    for _ in range(500):
        predictor.learn(20, 100)
    strange = Coverage.of(predictor, [(20, 5000)] * 20, nominal=(0.5,))
    assert strange.real == (0.0,)
    with pytest.raises(ConfigError, match="at least 1 length"):
        Coverage.of(predictor, [])
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_coverage({})
