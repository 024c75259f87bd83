"""What happened to each request, and what each step was made of, read off the stamps and step records of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from nanopd.viz.style import ALERT_COLOR, DECODE_COLOR, INK, PAPER, PHASE_COLORS, PREFILL_COLOR, axes_for, styled, tint

BAR = 0.62  # height of a request's bar, in rows
SCHEDULING = frozenset({"prefilling", "chunk_start", "preempted"})  # stamped when a step is planned
MOST_BARS = 150  # steps drawn as bars of their own
MOST_NAMED = 40  # requests whose name is written beside their row


class StampLike(Protocol):
    @property
    def time(self) -> float: ...
    @property
    def event(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...


class RequestLike(Protocol):
    """A `nanopd.engine.Request`, or anything with its name and its stamps."""

    @property
    def request_id(self) -> str: ...
    @property
    def stamps(self) -> Sequence[Any]: ...  # StampLike


class PlanLike(Protocol):
    @property
    def num_decodes(self) -> int: ...
    @property
    def num_prefill_tokens(self) -> int: ...
    @property
    def chunks(self) -> Sequence[Any]: ...
    @property
    def preempted(self) -> Sequence[Any]: ...
    @property
    def copies(self) -> Sequence[tuple[int, int]]: ...


class StepLike(Protocol):
    """A `nanopd.engine.StepRecord`: what ``on_step`` of an engine is called with."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def plan(self) -> Any: ...  # PlanLike


@dataclass(frozen=True)
class Span:
    """A stretch of time that a request spent in one state (``waiting``, ``prefilling``, ...) or in a chunk's step."""

    state: str
    start: float  # seconds, the clock of the stamps
    end: float
    num_tokens: int = 0  # of a chunk


def spans(stamps: Iterable[StampLike], until: float | None = None) -> list[Span]:
    """The states that ``stamps`` pass through. One that has not ended ends at ``until`` (default: the last stamp).

    Waiting begins when the request arrived, which may be before the engine knew of it.
    """
    found: list[Span] = []
    state, since, last = None, 0.0, None
    for stamp in stamps:
        last = stamp.time
        entered = "waiting" if stamp.event in ("arrived", "preempted") else stamp.event
        if entered == state or (entered not in PHASE_COLORS and entered != "finished"):
            continue
        if state is not None:
            found.append(Span(state, since, stamp.time))
        state, since = entered if entered != "finished" else None, stamp.time
    if state is not None and last is not None:
        found.append(Span(state, since, max(last if until is None else until, since)))
    return found


def chunk_spans(stamps: Iterable[StampLike]) -> list[Span]:
    """The prefill chunks: from ``chunk_start`` to the next ``chunk``. A preempted one has no end and is left out."""
    found: list[Span] = []
    started = None
    for stamp in stamps:
        if stamp.event == "chunk_start":
            started = stamp.time
        elif stamp.event == "chunk" and started is not None:
            found.append(Span("chunk", started, stamp.time, stamp.num_tokens))
            started = None
    return found


def stamps_until(stamps: Iterable[StampLike], end: float) -> list[StampLike]:
    """What was stamped until a step ended at ``end``.

    What a scheduler stamps at that very moment belongs to the next step: with a virtual clock, or back-to-back steps,
    one step starts when the other ends.
    """
    return [s for s in stamps if s.time < end or (s.time == end and s.event not in SCHEDULING)]


def times_of(stamps: Iterable[StampLike], event: str) -> list[float]:
    return [stamp.time for stamp in stamps if stamp.event == event]


def first_time(requests: Sequence[RequestLike], steps: Sequence[StepLike] = ()) -> float:
    """Where the time axis begins: the earliest stamp or step; 0 if there is none."""
    return min([s.time for r in requests for s in r.stamps] + [step.start for step in steps], default=0.0)


def draw_timeline(
    requests: Sequence[RequestLike],
    *,
    until: float | None = None,
    origin: float | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One row per request: its states as bars, its prefill chunks as darker boxes, its tokens as ticks.

    A red mark is a preemption, a black one the end. Time is in ms since ``origin`` (default: the first stamp); states
    that have not ended reach to ``until``, the end of a step in seconds of the stamps' clock (default: the last stamp).
    """
    origin = first_time(requests) if origin is None else origin
    rows = [list(r.stamps) if until is None else stamps_until(r.stamps, until) for r in requests]
    if until is None:
        until = max((stamp.time for stamps in rows for stamp in stamps), default=origin)
    with styled():
        ax = axes_for(ax, (10, 1.6 + row_height(len(requests)) * max(len(requests), 2)))
        for row, (request, stamps) in enumerate(zip(requests, rows, strict=True)):
            _row(ax, row, request.request_id, stamps, origin, until)
        named = range(0, len(requests), -(-len(requests) // MOST_NAMED) or 1)
        ax.set_yticks(named, [requests[row].request_id for row in named])
        ax.set_ylim(max(len(requests), 1) - 0.4, -0.6)
        ax.set_xlim(0, max((until - origin) * 1e3, 1e-9) * 1.02)
        ax.grid(False, axis="y")
        ax.set_xlabel("time (ms)")
        ax.set_ylabel("request")
        _timeline_legend(ax, requests)
        if title:
            ax.set_title(title, pad=30)  # above the legend
    return ax


def row_height(num_requests: int) -> float:
    """Inches per request: enough for its name while they all fit on a screen, less if there are many."""
    return min(0.34, 11 / max(num_requests, 1))


def _row(ax: Axes, row: int, name: str, stamps: Sequence[StampLike], origin: float, until: float) -> None:
    def ms(seconds: float) -> float:
        return (seconds - origin) * 1e3

    for span in spans(stamps, until):
        face = tint(PHASE_COLORS[span.state], 0.55)
        _bar(ax, row, ms(span.start), ms(span.end), f"{name} {span.state}", facecolor=face, linewidth=0)
    for chunk in chunk_spans(stamps):
        style = {"facecolor": PREFILL_COLOR, "edgecolor": PAPER, "linewidth": 0.8}
        _bar(ax, row, ms(chunk.start), ms(chunk.end), f"{name} chunk {chunk.num_tokens}", **style)
    tokens = [ms(t) for t in times_of(stamps, "token")]
    ticks = ax.vlines(tokens, row - BAR / 2, row + BAR / 2, color=DECODE_COLOR, linewidth=1.1)
    ticks.set_gid(f"{name} tokens")
    for event, marker, color in (("preempted", "X", ALERT_COLOR), ("finished", "|", INK)):
        at = [ms(t) for t in times_of(stamps, event)]
        (marks,) = ax.plot(
            at, [row] * len(at), marker, color=color, markersize=9, markeredgewidth=2 if marker == "|" else 0
        )
        marks.set_gid(f"{name} {event}")


def _bar(ax: Axes, row: int, start: float, end: float, gid: str, **style: Any) -> None:
    ax.add_patch(Rectangle((start, row - BAR / 2), end - start, BAR, gid=gid, **style))


def _timeline_legend(ax: Axes, requests: Sequence[RequestLike]) -> None:
    seen = {s.event for r in requests for s in r.stamps}
    handles: list[Any] = [
        Patch(facecolor=tint(color, 0.55), label=state) for state, color in PHASE_COLORS.items() if state in seen
    ]
    if "chunk" in seen:
        handles.append(Patch(facecolor=PREFILL_COLOR, label="prefill chunk"))
    if "token" in seen:
        tick = Line2D(
            [], [], color=DECODE_COLOR, marker="|", linestyle="", markersize=10, markeredgewidth=1.4, label="token"
        )
        handles.append(tick)
    if any(s.event == "preempted" for r in requests for s in r.stamps):
        handles.append(Line2D([], [], color=ALERT_COLOR, marker="X", linestyle="", markersize=8, label="preempted"))
    if "finished" in seen:
        handles.append(Line2D([], [], color=INK, marker="|", linestyle="", markersize=10, label="finished"))
    if handles:
        ax.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=7, handlelength=1.2, columnspacing=1.2
        )


def draw_steps(
    steps: Sequence[StepLike],
    *,
    current: int | None = None,
    budget: int | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One bar per step: its decode tokens, and on top of them its prefill tokens.

    ``current`` is the step to point out; ``budget`` the token budget of a step, drawn as a line.
    """
    with styled():
        ax = axes_for(ax, (10, 3))
        decodes = [step.plan.num_decodes for step in steps]
        prefills = [step.plan.num_prefill_tokens for step in steps]
        _stack(ax, decodes, prefills)
        if budget is not None:
            ax.axhline(budget, color=INK, linestyle="--", linewidth=1.2, label=f"budget: {budget} tokens").set_gid(
                "budget"
            )
        if current is not None:
            ax.axvspan(current - 0.5, current + 0.5, color=ALERT_COLOR, alpha=0.25, linewidth=0).set_gid("current step")
        ax.set_xlim(-0.6, max(len(steps), 1) - 0.4)
        ax.set_xlabel("step")
        ax.set_ylabel("tokens in the step")
        ax.grid(False, axis="x")
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1.0), ncols=3)
        if title:
            ax.set_title(title)
    return ax


def _stack(ax: Axes, decodes: list[int], prefills: list[int]) -> None:
    """Decodes below prefills: one bar each, or one outline each where bars would be too thin to see."""
    decode: dict[str, Any] = {"color": DECODE_COLOR, "label": "decode"}
    prefill: dict[str, Any] = {"color": PREFILL_COLOR, "label": "prefill"}
    if len(decodes) <= MOST_BARS:
        ax.bar(range(len(decodes)), decodes, 0.85, **decode)
        ax.bar(range(len(decodes)), prefills, 0.85, bottom=decodes, **prefill)
        return
    edges = [number - 0.5 for number in range(len(decodes) + 1)]
    total = [a + b for a, b in zip(decodes, prefills, strict=True)]
    ax.stairs(decodes, edges, fill=True, **decode)
    ax.stairs(total, edges, baseline=decodes, fill=True, **prefill)
