"""StepExplorer: put a step together, and see what it takes, what of, and what its decodes lose by its chunk."""

from __future__ import annotations

from collections.abc import Mapping

import ipywidgets as widgets
from matplotlib.figure import Figure

from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.hardware_profile import HardwareProfile
from nanopd.errors import ConfigError
from nanopd.viz.cost_model import LabelledStep, draw_step_terms
from nanopd.viz.live import LiveFigure
from nanopd.viz.style import bare_figure

TOKENS = (0, *(2**e for e in range(4, 12)))  # of the chunk: 16 to 2,048
CONTEXTS = tuple(2**e for e in range(4, 16))  # 16 to 32,768
BATCHES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


class StepExplorer(LiveFigure):
    """Sliders for a chunk and for the decodes beside it, over the step-time models of a few profiles.

    Args:
        profiles: by the name to show; those without a step-time model of their whole device are left out.

    Raises ConfigError if none is left.
    """

    def __init__(self, profiles: Mapping[str, HardwareProfile]) -> None:
        super().__init__()
        self.models = {name: profile.step_model() for name, profile in profiles.items() if profile.step_time}
        if not self.models:
            raise ConfigError(f"none of the profiles {sorted(profiles)} has a step-time model, at least 1 is needed")
        self.hardware = widgets.Dropdown(options=list(self.models), description="hardware")
        self.tokens = _slider("chunk", TOKENS, 512)
        self.start = _slider("behind", (0, *CONTEXTS), 0)
        self.batch = _slider("decodes", BATCHES, 16)
        self.context = _slider("context", CONTEXTS, 1024)
        for control in (self.hardware, self.tokens, self.start, self.batch, self.context):
            control.observe(lambda _: self._show(), names="value")
        self._widget = self.layout(
            self.hardware, widgets.HBox([self.tokens, self.start]), widgets.HBox([self.batch, self.context])
        )
        self._show()

    @property
    def widget(self) -> widgets.Widget:
        return self._widget

    @property
    def decodes(self) -> StepFeatures:
        """The step without its chunk."""
        return StepFeatures.decode(self.batch.value, self.batch.value * self.context.value)

    @property
    def chunk(self) -> StepFeatures:
        """The chunk in a step of its own."""
        return StepFeatures().with_chunk(self.tokens.value, self.start.value) if self.tokens.value else StepFeatures()

    @property
    def step(self) -> StepFeatures:
        return self.decodes.with_chunk(self.tokens.value, self.start.value) if self.tokens.value else self.decodes

    def draw(self) -> Figure:
        figure = bare_figure(9, 4)
        model = self.models[self.hardware.value]
        steps = [
            LabelledStep("decodes alone", self.decodes),
            LabelledStep("chunk alone", self.chunk),
            LabelledStep("both in one step", self.step),
        ]
        draw_step_terms(model, steps, ax=figure.add_subplot())
        return figure

    def _show(self) -> None:
        if not self.step.num_tokens:
            self.say("An empty step: choose a chunk or some decodes.", problem=True)
            return  # the last picture stays
        model = self.models[self.hardware.value]
        both, apart = model.step_ms(self.step), model.step_ms(self.decodes) + model.step_ms(self.chunk)
        text = f"The step takes {both:.3g} ms"
        if self.tokens.value and self.batch.value:
            text += f"; one after the other, {apart:.3g} ms. Each of its decodes"
            text += f" waits {model.interference_ms(self.step):.3g} ms longer than without the chunk"
        self.say(text + ".")
        self.refresh()


def _slider(name: str, options: tuple[int, ...], value: int) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(options=options, value=value, description=name, continuous_update=False)
