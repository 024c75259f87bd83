"""RooflineExplorer: move batch, context and prompt, and watch where decode and prefill land under the roof."""

from __future__ import annotations

import ipywidgets as widgets
from matplotlib.figure import Figure

from nanopd.viz.live import LiveFigure
from nanopd.viz.roofline import ModelShape, RooflinePoint, Work, decode_work, draw_roofline, prefill_work
from nanopd.viz.style import DECODE_COLOR, PREFILL_COLOR, bare_figure


class RooflineExplorer(LiveFigure):
    """Sliders over the counted work of one model on one device.

    Args:
        config: the model's counts, such as `nanopd.model.ModelConfig`.
        copy_gb_s, matmul_tflop_s: measured ceilings of the device.
        dtype_bytes: of weights and KV.
    """

    def __init__(
        self,
        config: ModelShape,
        copy_gb_s: float,
        matmul_tflop_s: float,
        *,
        dtype_bytes: int = 2,
        device: str = "",
        max_context: int = 32768,
    ) -> None:
        super().__init__()
        self.config, self.dtype_bytes, self.device = config, dtype_bytes, device
        self.copy_gb_s, self.matmul_tflop_s = copy_gb_s, matmul_tflop_s
        most = max(1, max_context.bit_length() - 1)
        self.batch = _log2_slider("batch", 0, 9, 3)
        self.context = _log2_slider("context", 0, most, min(10, most))
        self.prompt = _log2_slider("prompt", 0, most, min(10, most))
        for slider in (self.batch, self.context, self.prompt):
            slider.observe(lambda _: self._show(), names="value")
        # The axes must not move with the sliders, or the points would seem to stand still.
        extremes = [decode_work(config, b, c, dtype_bytes) for b in (1, 2**9) for c in (1, 2**most)]
        extremes += [prefill_work(config, p, dtype_bytes=dtype_bytes) for p in (1, 2**most)]
        self.span = (min(work.intensity for work in extremes), max(work.intensity for work in extremes))
        self._widget = self.layout(widgets.HBox([self.batch, self.context, self.prompt]))
        self._show()

    @property
    def widget(self) -> widgets.Widget:
        return self._widget

    @property
    def decode(self) -> Work:
        return decode_work(self.config, self.batch.value, self.context.value, self.dtype_bytes)

    @property
    def prefill(self) -> Work:
        return prefill_work(self.config, self.prompt.value, dtype_bytes=self.dtype_bytes)

    def draw(self) -> Figure:
        figure = bare_figure(8.5, 5)
        points = [
            RooflinePoint(f"decode, batch {self.batch.value}", self.decode.intensity, color=DECODE_COLOR),
            RooflinePoint(f"prefill, {self.prompt.value} tokens", self.prefill.intensity, color=PREFILL_COLOR),
        ]
        ceilings = (self.copy_gb_s, self.matmul_tflop_s)
        draw_roofline(*ceilings, points, span=self.span, device=self.device, ax=figure.add_subplot())
        return figure

    def _show(self) -> None:
        self.say(f"At least: {self._describe('decode step', self.decode)}; {self._describe('prefill', self.prefill)}.")
        self.refresh()

    def _describe(self, name: str, work: Work) -> str:
        ms = work.seconds(self.copy_gb_s, self.matmul_tflop_s) * 1e3
        bound = "memory" if work.is_memory_bound(self.copy_gb_s, self.matmul_tflop_s) else "compute"
        return (
            f"{name} {ms:.3g} ms ({bound}-bound: {work.num_bytes / 1e9:.3g} GB, {work.flops / 1e12:.3g} TFLOP,"
            f" {work.intensity:.3g} FLOP/byte)"
        )


def _log2_slider(name: str, low: int, high: int, start: int) -> widgets.SelectionSlider:
    """A slider over powers of two."""
    return widgets.SelectionSlider(
        options=[2**e for e in range(low, high + 1)], value=2**start, description=name, continuous_update=False
    )
