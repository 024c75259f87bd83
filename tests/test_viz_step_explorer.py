"""StepExplorer: its sliders make the step that is drawn and described."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
import pytest

matplotlib.use("Agg")

from nanopd.costmodel import HardwareProfile, StepFeatures, StepTimeModel
from nanopd.errors import ConfigError
from nanopd.viz import StepExplorer

TOY = HardwareProfile(
    "toy", "m", "float32", 1.0, 1.0, 1.0, 1.0, 1, step_time={"whole device": StepTimeModel(4.0, 0.01)}
)  # fmt: skip
BARE = replace(TOY, step_time={})


def totals(explorer: StepExplorer) -> list[str]:
    assert explorer.figure is not None
    return [text.get_text() for text in explorer.figure.axes[0].texts]


def test_sliders_make_the_step() -> None:
    explorer = StepExplorer({"toy": TOY, "bare": BARE})
    assert explorer.hardware.options == ("toy",)
    explorer.tokens.value, explorer.start.value, explorer.batch.value, explorer.context.value = 64, 128, 8, 256
    assert explorer.step == StepFeatures.decode(8, 2048).with_chunk(64, 128)
    # 4 ms and 0.01 ms per token: 8 decodes, the chunk, both; together the 4 ms are paid once.
    assert totals(explorer) == ["4.08 ms", "4.64 ms", "4.72 ms"]
    assert "takes 4.72 ms" in explorer.status.value
    assert "one after the other, 8.72 ms" in explorer.status.value
    assert "waits 0.64 ms longer" in explorer.status.value


def test_a_step_without_a_chunk_disturbs_nobody_and_an_empty_one_is_refused() -> None:
    explorer = StepExplorer({"toy": TOY})
    explorer.tokens.value = 0
    assert "longer" not in explorer.status.value
    before = totals(explorer)
    explorer.batch.value = 0
    assert "An empty step" in explorer.status.value
    assert totals(explorer) == before


def test_without_any_model_there_is_nothing_to_explore() -> None:
    with pytest.raises(ConfigError, match=r"\['bare'\] has a step-time model"):
        StepExplorer({"bare": BARE})
