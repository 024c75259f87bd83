"""When layers compute and when their KV travels: measured or predicted timelines as bars, and a link of any speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import ipywidgets as widgets
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nanopd.errors import ConfigError
from nanopd.transfer.timeline import LayerTimeline, Span, overlap_timeline
from nanopd.viz.live import LiveFigure
from nanopd.viz.style import ALERT_COLOR, INK, PAPER, PHASE_COLORS, PREFILL_COLOR, axes_for, bare_figure, styled, tint

TRANSFER_COLOR = PHASE_COLORS["transferring"]
MOST_NUMBERED = 16  # layers whose number fits into their bars
SLOWEST, FASTEST = 4.0, 0.02  # the widget's range: transfers from this many times the prefill's time to this many


def draw_transfer_timeline(
    lines: LayerTimeline | Mapping[str, LayerTimeline],
    *,
    until_ms: float | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Two rows per timeline: a bar per layer that computes, below it a bar per piece that travels.

    The red line ends the prefill, the hatched stretch behind it is what the transfer adds.

    Args:
        lines: one timeline, or several by name, drawn from top to bottom.
        until_ms: where the time axis ends; None: behind the last bar.

    Raises ConfigError if there is nothing to draw.
    """
    named = {"": lines} if isinstance(lines, LayerTimeline) else dict(lines)
    if not named or not all(line.compute for line in named.values()):
        raise ConfigError(f"a picture needs at least one timeline with at least one layer, got {list(named)}")
    with styled():
        ax = axes_for(ax, (9, 1.4 + 1.1 * len(named)))
        end = max(line.total_ms for line in named.values()) * 1.3 if until_ms is None else until_ms
        ticks = []
        for row, (name, line) in enumerate(named.items()):
            top = -2.6 * row
            _bars(ax, line.compute, top, PREFILL_COLOR, f"{name} compute", len(line.compute))
            _bars(ax, line.transfer, top - 1, TRANSFER_COLOR, f"{name} transfer", len(line.compute))
            _exposed(ax, line, top, name, end)
            ticks += [(top, f"{name} compute".strip()), (top - 1, "transfer")]
        ax.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
        ax.set_xlim(0, end)
        ax.set_ylim(min(y for y, _ in ticks) - 0.7, 0.7)
        ax.grid(False, axis="y")
        ax.set_xlabel("time since the first layer began (ms)")
        handles = [
            Patch(facecolor=PREFILL_COLOR, label="a layer computes"),
            Patch(facecolor=TRANSFER_COLOR, label="its KV travels"),
            Patch(facecolor="none", edgecolor=ALERT_COLOR, hatch="///", label="added by the transfer"),
        ]
        ax.figure.legend(handles=handles, loc="outside lower center", ncols=3)
        if title:
            ax.set_title(title)
    return ax


class TransferTimelineWidget(LiveFigure):
    """A prefill, a link whose speed is a slider, and what streaming layer by layer makes of the two.

    Drawn from ``nanopd.transfer.timeline.overlap_timeline``: exact arithmetic on the given times, no measurement.

    Args:
        compute_ms: of each layer, such as a measured prefill over the number of layers.
        layer_bytes: KV of the prompt in one layer.
        gb_s: where the slider begins; None: where a layer travels as long as it computes.
        latency_ms: of the link.
    """

    def __init__(
        self, compute_ms: Sequence[float], layer_bytes: int, *, gb_s: float | None = None, latency_ms: float = 0.0
    ) -> None:
        super().__init__()
        self.compute_ms, self.layer_bytes, self.latency_ms = list(compute_ms), layer_bytes, latency_ms
        prefill = math.fsum(compute_ms)
        if layer_bytes <= 0 or prefill <= 0:
            raise ConfigError(f"the widget needs bytes and times above 0, got {layer_bytes} bytes and {prefill} ms")
        balanced = layer_bytes * len(self.compute_ms) / prefill / 1e6  # GB/s
        self.until_ms = prefill * (1 + SLOWEST) + latency_ms  # fixed, or bars would seem to stand still
        low, high = math.log10(balanced / SLOWEST), math.log10(balanced / FASTEST)
        start = min(max(balanced if gb_s is None else gb_s, 10**low), 10**high)
        self.slider = widgets.FloatLogSlider(
            value=start,
            min=low,
            max=high,
            step=(high - low) / 100,
            description="link, GB/s",
            readout_format=".3g",
            continuous_update=False,
            layout={"width": "600px"},
        )
        self.slider.observe(lambda _: self._show(), names="value")
        self._widget = self.layout(self.slider)
        self._show()

    @property
    def widget(self) -> widgets.Widget:
        return self._widget

    @property
    def lines(self) -> dict[str, LayerTimeline]:
        """Both timelines at the slider's speed."""
        return {
            name: overlap_timeline(
                self.compute_ms, self.layer_bytes, self.slider.value, latency_ms=self.latency_ms, streamed=streamed
            )
            for name, streamed in (("streamed:", True), ("at the end:", False))
        }

    def draw(self) -> Figure:
        figure = bare_figure(9, 3.6)
        draw_transfer_timeline(self.lines, until_ms=self.until_ms, ax=figure.add_subplot())
        return figure

    def _show(self) -> None:
        streamed, serial = self.lines.values()
        layer_ms = self.layer_bytes / self.slider.value / 1e6
        self.say(
            f"At {self.slider.value:.3g} GB/s a layer's KV travels {layer_ms:.3g} ms and a layer computes"
            f" {streamed.compute_ms / len(self.compute_ms):.3g} ms. Sent at the end, the transfer adds"
            f" {serial.exposed_ms:.3g} ms to a prefill of {serial.compute_ms:.3g} ms;"
            f" streamed, {streamed.exposed_ms:.3g} ms: {streamed.hidden_share:.0%} of it is hidden."
        )
        self.refresh()


def _bars(ax: Axes, spans: Sequence[Span], y: float, color: str, gid: str, num_layers: int) -> None:
    """Neighbours in two shades, so that they can be told apart; numbered if there are few, one piece a layer."""
    for i, span in enumerate(spans):
        shade = color if i % 2 == 0 else tint(color, 0.65)
        (bar,) = ax.barh(y, span.ms, left=span.begin, height=0.8, color=shade)
        bar.set_gid(f"{gid.strip()} {i}")
        if len(spans) == num_layers <= MOST_NUMBERED and span.ms > 0:
            ax.text(span.begin + span.ms / 2, y, str(i), ha="center", va="center", color=INK, fontsize=9, clip_on=True)


def _exposed(ax: Axes, line: LayerTimeline, top: float, name: str, end: float) -> None:
    ax.plot([line.compute_ms] * 2, [top - 1.45, top + 0.45], color=ALERT_COLOR, linewidth=1.5)
    if line.exposed_ms > 0:
        (bar,) = ax.barh(
            top, line.exposed_ms, left=line.compute_ms, height=0.8, facecolor="none", edgecolor=ALERT_COLOR, hatch="///"
        )
        bar.set_gid(f"{name} exposed".strip())
        label = f" +{line.exposed_ms:.3g} ms, {line.hidden_share:.0%} hidden"
        text = ax.text(min(line.total_ms, 0.77 * end), top, label, va="center", color=ALERT_COLOR, weight="bold")
        text.set_bbox({"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 1})
