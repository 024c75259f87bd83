"""Timeline: spans read off stamps, and bars, ticks and marks that are those spans; the step widget."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import matplotlib
import pytest
from matplotlib.axes import Axes

matplotlib.use("Agg")

from fake_runner import FakeRunner

from nanopd.engine.engine import StepRecord
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler, SchedulerConfig
from nanopd.kv.block_manager import BlockManager
from nanopd.viz import StepTimeline, draw_steps, draw_timeline, spans
from nanopd.viz.style import bare_figure
from nanopd.viz.timeline import Span, chunk_spans


class S(NamedTuple):
    time: float
    event: str
    num_tokens: int = 0


@dataclass
class R:
    request_id: str
    stamps: Sequence[S]


@dataclass
class Plan:
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    chunks: list[Any] = field(default_factory=list)
    preempted: list[Any] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Step:
    start: float
    end: float
    plan: Plan


PREEMPTED = [
    S(1.0, "arrived", 9),
    S(1.5, "waiting"),
    S(2.0, "prefilling"),
    S(2.0, "chunk_start", 9),
    S(3.0, "chunk", 9),
    S(3.0, "running"),
    S(3.0, "token", 1),
    S(3.5, "token", 1),
    S(4.0, "preempted", 10),
    S(5.0, "prefilling"),
    S(5.0, "chunk_start", 11),
    S(6.0, "chunk", 11),
    S(6.0, "running"),
    S(6.0, "token", 1),
    S(6.0, "finished"),
]


def canvas() -> Axes:
    return bare_figure(10, 4).add_subplot()


def bars(ax: Axes) -> dict[str, list[tuple[float, float]]]:
    """gid -> (start, end) in ms of each bar."""
    found: dict[str, list[tuple[float, float]]] = {}
    for patch in ax.patches:
        if patch.get_gid():
            box = patch.get_bbox()
            found.setdefault(patch.get_gid(), []).append((round(box.x0, 6), round(box.x1, 6)))
    return found


def test_spans_of_a_request_that_was_preempted() -> None:
    assert spans(PREEMPTED) == [
        Span("waiting", 1.0, 2.0),
        Span("prefilling", 2.0, 3.0),
        Span("running", 3.0, 4.0),
        Span("waiting", 4.0, 5.0),
        Span("prefilling", 5.0, 6.0),
        Span("running", 6.0, 6.0),
    ]
    assert chunk_spans(PREEMPTED) == [Span("chunk", 2.0, 3.0, 9), Span("chunk", 5.0, 6.0, 11)]


def test_a_state_that_has_not_ended_reaches_to_the_end_of_the_picture() -> None:
    stamps = PREEMPTED[:8]
    assert spans(stamps)[-1] == Span("running", 3.0, 3.5)
    assert spans(stamps, until=9.0)[-1] == Span("running", 3.0, 9.0)
    assert spans([]) == []


def test_transferring_is_a_state_of_its_own() -> None:
    stamps = [S(0, "arrived"), S(1, "prefilling"), S(2, "transferring"), S(3, "running"), S(4, "finished")]
    assert [(s.state, s.start) for s in spans(stamps)] == [
        ("waiting", 0), ("prefilling", 1), ("transferring", 2), ("running", 3)
    ]  # fmt: skip


def test_a_chunk_that_was_cut_off_by_preemption_is_not_drawn() -> None:
    stamps = [S(0, "chunk_start", 5), S(1, "preempted"), S(2, "chunk_start", 5), S(3, "chunk", 5)]
    assert chunk_spans(stamps) == [Span("chunk", 2, 3, 5)]


def test_what_is_drawn_is_what_was_stamped() -> None:
    ax = draw_timeline(
        [R("a", PREEMPTED), R("b", [S(1.2, "arrived"), S(1.2, "waiting")])], title="finding", ax=canvas()
    )
    assert bars(ax) == {
        "a waiting": [(0, 1000), (3000, 4000)],
        "a prefilling": [(1000, 2000), (4000, 5000)],
        "a running": [(2000, 3000), (5000, 5000)],
        "a chunk 9": [(1000, 2000)],
        "a chunk 11": [(4000, 5000)],
        "b waiting": [(200, 5000)],
    }
    ticks = {c.get_gid(): [segment[0][0] for segment in c.get_segments()] for c in ax.collections}
    assert ticks == {"a tokens": [2000, 2500, 5000], "b tokens": []}
    marks = {line.get_gid(): list(line.get_xdata()) for line in ax.lines if line.get_gid()}
    assert marks["a preempted"] == [3000] and marks["a finished"] == [5000] and marks["b finished"] == []
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.get_xlabel() == "time (ms)" and ax.get_title(loc="left") == "finding"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["waiting", "prefilling", "running", "prefill chunk", "token", "preempted", "finished"]


def test_nothing_after_the_chosen_time_is_drawn() -> None:
    ax = draw_timeline([R("a", PREEMPTED)], until=3.2, ax=canvas())
    assert bars(ax)["a running"] == [(2000, 2200)]
    assert [len(c.get_segments()) for c in ax.collections] == [1]


def test_no_requests_and_many_requests_can_be_drawn() -> None:
    draw_timeline([], ax=canvas())
    many = [R(f"r{i}", PREEMPTED[:8]) for i in range(100)]
    assert len(draw_timeline(many, ax=canvas()).get_yticklabels()) <= 40


def test_step_bars_are_decodes_below_prefills() -> None:
    steps = [Step(0, 1, Plan(0, 24)), Step(1, 2, Plan(3, 20)), Step(2, 3, Plan(4, 0))]
    ax = draw_steps(steps, current=1, budget=32, ax=canvas())
    decodes, prefills = ax.containers
    assert [bar.get_height() for bar in decodes] == [0, 3, 4]
    assert [(bar.get_y(), bar.get_height()) for bar in prefills] == [(0, 24), (3, 20), (4, 0)]
    assert [line.get_ydata()[0] for line in ax.lines if line.get_gid() == "budget"] == [32]
    assert bars(ax)["current step"] == [(0.5, 1.5)]


def test_a_long_history_of_steps_is_drawn_as_two_outlines() -> None:
    steps = [Step(i, i + 1, Plan(i % 5, i % 7)) for i in range(400)]
    decodes, totals = (p.get_data() for p in draw_steps(steps, ax=canvas()).patches)
    assert list(decodes.values) == list(totals.baseline) == [i % 5 for i in range(400)]
    assert list(totals.values) == [i % 5 + i % 7 for i in range(400)]


# --- with a real scheduler ------------------------------------------------------------------------------------------


def run_engine() -> tuple[list[Request], list[StepRecord]]:
    """Requests of all lengths in a pool that is too small, so that some are preempted; time passes step by step."""
    manager = BlockManager(24, 4)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, chunk_size=10, max_model_len=90)
    scheduler, runner = Scheduler(config, manager), FakeRunner(24, 4)
    requests = [
        Request(f"r{i}", range(1, 5 + 7 * i), SamplingParams(max_tokens=8 + i, ignore_eos=True), arrival_time=0.001 * i)
        for i in range(7)
    ]
    for request in requests:
        scheduler.add(request, 0.01)
    now, steps = 0.01, []
    while scheduler.has_unfinished:
        plan, start = scheduler.schedule(now), now
        tokens = runner.execute(plan)
        now += 0.002 + 1e-4 * plan.num_tokens
        scheduler.update(plan, tokens, now)
        lengths = (len(scheduler.waiting), len(scheduler.prefilling), len(scheduler.running))
        steps.append(StepRecord(start, now, plan, *lengths))
    return requests, steps


@pytest.fixture(scope="module")
def history() -> tuple[list[Request], list[StepRecord]]:
    return run_engine()


def test_queues_read_off_stamps_are_the_queues_that_the_engine_had(
    history: tuple[list[Request], list[StepRecord]],
) -> None:
    requests, steps = history
    assert any(record.plan.preempted for record in steps), "the workload should preempt somebody"
    widget = StepTimeline(requests, steps)
    for i, record in enumerate(steps):
        queues = widget.queues(i)
        found = (len(queues["waiting"]), len(queues["prefilling"]), len(queues["running"]))
        assert found == (record.num_waiting, record.num_prefilling, record.num_running), f"step {i}"


def test_step_widget_moves_and_stops_at_both_ends(history: tuple[list[Request], list[StepRecord]]) -> None:
    requests, steps = history
    widget = StepTimeline(requests, steps, budget=24)
    assert widget.slider.max == len(steps) - 1 and "Step 0" in widget.status.value
    widget.buttons["back"].click()
    assert widget.slider.value == 0
    widget.buttons["forward"].click()
    assert widget.slider.value == 1 and "Step 1" in widget.status.value
    widget.move(10_000)
    assert widget.slider.value == len(steps) - 1 and "all finished" in widget.status.value
    number = next(i for i, record in enumerate(steps) if record.plan.preempted)
    widget.goto(number)
    assert f"Preempted: {steps[number].plan.preempted[0].request_id}" in widget.status.value
    top, bottom = widget.figure.axes  # type: ignore[union-attr]
    assert bars(bottom)["current step"] == [(number - 0.5, number + 0.5)]
    assert [bar.get_height() for bar in bottom.containers[0]] == [record.plan.num_decodes for record in steps]
    (start, end) = bars(top)["current step"][0]
    origin = min(stamp.time for request in requests for stamp in request.stamps)
    assert start == pytest.approx((steps[number].start - origin) * 1e3)
    assert end == pytest.approx((steps[number].end - origin) * 1e3)


def test_step_widget_shows_a_message_for_a_step_that_does_not_exist(
    history: tuple[list[Request], list[StepRecord]],
) -> None:
    requests, steps = history
    widget = StepTimeline(requests, steps)
    widget.goto(len(steps))
    assert "there is no step" in widget.status.value and widget.slider.value == 0


def test_step_widget_can_begin_before_the_engine_does(history: tuple[list[Request], list[StepRecord]]) -> None:
    requests: list[Request] = []
    steps: list[StepRecord] = []
    widget = StepTimeline(requests, steps)
    assert "No step was recorded yet" in widget.status.value
    requests += history[0]
    steps += history[1]
    widget.refresh()
    assert widget.slider.max == len(steps) - 1


def test_viz_imports_no_torch() -> None:
    code = (
        "import sys, matplotlib\n"
        "matplotlib.use('Agg')\n"
        "from nanopd import viz\n"
        "for name in viz.__all__: getattr(viz, name)\n"
        "viz.BlockTableExplorer().add(5)\n"
        "viz.draw_roofline(1, 1); viz.draw_timeline([]); viz.draw_steps([])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
