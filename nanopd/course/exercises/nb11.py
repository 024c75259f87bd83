"""Exercises of notebook 11: a decision. Which of two ways kept more promises, and at which promise that changes."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nanopd.bench.metrics import SLO
from nanopd.bench.records import Outcome, RequestRecord
from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_equal

# --- which way kept more ---------------------------------------------------------------------------------------


def decide_stub(together: list[bool], apart: list[bool], z: float) -> str:
    """Which way kept more promises: "together", "apart", or "too close" if it may be chance.

    together[i], apart[i]: whether request i got what was promised, served the one way and the other. The requests are
    the same, in the same order, so only those that fared differently tell the ways apart. Let n be their number. If a
    coin decided who keeps each of these, one way would be ahead of the other by sqrt(n) or so (the standard deviation).
    A way wins if it is ahead by more than z times sqrt(n).
    """
    raise NotImplementedError


def decide_solution(together: list[bool], apart: list[bool], z: float) -> str:
    """Which way kept more promises: "together", "apart", or "too close" if it may be chance."""
    only_together = sum(a and not b for a, b in zip(together, apart))
    only_apart = sum(b and not a for a, b in zip(together, apart))
    if abs(only_apart - only_together) <= z * math.sqrt(only_apart + only_together):
        return "too close"
    return "apart" if only_apart > only_together else "together"


def _more_is_better(together: Sequence[bool], apart: Sequence[bool], z: float) -> str:
    ahead = sum(apart) - sum(together)
    return "too close" if ahead == 0 else "apart" if ahead > 0 else "together"


def _all_requests_are_coins(together: Sequence[bool], apart: Sequence[bool], z: float) -> str:
    ahead = sum(apart) - sum(together)
    if abs(ahead) <= z * math.sqrt(len(together)):
        return "too close"
    return "apart" if ahead > 0 else "together"


def _not_the_root(together: Sequence[bool], apart: Sequence[bool], z: float) -> str:
    ahead = sum(apart) - sum(together)
    differ = sum(a != b for a, b in zip(together, apart, strict=True))
    if abs(ahead) <= z * differ:
        return "too close"
    return "apart" if ahead > 0 else "together"


def _the_wrong_way_round(together: Sequence[bool], apart: Sequence[bool], z: float) -> str:
    return decide_solution(list(apart), list(together), z)


def _ahead_by_just_enough(together: Sequence[bool], apart: Sequence[bool], z: float) -> str:
    ahead = sum(apart) - sum(together)
    differ = sum(a != b for a, b in zip(together, apart, strict=True))
    if abs(ahead) < z * math.sqrt(differ):
        return "too close"
    return "apart" if ahead >= 0 else "together"


def _only_apart_can_win(together: Sequence[bool], apart: Sequence[bool], z: float) -> str:
    ahead = sum(apart) - sum(together)
    differ = sum(a != b for a, b in zip(together, apart, strict=True))
    return "apart" if ahead > z * math.sqrt(differ) else "too close"


def _kept(both: int, only_together: int, only_apart: int, neither: int) -> list[tuple[bool, bool]]:
    """(together, apart) of so many requests."""
    return (
        [(True, True)] * both
        + [(True, False)] * only_together
        + [(False, True)] * only_apart
        + [(False, False)] * neither
    )


def _test_decide(answer: Any, rng: random.Random) -> None:
    def expect(title: str, pairs: list[tuple[bool, bool]], z: float) -> None:
        rng.shuffle(pairs)
        together, apart = [a for a, _ in pairs], [b for _, b in pairs]
        only_together, only_apart = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
        where = (
            f"{title}: of {len(pairs)} requests {only_together} kept only together, {only_apart} only apart, z = {z:g}"
        )
        got = answer(list(together), list(apart), z)
        if not isinstance(got, str):
            raise Wrong(f"{where}: expected 'together', 'apart' or 'too close', got {describe(got)}")
        expect_equal(got, decide_solution(together, apart, z), where)

    expect("all alike", _kept(20, 0, 0, 3), 2.0)
    expect("clearly apart", _kept(10, 1, 15, 2), 2.0)
    expect("clearly together", _kept(10, 15, 1, 2), 2.0)
    expect("one request more", _kept(30, 3, 4, 0), 2.0)
    expect("many alike, few differ", _kept(80, 0, 9, 11), 2.0)
    expect("just z deviations", _kept(5, 0, 4, 0), 2.0)
    for _ in range(4):
        pairs = _kept(rng.randint(0, 40), rng.randint(0, 12), rng.randint(0, 12), rng.randint(0, 20))
        expect("random", pairs, rng.choice([1.0, 1.645, 2.0]))


decide = Exercise(
    notebook="11",
    name="decide",
    title="Which way kept more, or is it too close to call?",
    test=_test_decide,
    stub=decide_stub,
    solution=decide_solution,
    hints=(
        "Count two kinds of requests: those that were kept only together, and those that were kept only apart. "
        "`zip(together, apart)` gives the pairs.",
        "n is the sum of both counts, and the lead is their difference. Requests that fared alike are in neither.",
        "If the lead is at most `z * math.sqrt(n)`, it is too close. That also answers n = 0. Else the larger wins.",
    ),
    mistakes=(
        Mistake(_more_is_better, says="one request more"),
        Mistake(_all_requests_are_coins, says="many alike, few differ"),
        Mistake(_not_the_root, says="clearly apart"),
        Mistake(_the_wrong_way_round, says="clearly apart"),
        Mistake(_ahead_by_just_enough, says="all alike"),
        Mistake(_only_apart_can_win, says="clearly together"),
    ),
)

# --- the promise at which the answer changes -------------------------------------------------------------------


def flip_promise_stub(
    together: list[RequestRecord], apart: list[RequestRecord], ttft_s: float, grid: list[float]
) -> float | None:
    """The smallest TPOT promise of the grid, in seconds, from which on `together` keeps at least as many requests.

    "From on" means: at this promise and at every larger one of the grid. None if at the largest it still keeps fewer.
    The records are of the same requests, served the one way and the other; the TTFT promise stays as it is. The grid
    is in any order. SLO(ttft_s, tpot_s).met_by(record) says whether a request got both.
    """
    raise NotImplementedError


def flip_promise_solution(
    together: list[RequestRecord], apart: list[RequestRecord], ttft_s: float, grid: list[float]
) -> float | None:
    """The smallest TPOT promise of the grid, in seconds, from which on `together` keeps at least as many requests."""
    flip = None
    for tpot_s in sorted(grid, reverse=True):
        promise = SLO(ttft_s, tpot_s)
        if sum(map(promise.met_by, together)) < sum(map(promise.met_by, apart)):
            break
        flip = tpot_s
    return flip


def _down(
    promises: Iterable[float],
    together: Sequence[RequestRecord],
    apart: Sequence[RequestRecord],
    ttft_s: float,
    too_few: Callable[[int, int], bool],
) -> float | None:
    """The last of the promises before ``too_few(kept together, kept apart)``."""
    flip = None
    for tpot_s in promises:
        promise = SLO(ttft_s, tpot_s)
        if too_few(sum(map(promise.met_by, together)), sum(map(promise.met_by, apart))):
            break
        flip = tpot_s
    return flip


def _first_of_the_grid(
    together: Sequence[RequestRecord], apart: Sequence[RequestRecord], ttft_s: float, grid: Sequence[float]
) -> float | None:
    for tpot_s in sorted(grid):
        promise = SLO(ttft_s, tpot_s)
        if sum(map(promise.met_by, together)) >= sum(map(promise.met_by, apart)):
            return tpot_s
    return None


def _trusts_the_order(
    together: Sequence[RequestRecord], apart: Sequence[RequestRecord], ttft_s: float, grid: Sequence[float]
) -> float | None:
    return _down(reversed(grid), together, apart, ttft_s, operator.lt)


def _forgets_ttft(
    together: Sequence[RequestRecord], apart: Sequence[RequestRecord], ttft_s: float, grid: Sequence[float]
) -> float | None:
    return flip_promise_solution(list(together), list(apart), 1e9, list(grid))


def _must_keep_more(
    together: Sequence[RequestRecord], apart: Sequence[RequestRecord], ttft_s: float, grid: Sequence[float]
) -> float | None:
    return _down(sorted(grid, reverse=True), together, apart, ttft_s, operator.le)


def _the_last_before(
    together: Sequence[RequestRecord], apart: Sequence[RequestRecord], ttft_s: float, grid: Sequence[float]
) -> float | None:
    """The largest at which it still keeps fewer: one too early."""
    flip = flip_promise_solution(list(together), list(apart), ttft_s, list(grid))
    below = [tpot_s for tpot_s in grid if flip is None or tpot_s < flip]
    return max(below, default=flip)


def _record(index: int, ttft_s: float, tpot_s: float | None, outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
    tokens = 0 if outcome is not Outcome.COMPLETED else 1 if tpot_s is None else 20
    return RequestRecord(index, float(index), 100, max(tokens, 1), outcome, ttft_s=ttft_s, tpot_s=tpot_s, tokens=tokens)


def _test_flip_promise(answer: Any, rng: random.Random) -> None:
    def expect(
        title: str, together: list[RequestRecord], apart: list[RequestRecord], ttft_s: float, grid: list[float]
    ) -> None:
        got = answer(list(together), list(apart), ttft_s, list(grid))
        want = flip_promise_solution(together, apart, ttft_s, grid)
        counts = ", ".join(
            f"{1e3 * tpot_s:g} ms: {sum(map(SLO(ttft_s, tpot_s).met_by, together))} and "
            f"{sum(map(SLO(ttft_s, tpot_s).met_by, apart))}"
            for tpot_s in sorted(grid)
        )
        where = f"{title}, TTFT {ttft_s:g} s; kept together and apart at {counts}"
        if got is not None and not isinstance(got, int | float):
            raise Wrong(f"{where}: expected a promise of the grid or None, got {describe(got)}")
        expect_equal(got, want, where)

    def both(ttfts: list[float], tpots: list[float]) -> list[RequestRecord]:
        return [_record(i, *times) for i, times in enumerate(zip(ttfts, tpots, strict=True))]

    grid = [0.01, 0.02, 0.03, 0.04]
    quick, slow = both([0.1] * 4, [0.005, 0.012, 0.013, 0.014]), both([0.1] * 4, [0.015, 0.022, 0.023, 0.024])
    expect("as many at the end", slow, quick, 1.0, grid)
    expect("always", quick, slow, 1.0, grid)
    late = both([0.1, 3.0, 3.0, 3.0], [0.015, 0.016, 0.017, 0.018])
    expect("late first tokens apart", slow, late, 1.0, grid)
    expect("never", late, quick, 1.0, grid)
    # Ahead at the tightest promise, then behind, then ahead again.
    early, middle = both([0.1] * 4, [0.005, 0.025, 0.026, 0.027]), both([0.1] * 4, [0.015, 0.016, 0.017, 0.05])
    expect("ahead, behind, ahead", early, middle, 1.0, grid)
    expect("a grid that is not sorted", early, middle, 1.0, [0.03, 0.01, 0.04, 0.02])
    for _ in range(4):
        count, ways = rng.randint(3, 20), []
        for typical in (rng.uniform(0.015, 0.03), rng.uniform(0.01, 0.02)):
            outcomes = [Outcome.UNFINISHED if rng.random() < 0.1 else Outcome.COMPLETED for _ in range(count)]
            ways.append(
                [
                    _record(i, rng.uniform(0, 1.2), None if rng.random() < 0.1 else rng.gauss(typical, 0.004), outcome)
                    for i, outcome in enumerate(outcomes)
                ]
            )
        some = rng.sample([round(0.002 * k, 3) for k in range(3, 25)], 8)
        expect("random", ways[0], ways[1], 1.0, some)


flip_promise = Exercise(
    notebook="11",
    name="flip_promise",
    title="At which promise does the answer change?",
    test=_test_flip_promise,
    stub=flip_promise_stub,
    solution=flip_promise_solution,
    hints=(
        "At one promise: `sum(map(SLO(ttft_s, tpot_s).met_by, together))` requests are kept together.",
        "Go from the largest promise down (`sorted(grid, reverse=True)`), as long as together keeps at least as many.",
        "Remember the last promise at which that held. If it does not hold at the largest one, that is None.",
    ),
    mistakes=(
        Mistake(_first_of_the_grid, says="kept together and apart"),
        Mistake(_trusts_the_order, says="a grid that is not sorted"),
        Mistake(_forgets_ttft, says="late first tokens apart"),
        Mistake(_must_keep_more, says="as many at the end"),
        Mistake(_the_last_before, says="as many at the end"),
    ),
)
