"""Exercises of notebook 10: the simulator. The next event, waiting times, the exposed part of transfers."""

from __future__ import annotations

import heapq
import random
from typing import Any

from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_close, expect_equal

# --- the next event --------------------------------------------------------------------------------------------


def next_event_stub(heap: list[list]) -> tuple[float, str] | None:
    """Take the next event off the heap and return its (time, what); None if there is none.

    heap: a heap, as heapq keeps it, of [time, number, what]. Events of equal times come in the order of their numbers.
    Where what is None, the event was called off: it is dropped, and does not count.
    """
    raise NotImplementedError


def next_event_solution(heap: list[list]) -> tuple[float, str] | None:
    """Take the next event off the heap and return its (time, what); None if there is none."""
    while heap:
        time, _, what = heapq.heappop(heap)
        if what is not None:
            return time, what
    return None


def _takes_the_end_of_the_list(heap: list[list]) -> tuple[float, str] | None:
    while heap:
        time, _, what = heap.pop()
        if what is not None:
            return time, what
    return None


def _only_looks(heap: list[list]) -> tuple[float, str] | None:
    left = [event for event in heap if event[2] is not None]
    return (min(left)[0], min(left)[2]) if left else None


def _carries_out_what_was_called_off(heap: list[list]) -> tuple[float, str] | None:
    if not heap:
        return None
    time, _, what = heapq.heappop(heap)
    return time, what


def _gives_up_at_what_was_called_off(heap: list[list]) -> tuple[float, str] | None:
    if not heap:
        return None
    time, _, what = heapq.heappop(heap)
    return None if what is None else (time, what)


def _latest_first_among_equals(heap: list[list]) -> tuple[float, str] | None:
    left = [event for event in heap if event[2] is not None]
    if not left:
        return None
    found = min(left, key=lambda event: (event[0], -event[1]))
    heap.remove(found)
    heapq.heapify(heap)
    return found[0], found[2]


def _takes_the_first_of_the_list(heap: list[list]) -> tuple[float, str] | None:
    while heap:
        time, _, what = heap.pop(0)
        if what is not None:
            return time, what
    return None


def _returns_the_whole_entry(heap: list[list]) -> Any:
    while heap:
        event = heapq.heappop(heap)
        if event[2] is not None:
            return event
    return None


def _test_next_event(answer: Any, rng: random.Random) -> None:
    def expect(title: str, events: list[list]) -> None:
        mine, right = [list(event) for event in events], [list(event) for event in events]
        heapq.heapify(mine)
        heapq.heapify(right)
        for taken in range(len(events) + 1):
            got, want = answer(mine), next_event_solution(right)
            got = tuple(got) if isinstance(got, list) else got
            if isinstance(got, tuple) and len(got) != 2:
                raise Wrong(f"{title}, call {taken + 1}: expected two items, (time, what), got {describe(got)}")
            expect_equal(got, want, f"{title}, call {taken + 1}")

    expect("an empty heap", [])
    expect("three events", [[2.0, 0, "b"], [1.0, 1, "a"], [3.0, 2, "c"]])
    expect("two at the same time", [[1.0, 0, "first"], [1.0, 1, "second"]])
    expect("the next one was called off", [[1.0, 0, None], [2.0, 1, "b"]])
    expect("all were called off", [[1.0, 0, None], [2.0, 1, None]])
    for _ in range(3):
        count = rng.randint(5, 20)
        expect(
            f"{count} random events",
            [[float(rng.randint(0, 6)), i, rng.choice([None, f"e{i}", f"e{i}"])] for i in range(count)],
        )


next_event = Exercise(
    notebook="10",
    name="next_event",
    title="What happens next?",
    test=_test_next_event,
    stub=next_event_stub,
    solution=next_event_solution,
    hints=(
        "`heapq.heappop(heap)` takes the smallest entry off. Lists compare item by item: time, then number.",
        "If what came off was called off, take another one. A `while heap:` loop ends when none is left.",
    ),
    mistakes=(
        Mistake(_takes_the_end_of_the_list, says="three events, call 1"),
        Mistake(_only_looks, says="three events, call 2"),
        Mistake(_carries_out_what_was_called_off, says="the next one was called off, call 1"),
        Mistake(_gives_up_at_what_was_called_off, says="the next one was called off, call 1"),
        Mistake(_latest_first_among_equals, says="two at the same time, call 1"),
        Mistake(_takes_the_first_of_the_list, says="random events"),
        Mistake(_returns_the_whole_entry, says="three events, call 1: expected two items"),
    ),
)

# --- waiting times by recursion --------------------------------------------------------------------------------


def lindley_stub(gaps_s: list[float], service_s: list[float]) -> list[float]:
    """How long each request waits, in seconds, before a single server begins with it. First come, first served.

    gaps_s[k]: time between the arrivals of requests k - 1 and k; gaps_s[0] is before the first one, which finds the
    server idle. service_s[k]: how long the server works on request k.
    """
    raise NotImplementedError


def lindley_solution(gaps_s: list[float], service_s: list[float]) -> list[float]:
    """How long each request waits, in seconds, before a single server begins with it. First come, first served."""
    waits = [0.0]
    for work, gap in zip(service_s, gaps_s[1:]):
        waits.append(max(0.0, waits[-1] + work - gap))
    return waits


def _waits_below_zero(gaps_s: list[float], service_s: list[float]) -> list[float]:
    waits = [0.0]
    for work, gap in zip(service_s, gaps_s[1:], strict=False):
        waits.append(waits[-1] + work - gap)
    return waits


def _gap_of_the_one_before(gaps_s: list[float], service_s: list[float]) -> list[float]:
    waits = [0.0]
    for work, gap in zip(service_s[:-1], gaps_s[:-1], strict=True):
        waits.append(max(0.0, waits[-1] + work - gap))
    return waits


def _only_the_last_one_delays(gaps_s: list[float], service_s: list[float]) -> list[float]:
    return [0.0, *(max(0.0, work - gap) for work, gap in zip(service_s, gaps_s[1:], strict=False))]


def _counts_the_own_service(gaps_s: list[float], service_s: list[float]) -> list[float]:
    return [wait + work for wait, work in zip(lindley_solution(gaps_s, service_s), service_s, strict=True)]


def _own_service_instead_of_the_last(gaps_s: list[float], service_s: list[float]) -> list[float]:
    waits = [0.0]
    for work, gap in zip(service_s[1:], gaps_s[1:], strict=True):
        waits.append(max(0.0, waits[-1] + work - gap))
    return waits


def _expect_all(got: Any, want: list[float], where: str) -> None:
    if not isinstance(got, list | tuple) or len(got) != len(want):
        raise Wrong(f"{where}: expected a list of {len(want)} numbers, got {describe(got)}")
    for index, (mine, right) in enumerate(zip(got, want, strict=True)):
        expect_close(mine, right, f"{where}: number {index}", atol=1e-9, rtol=1e-9)


def _test_lindley(answer: Any, rng: random.Random) -> None:
    def expect(gaps: list[float], service: list[float]) -> None:
        where = f"gaps {[round(g, 2) for g in gaps]}, service {[round(s, 2) for s in service]}"
        _expect_all(answer(list(gaps), list(service)), lindley_solution(gaps, service), where)

    expect([3.0], [1.0])
    expect([0.0, 5.0, 5.0], [1.0, 2.0, 1.0])  # nobody waits
    expect([0.0, 1.0, 1.0, 9.0], [4.0, 1.0, 0.5, 1.0])  # two wait, then the queue is empty again
    expect([2.0, 0.5, 4.0], [1.0, 3.0, 1.0])
    for _ in range(3):
        count = rng.randint(4, 20)
        expect([rng.expovariate(1.0) for _ in range(count)], [rng.expovariate(1.2) for _ in range(count)])


lindley = Exercise(
    notebook="10",
    name="lindley",
    title="How long does each request wait?",
    test=_test_lindley,
    stub=lindley_stub,
    solution=lindley_solution,
    hints=(
        "The first one waits 0. Go from each request to the next, and keep the list of waits so far.",
        "Request k leaves `waits[k] + service_s[k]` after it came. Request k + 1 comes `gaps_s[k + 1]` after it.",
        "The difference is the next one's wait. If it is negative, the server had become idle before: then it is 0.",
    ),
    mistakes=(
        Mistake(_waits_below_zero, says="gaps [0.0, 5.0, 5.0]"),
        Mistake(_gap_of_the_one_before, says="number 1: expected 0, got 1"),
        Mistake(_only_the_last_one_delays, says="gaps [0.0, 1.0, 1.0, 9.0]"),
        Mistake(_counts_the_own_service, says="number 0: expected 0, got 1"),
        Mistake(_own_service_instead_of_the_last, says="gaps [0.0, 1.0, 1.0, 9.0]"),
    ),
)

# --- the exposed part of transfers -----------------------------------------------------------------------------


def exposed_times_stub(steps: list[tuple[float, float, float]], gb_s: float, num_layers: int) -> list[float]:
    """For how long each step's transfer goes on after the step has ended, in seconds.

    steps: (start, end, bytes) of prefill steps, times in seconds, in the order in which their KV goes on the link. The
    bytes of a step are num_layers equal pieces; layer i = 0, 1, ... is ready at start + (i + 1) / num_layers * (end -
    start). One link carries one piece after the other, in order, at gb_s * 1e9 bytes per second.
    """
    raise NotImplementedError


def exposed_times_solution(steps: list[tuple[float, float, float]], gb_s: float, num_layers: int) -> list[float]:
    """For how long each step's transfer goes on after the step has ended, in seconds."""
    exposed, free = [], 0.0
    for start, end, num_bytes in steps:
        for layer in range(num_layers):
            ready = start + (layer + 1) / num_layers * (end - start)
            free = max(free, ready) + num_bytes / num_layers / (gb_s * 1e9)
        exposed.append(free - end)
    return exposed


def _a_link_of_ones_own(steps: list, gb_s: float, num_layers: int) -> list[float]:
    return [exposed_times_solution([step], gb_s, num_layers)[0] for step in steps]


def _all_at_the_start(steps: list, gb_s: float, num_layers: int) -> list[float]:
    exposed, free = [], 0.0
    for start, end, num_bytes in steps:
        free = max(free, start) + num_bytes / (gb_s * 1e9)
        exposed.append(free - end)
    return exposed


def _all_at_the_end(steps: list, gb_s: float, num_layers: int) -> list[float]:
    return exposed_times_solution(steps, gb_s, 1)


def _gibibytes(steps: list, gb_s: float, num_layers: int) -> list[float]:
    return exposed_times_solution(steps, gb_s * 1.073741824, num_layers)


def _when_it_arrives(steps: list, gb_s: float, num_layers: int) -> list[float]:
    exposed = exposed_times_solution(steps, gb_s, num_layers)
    return [late + end for late, (_, end, _) in zip(exposed, steps, strict=True)]


def _every_layer_is_ready_a_layer_early(steps: list, gb_s: float, num_layers: int) -> list[float]:
    exposed, free = [], 0.0
    for start, end, num_bytes in steps:
        for layer in range(num_layers):
            free = max(free, start + layer / num_layers * (end - start)) + num_bytes / num_layers / (gb_s * 1e9)
        exposed.append(free - end)
    return exposed


def _test_exposed_times(answer: Any, rng: random.Random) -> None:
    def expect(title: str, steps: list[tuple[float, float, float]], gb_s: float, num_layers: int) -> None:
        where = (
            f"{title}: steps {[tuple(round(x, 3) for x in step) for step in steps]}, {gb_s:g} GB/s, {num_layers} layers"
        )
        _expect_all(answer(list(steps), gb_s, num_layers), exposed_times_solution(steps, gb_s, num_layers), where)

    expect("one layer", [(0.0, 1.0, 2e9)], 4.0, 1)
    expect("a fast link", [(0.0, 1.0, 2e9)], 20.0, 4)
    expect("a slow link", [(0.0, 1.0, 2e9)], 0.5, 4)
    expect("two at once", [(0.0, 1.0, 2e9), (0.0, 1.0, 2e9)], 4.0, 2)
    expect("a pause between", [(0.0, 1.0, 1e9), (5.0, 6.0, 1e9)], 2.0, 4)
    for _ in range(3):
        steps, start = [], 0.0
        for _ in range(rng.randint(2, 6)):
            start += rng.uniform(0.0, 1.0)
            steps.append((start, start + rng.uniform(0.1, 1.0), rng.uniform(0.1e9, 2e9)))
        expect("random", steps, rng.choice([0.5, 2.0, 8.0]), rng.randint(2, 8))


exposed_times = Exercise(
    notebook="10",
    name="exposed_times",
    title="What does the link add?",
    test=_test_exposed_times,
    stub=exposed_times_stub,
    solution=exposed_times_solution,
    hints=(
        "Carry one number along through all steps and layers: when the link is free again. At the start that is 0.",
        "A piece leaves at `max(free, ready)`, and the link is free `num_bytes / num_layers / (gb_s * 1e9)` later.",
        "After the last layer of a step, `free` is when it arrived. The step's end has to be taken away.",
    ),
    mistakes=(
        Mistake(_a_link_of_ones_own, says="two at once"),
        Mistake(_all_at_the_start, says="one layer"),
        Mistake(_all_at_the_end, says="a fast link"),
        Mistake(_gibibytes, says="one layer"),
        Mistake(_when_it_arrives, says="one layer"),
        Mistake(_every_layer_is_ready_a_layer_early, says="one layer"),
    ),
)
