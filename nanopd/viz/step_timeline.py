"""StepTimeline: step through the history of an engine, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets
from matplotlib.figure import Figure

from nanopd.errors import ConfigError
from nanopd.viz.live import LiveFigure, button
from nanopd.viz.style import ALERT_COLOR, bare_figure
from nanopd.viz.timeline import (
    RequestLike,
    StepLike,
    draw_steps,
    draw_timeline,
    first_time,
    row_height,
    spans,
    stamps_until,
)

MOST_NAMES = 6


class StepTimeline(LiveFigure):
    """The timeline up to a chosen step, the composition of every step, and in words what that step did.

    Args:
        requests: with their stamps.
        steps: the engine's step records, oldest first: collect them with ``on_step=history.append``. Both may still
            grow; `refresh` picks up what is new.
        budget: tokens per step, drawn as a line.
    """

    def __init__(
        self, requests: Sequence[RequestLike], steps: Sequence[StepLike], *, budget: int | None = None
    ) -> None:
        super().__init__()
        self.requests, self.steps, self.budget = requests, steps, budget
        self.slider = widgets.IntSlider(
            value=0, min=0, max=0, description="step", continuous_update=False, layout={"width": "600px"}
        )
        self.slider.observe(lambda _: self._show(), names="value")
        self.buttons = {"back": button("◀", lambda: self.move(-1)), "forward": button("▶", lambda: self.move(1))}
        self._widget = self.layout(widgets.HBox([self.slider, *self.buttons.values()]))
        self._show()

    @property
    def widget(self) -> widgets.Widget:
        return self._widget

    def move(self, by: int) -> None:
        """Go ``by`` steps forward (negative: back), as far as there are steps."""
        self.slider.value = min(max(self.slider.value + by, 0), self.slider.max)

    def goto(self, step: int) -> None:
        """Show step number ``step``. Shows a message if there is none."""
        self.attempt(lambda: self._goto(step))

    def queues(self, step: int) -> dict[str, list[str]]:
        """state -> ids of the requests that were in it when step number ``step`` ended."""
        now = self.steps[step].end
        found: dict[str, list[str]] = {"waiting": [], "prefilling": [], "transferring": [], "running": []}
        for request in self.requests:
            stamps = stamps_until(request.stamps, now)
            states = spans(stamps, now)
            if states and not any(stamp.event == "finished" for stamp in stamps):
                found[states[-1].state].append(request.request_id)
        return found

    def describe(self, step: int) -> str:
        """What step number ``step`` did, in words."""
        record = self.steps[step]
        plan = record.plan
        chunks = plan.chunks[plan.num_decodes :]
        parts = [f"{plan.num_decodes} decode tokens"] if plan.num_decodes else []
        parts += [f"{c.request.request_id}[{c.start}:{c.start + c.num_tokens}]" for c in chunks[:MOST_NAMES]]
        parts += [f"{len(chunks) - MOST_NAMES} more chunks"] if len(chunks) > MOST_NAMES else []
        text = f"Step {step}, {(record.end - record.start) * 1e3:.2f} ms: {' + '.join(parts) or 'nothing to compute'}."
        if plan.copies:
            text += f" {len(plan.copies)} blocks copied first."
        if plan.preempted:
            text += f" Preempted: {_names([r.request_id for r in plan.preempted])}."
        after = [f"{state} {_names(ids)}" for state, ids in self.queues(step).items() if ids]
        return f"{text} After it: {'; '.join(after) or 'all finished'}."

    def draw(self) -> Figure:
        self.slider.max = max(len(self.steps) - 1, 0)
        rows = row_height(len(self.requests)) * max(len(self.requests), 2)
        figure = bare_figure(10, 3.6 + rows)
        top, bottom = figure.subplots(2, 1, height_ratios=[0.9 + rows, 2.2])
        if not self.steps:
            draw_timeline(self.requests, ax=top)
            draw_steps([], budget=self.budget, ax=bottom)
            return figure
        step = self.slider.value
        record, origin = self.steps[step], first_time(self.requests, self.steps)
        draw_timeline(self.requests, until=record.end, origin=origin, ax=top)
        start, end = ((t - origin) * 1e3 for t in (record.start, record.end))
        top.axvspan(start, end, color=ALERT_COLOR, alpha=0.25, linewidth=0).set_gid("current step")
        top.set_xlim(0, max((self.steps[-1].end - origin) * 1e3, 1e-9))
        draw_steps(self.steps, current=step, budget=self.budget, ax=bottom)
        return figure

    def _show(self) -> None:
        self.say(self.describe(self.slider.value) if self.steps else "No step was recorded yet.")
        self.refresh()

    def _goto(self, step: int) -> None:
        if not 0 <= step < len(self.steps):
            raise ConfigError(f"there is no step {step}: {len(self.steps)} were recorded")
        self.slider.max = len(self.steps) - 1
        self.slider.value = step


def _names(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MOST_NAMES} more" if len(ids) > MOST_NAMES else ""
    return ", ".join(ids[:MOST_NAMES]) + more
