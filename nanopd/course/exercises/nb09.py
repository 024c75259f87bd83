"""Exercises of notebook 09: the serving benchmark. A late sender, counting what became of all, the next rate to try."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_close, expect_equal

# --- a late sender ---------------------------------------------------------------------------------------------


def felt_latencies_stub(due_s: list[float], service_s: list[float]) -> list[float]:
    """Each request's latency in seconds, as its user feels it.

    due_s: when each request should be sent, ascending. service_s: how long the server works on it.
    The client has one connection: it sends a request when it is due, or as soon as the answer to the one before has
    come, whichever is later. The user counts from the moment when the request was due.
    """
    raise NotImplementedError


def felt_latencies_solution(due_s: list[float], service_s: list[float]) -> list[float]:
    """Each request's latency in seconds, as its user feels it."""
    latencies, free = [], 0.0
    for due, service in zip(due_s, service_s):
        sent = max(due, free)
        free = sent + service
        latencies.append(free - due)
    return latencies


def _counts_from_the_send(due_s: list[float], service_s: list[float]) -> list[float]:
    return list(service_s)


def _never_late(due_s: list[float], service_s: list[float]) -> list[float]:
    ends = [due + service for due, service in zip(due_s, service_s, strict=True)]
    return [end - due + max(0.0, before - due) for due, end, before in zip(due_s, ends, [0.0, *ends], strict=False)]


def _never_idle(due_s: list[float], service_s: list[float]) -> list[float]:
    free, found = due_s[0], []
    for due, service in zip(due_s, service_s, strict=True):
        free += service
        found.append(free - due)
    return found


def _only_the_lateness(due_s: list[float], service_s: list[float]) -> list[float]:
    whole = felt_latencies_solution(due_s, service_s)
    return [latency - service for latency, service in zip(whole, service_s, strict=True)]


def _test_felt_latencies(answer: Any, rng: random.Random) -> None:
    def expect(due: list[float], service: list[float]) -> None:
        want = felt_latencies_solution(due, service)
        got = answer(list(due), list(service))
        where = f"due {[round(d, 2) for d in due]}, service {[round(s, 2) for s in service]}"
        if not isinstance(got, list | tuple) or len(got) != len(want):
            raise Wrong(f"{where}: expected a list of {len(want)} latencies, got {describe(got)}")
        for index, (mine, right) in enumerate(zip(got, want, strict=True)):
            expect_close(mine, right, f"{where}: request {index}", atol=1e-9, rtol=1e-9)

    expect([0.0, 5.0, 9.0], [1.0, 2.0, 1.0])  # nobody waits
    expect([0.0, 1.0, 2.0], [3.0, 0.5, 0.5])  # a stall: the first keeps the two behind it
    expect([1.0, 1.0, 1.0, 1.0], [1.0] * 4)  # all at once
    for _ in range(3):
        due = sorted(rng.uniform(0, 10) for _ in range(rng.randint(1, 12)))
        expect(due, [rng.choice([0.1, 0.5, 4.0]) * rng.random() for _ in due])


felt_latencies = Exercise(
    notebook="09",
    name="felt_latencies",
    title="What do users feel while the sender is late?",
    test=_test_felt_latencies,
    stub=felt_latencies_stub,
    solution=felt_latencies_solution,
    hints=(
        "Carry one number along: when the connection is free again. At the start that is 0.",
        "A request is sent at `max(due, free)`. Then the connection is free at `sent + service`.",
        "The answer comes at that moment. The user's clock started at `due`, not at `sent`.",
    ),
    mistakes=(
        Mistake(_counts_from_the_send, says="request 1: expected 2.5, got 0.5"),
        Mistake(_never_late, says="request 2: expected 2, got"),
        Mistake(_never_idle, says="due [0.0, 5.0, 9.0]"),
        Mistake(_only_the_lateness, says="request 0: expected 1, got 0"),
    ),
)

# --- what became of all ----------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a request ended."""

    outcome: str  # "completed", "refused", "timed out", "failed" or "unfinished"
    ttft_s: float = math.inf  # infinite: no first token came
    tpot_s: float | None = None  # None also for an answer of one token: there is no gap to measure


def tally_stub(requests: list[Ended], ttft_limit_s: float, tpot_limit_s: float) -> tuple[int, dict[str, int], float]:
    """(completed, dropped by outcome, attainment).

    Dropped are all that did not complete; only outcomes that occur are in the dict. Attainment is the share of *all*
    requests that completed within both limits, each included. An answer of one token cannot miss the TPOT limit.
    """
    raise NotImplementedError


def tally_solution(
    requests: list[Ended], ttft_limit_s: float, tpot_limit_s: float
) -> tuple[int, dict[str, int], float]:
    """(completed, dropped by outcome, attainment)."""
    done = [request for request in requests if request.outcome == "completed"]
    dropped = Counter(request.outcome for request in requests if request.outcome != "completed")
    met = sum(
        request.ttft_s <= ttft_limit_s and (request.tpot_s is None or request.tpot_s <= tpot_limit_s)
        for request in done
    )
    return len(done), dict(dropped), met / len(requests)


def _share_of_the_completed(requests: list, ttft_limit_s: float, tpot_limit_s: float) -> tuple:
    completed, dropped, attainment = tally_solution(requests, ttft_limit_s, tpot_limit_s)
    return completed, dropped, attainment * len(requests) / completed if completed else 0.0


def _limits_one_by_one(requests: list, ttft_limit_s: float, tpot_limit_s: float) -> tuple:
    completed, dropped, _ = tally_solution(requests, ttft_limit_s, tpot_limit_s)
    ttft = tally_solution(requests, ttft_limit_s, math.inf)[2]
    tpot = tally_solution(requests, math.inf, tpot_limit_s)[2]
    return completed, dropped, min(ttft, tpot)


def _one_token_misses(requests: list, ttft_limit_s: float, tpot_limit_s: float) -> tuple:
    strict = [r if r.tpot_s is not None else r._replace(tpot_s=math.inf) for r in requests]
    return tally_solution(strict, ttft_limit_s, tpot_limit_s)


def _counts_drops_that_had_begun(requests: list, ttft_limit_s: float, tpot_limit_s: float) -> tuple:
    completed, dropped, _ = tally_solution(requests, ttft_limit_s, tpot_limit_s)
    begun = [r._replace(outcome="completed") if r.ttft_s < math.inf else r for r in requests]
    return completed, dropped, tally_solution(begun, ttft_limit_s, tpot_limit_s)[2]


def _limits_excluded(requests: list, ttft_limit_s: float, tpot_limit_s: float) -> tuple:
    return tally_solution(requests, ttft_limit_s * (1 - 1e-12), tpot_limit_s * (1 - 1e-12))


def _only_timeouts_are_drops(requests: list, ttft_limit_s: float, tpot_limit_s: float) -> tuple:
    completed, dropped, attainment = tally_solution(requests, ttft_limit_s, tpot_limit_s)
    return completed, {k: v for k, v in dropped.items() if k == "timed out"}, attainment


def _drops_without_their_reasons(requests: list, ttft_limit_s: float, tpot_limit_s: float) -> tuple:
    completed, dropped, attainment = tally_solution(requests, ttft_limit_s, tpot_limit_s)
    return completed, sum(dropped.values()), attainment


def _test_tally(answer: Any, rng: random.Random) -> None:
    def expect(what: str, requests: list[Ended], ttft: float = 1.0, tpot: float = 0.1) -> None:
        got, want = answer(list(requests), ttft, tpot), tally_solution(requests, ttft, tpot)
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise Wrong(f"{what}: expected (completed, dropped, attainment), got {describe(got)}")
        expect_equal(got[0], want[0], f"{what}: completed")
        if not isinstance(got[1], Mapping):
            raise Wrong(f"{what}: dropped: expected a dict, here {want[1]}, got {describe(got[1])}")
        expect_equal(dict(got[1]), want[1], f"{what}: dropped")
        expect_close(got[2], want[2], f"{what}: attainment", atol=1e-9)

    good = Ended("completed", 0.5, 0.05)
    expect("all within the limits", [good] * 4)
    expect("exactly at both limits", [Ended("completed", 1.0, 0.1)])
    expect("one of two refused", [good, Ended("refused")])
    expect("a timeout after a quick first token", [good, Ended("timed out", 0.2, 0.01)])
    expect("one misses TTFT, another one TPOT", [good, Ended("completed", 2.0, 0.05), Ended("completed", 0.5, 0.2)])
    expect("answers of one token", [Ended("completed", 0.5), Ended("completed", 2.0)])
    for _ in range(3):
        count, names = rng.randint(1, 40), ("completed",) * 4 + ("refused", "timed out", "failed", "unfinished")
        requests = [
            Ended(name, rng.uniform(0, 2), rng.choice([None, rng.uniform(0, 0.2)]))
            if name == "completed"
            else Ended(name)
            for name in rng.choices(names, k=count)
        ]
        expect(f"{count} random requests", requests)


tally = Exercise(
    notebook="09",
    name="tally",
    title="What became of all requests?",
    test=_test_tally,
    stub=tally_stub,
    solution=tally_solution,
    hints=(
        'Two groups: `outcome == "completed"`, and all others. `collections.Counter` counts the others by outcome.',
        "A request attains if it completed *and* met TTFT *and* met TPOT. Test both limits on the same request.",
        "Divide by all requests, `len(requests)`. A user whose request was dropped did not get what was promised.",
    ),
    mistakes=(
        Mistake(_share_of_the_completed, says="one of two refused: attainment: expected 0.5, got 1"),
        Mistake(_limits_one_by_one, says="one misses TTFT, another one TPOT"),
        Mistake(_one_token_misses, says="answers of one token"),
        Mistake(_counts_drops_that_had_begun, says="a timeout after a quick first token"),
        Mistake(_limits_excluded, says="exactly at both limits"),
        Mistake(_only_timeouts_are_drops, says="one of two refused: dropped"),
        Mistake(_drops_without_their_reasons, says="dropped: expected a dict"),
    ),
)

# --- the next rate to try --------------------------------------------------------------------------------------


def next_rate_stub(attainment: dict[float, float], target: float, tolerance: float) -> float | None:
    """The rate to measure next, or None if the search is over.

    attainment: by rate, what was measured so far. A rate passes if its attainment is at least target. The bracket
    reaches from the highest rate that passes *below all that fail* to the lowest that fails; it is narrow enough if
    its upper end is at most 1 + tolerance times the lower one. Else try its middle, on a logarithmic scale. Without
    such a bracket (nothing fails, or nothing passes below what fails) there is nothing to halve: None.
    """
    raise NotImplementedError


def next_rate_solution(attainment: dict[float, float], target: float, tolerance: float) -> float | None:
    """The rate to measure next, or None if the search is over."""
    high = min((rate for rate, share in attainment.items() if share < target), default=None)
    if high is None:
        return None
    low = max((rate for rate in attainment if rate < high), default=None)
    if low is None or high <= low * (1 + tolerance):
        return None
    return math.sqrt(low * high)


def _arithmetic_middle(attainment: dict[float, float], target: float, tolerance: float) -> float | None:
    middle = next_rate_solution(attainment, target, tolerance)
    if middle is None:
        return None
    high = min(rate for rate, share in attainment.items() if share < target)
    return (max(rate for rate in attainment if rate < high) + high) / 2


def _trusts_islands(attainment: dict[float, float], target: float, tolerance: float) -> float | None:
    low = max((rate for rate, share in attainment.items() if share >= target), default=None)
    high = min((rate for rate, share in attainment.items() if share < target and rate > (low or 0)), default=None)
    if low is None or high is None or high <= low * (1 + tolerance):
        return None
    return math.sqrt(low * high)


def _must_exceed_the_target(attainment: dict[float, float], target: float, tolerance: float) -> float | None:
    return next_rate_solution(attainment, target + 1e-9, tolerance)


def _never_ends(attainment: dict[float, float], target: float, tolerance: float) -> float | None:
    return next_rate_solution(attainment, target, 0.0)


def _absolute_tolerance(attainment: dict[float, float], target: float, tolerance: float) -> float | None:
    middle = next_rate_solution(attainment, target, 0.0)
    if middle is None:
        return None
    high = min(rate for rate, share in attainment.items() if share < target)
    low = max(rate for rate in attainment if rate < high)
    return None if high - low <= tolerance else middle


def _goes_below_the_lowest(attainment: dict[float, float], target: float, tolerance: float) -> float | None:
    if attainment and all(share < target for share in attainment.values()):
        return min(attainment) / 2
    return next_rate_solution(attainment, target, tolerance)


def _test_next_rate(answer: Any, rng: random.Random) -> None:
    def expect(what: str, attainment: dict[float, float], target: float = 0.9, tolerance: float = 0.1) -> None:
        got, want = answer(dict(attainment), target, tolerance), next_rate_solution(attainment, target, tolerance)
        where = f"{what}: {attainment}, target {target}, tolerance {tolerance}"
        if want is None or got is None:
            expect_equal(got, want, where)
        else:
            expect_close(got, want, where, rtol=1e-9)

    expect("one passes, one fails", {1.0: 1.0, 16.0: 0.2})
    expect("narrow enough", {10.0: 0.95, 10.9: 0.8})
    expect("large rates, narrow enough", {100.0: 0.95, 109.0: 0.8})
    expect("exactly on target", {1.0: 0.9, 4.0: 0.1})
    expect("an island", {1.0: 1.0, 4.0: 0.7, 8.0: 0.95, 32.0: 0.1})
    expect("nothing fails", {1.0: 1.0, 4.0: 0.97})
    expect("nothing passes", {2.0: 0.5, 4.0: 0.1})
    for _ in range(4):
        rates = sorted(rng.uniform(0.5, 50) for _ in range(rng.randint(1, 6)))
        shares = sorted((round(rng.random() ** 0.3, 2) for _ in rates), reverse=True)
        measured = list(zip((round(rate, 2) for rate in rates), shares, strict=True))
        rng.shuffle(measured)  # in the order in which they ran
        expect("random", dict(measured), 0.9, rng.choice([0.02, 0.3]))


next_rate = Exercise(
    notebook="09",
    name="next_rate",
    title="Which rate should be measured next?",
    test=_test_next_rate,
    stub=next_rate_stub,
    solution=next_rate_solution,
    hints=(
        "Upper end of the bracket: the *lowest* rate whose attainment is below the target. If none fails, return None.",
        "Lower end: the highest rate below that one. It passes, since the lowest that fails is above it.",
        "The middle on a logarithmic scale is `math.sqrt(low * high)`: as many times above `low` as below `high`.",
    ),
    mistakes=(
        Mistake(_arithmetic_middle, says="one passes, one fails"),
        Mistake(_trusts_islands, says="an island"),
        Mistake(_must_exceed_the_target, says="exactly on target"),
        Mistake(_never_ends, says="narrow enough"),
        Mistake(_absolute_tolerance, says="narrow enough"),
        Mistake(_goes_below_the_lowest, says="nothing passes"),
    ),
)
