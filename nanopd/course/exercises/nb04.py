"""Exercises of notebook 04: the scheduler. Steps until the first token, latencies from stamps, whom to preempt."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, NamedTuple

from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_close, expect_equal

# --- steps until the first token -------------------------------------------------------------------------------


def steps_to_first_token_stub(prompts: list[int], num_readers: int, budget: int, chunk_size: int) -> list[int]:
    """For each prompt, the number of the step (1, 2, ...) whose end brings its first token.

    prompts: their lengths in tokens, in order of arrival; all are there before step 1.
    Each step takes one token of each running request, of which num_readers are there from the start and none ever
    ends. Then it takes prompt tokens, first come, first served: at most chunk_size, and at most what is left of
    budget. A prompt that was computed to its end runs from the next step on.
    """
    raise NotImplementedError


def steps_to_first_token_solution(prompts: list[int], num_readers: int, budget: int, chunk_size: int) -> list[int]:
    """For each prompt, the number of the step (1, 2, ...) whose end brings its first token."""
    first_token: list[int] = []
    missing, step, num_running = list(prompts), 0, num_readers
    while len(first_token) < len(prompts):
        step += 1
        left = min(chunk_size, budget - num_running)
        while left > 0 and len(first_token) < len(prompts):
            current = len(first_token)  # the oldest prompt that is not computed yet
            taken = min(left, missing[current])
            missing[current] -= taken
            left -= taken
            if missing[current] == 0:
                first_token.append(step)
        num_running = num_readers + len(first_token)
    return first_token


def _oldest_first(
    prompts: list[int], num_readers: int, budget: int, chunk_size: int, *, share: bool = True, grow: bool = True
) -> list[int]:
    """The rule, with switches for its mistakes: one prompt per step, newcomers that never count as running."""
    found: list[int] = []
    queue, step = deque(prompts), 0
    while queue:
        step += 1
        left = min(chunk_size, budget - num_readers - (len(found) if grow else 0))
        while queue and left > 0:
            taken = min(left, queue[0])
            queue[0] -= taken
            left -= taken
            if queue[0]:
                break
            queue.popleft()
            found.append(step)
            if not share:
                break
    return found


def _one_prompt_per_step(prompts: list[int], num_readers: int, budget: int, chunk_size: int) -> list[int]:
    return _oldest_first(prompts, num_readers, budget, chunk_size, share=False)


def _newcomers_never_run(prompts: list[int], num_readers: int, budget: int, chunk_size: int) -> list[int]:
    return _oldest_first(prompts, num_readers, budget, chunk_size, grow=False)


def _ignores_the_budget(prompts: list[int], num_readers: int, budget: int, chunk_size: int) -> list[int]:
    return _oldest_first(prompts, 0, 10**9, chunk_size, grow=False)


def _chunk_size_for_each(prompts: list[int], num_readers: int, budget: int, chunk_size: int) -> list[int]:
    return [-(-prompt // min(chunk_size, budget - num_readers)) for prompt in prompts]


def _counts_from_zero(prompts: list[int], num_readers: int, budget: int, chunk_size: int) -> list[int]:
    return [step - 1 for step in steps_to_first_token_solution(prompts, num_readers, budget, chunk_size)]


def _test_steps_to_first_token(answer: Any, rng: random.Random) -> None:
    def expect(prompts: list[int], readers: int, budget: int, chunk: int, want: list[int]) -> None:
        where = f"prompts {prompts}, {readers} readers, budget {budget}, chunk_size {chunk}"
        expect_equal(answer(list(prompts), readers, budget, chunk), want, where)

    # By hand. The last two: 4 tokens left beside 4 readers, then 3 beside 5.
    expect([100], 0, 512, 32, [4])
    expect([10, 10, 10], 0, 512, 32, [1, 1, 1])
    expect([40, 10], 0, 512, 32, [2, 2])
    expect([8], 4, 8, 64, [2])
    expect([4, 7], 4, 8, 64, [1, 4])
    for _ in range(4):
        prompts = [rng.randint(1, rng.choice([3, 40, 300])) for _ in range(rng.randint(1, 6))]
        readers = rng.randint(0, 20)
        budget, chunk = readers + len(prompts) + rng.randint(0, 30), rng.choice([1, 7, 16, 64, 256])
        want = steps_to_first_token_solution(prompts, readers, budget, chunk)
        expect(prompts, readers, budget, chunk, want)


steps_to_first_token = Exercise(
    notebook="04",
    name="steps_to_first_token",
    title="In which step does each prompt get its first token?",
    test=_test_steps_to_first_token,
    stub=steps_to_first_token_stub,
    solution=steps_to_first_token_solution,
    hints=(
        "Play it step by step. What is left for prompts in a step: `min(chunk_size, budget - num_running)`.",
        "Spend it on the oldest prompt that is not finished; if that one ends and something is left, go on with the "
        "next one *in the same step*.",
        "A prompt that was computed to its end counts as running from the next step on, so `num_running` grows by one "
        "and everybody behind it gets a little less.",
    ),
    mistakes=(
        Mistake(_one_prompt_per_step, says="prompts [10, 10, 10]"),
        Mistake(_newcomers_never_run, says="prompts [4, 7]"),
        Mistake(_ignores_the_budget, says="4 readers, budget 8"),
        Mistake(_chunk_size_for_each, says="prompts [40, 10]"),
        Mistake(_counts_from_zero, says="expected 4, got 3"),
    ),
)

# --- latencies from stamps -------------------------------------------------------------------------------------


class Stamped(NamedTuple):
    """As `nanopd.engine.Stamp`."""

    time: float
    event: str
    num_tokens: int = 0


def latencies_stub(stamps: list) -> tuple[float | None, float | None]:
    """(TTFT, TPOT) of one request, in seconds, from its stamps (time, event, num_tokens), oldest first.

    TTFT: from the request's arrival to its first token. TPOT: the mean time between tokens, first to last.
    None for what did not happen: no token, or fewer than two.
    """
    raise NotImplementedError


def latencies_solution(stamps: list) -> tuple[float | None, float | None]:
    """(TTFT, TPOT) of one request, in seconds, from its stamps (time, event, num_tokens), oldest first."""
    arrived = next(stamp.time for stamp in stamps if stamp.event == "arrived")
    tokens = [stamp.time for stamp in stamps if stamp.event == "token"]
    ttft = tokens[0] - arrived if tokens else None
    tpot = (tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else None
    return ttft, tpot


def _tokens_of(stamps: list) -> list[float]:
    return [stamp.time for stamp in stamps if stamp.event == "token"]


def _counts_from_waiting(stamps: list) -> tuple[float | None, float | None]:
    ttft, tpot = latencies_solution(stamps)
    queued = next(stamp.time for stamp in stamps if stamp.event == "waiting")
    return None if ttft is None else _tokens_of(stamps)[0] - queued, tpot


def _divides_by_all_tokens(stamps: list) -> tuple[float | None, float | None]:
    ttft, tpot = latencies_solution(stamps)
    tokens = _tokens_of(stamps)
    return ttft, None if tpot is None else (tokens[-1] - tokens[0]) / len(tokens)


def _counts_prefill_into_tpot(stamps: list) -> tuple[float | None, float | None]:
    ttft, tpot = latencies_solution(stamps)
    tokens = _tokens_of(stamps)
    return ttft, None if tpot is None else (tokens[-1] - stamps[0].time) / len(tokens)


def _until_the_first_chunk(stamps: list) -> tuple[float | None, float | None]:
    chunks = [stamp.time for stamp in stamps if stamp.event == "chunk"]
    return (chunks[0] - stamps[0].time if chunks else None), latencies_solution(stamps)[1]


def _cannot_do_without_tokens(stamps: list) -> tuple[float | None, float | None]:
    ttft, tpot = latencies_solution(stamps)
    return ttft or 0.0, tpot or 0.0


def _history(rng: random.Random, chunks: int, tokens: int, preempt_after: int | None) -> list[Stamped]:
    """A request as the engine stamps it: late into the queue, chunk by chunk, perhaps preempted and recomputed."""
    now = rng.uniform(0, 100)
    stamps = [Stamped(now, "arrived", 16 * chunks)]
    now += rng.uniform(0.01, 2)
    stamps.append(Stamped(now, "waiting"))
    made, rounds = 0, [preempt_after, None] if preempt_after is not None else [None]
    for stop in rounds:
        now += rng.uniform(0.01, 1)
        stamps.append(Stamped(now, "prefilling"))
        for _ in range(chunks):
            stamps.append(Stamped(now, "chunk_start", 16))
            now += rng.uniform(0.01, 0.1)
            stamps.append(Stamped(now, "chunk", 16))
        if tokens:
            stamps.append(Stamped(now, "running"))
        while made < (tokens if stop is None else stop):
            stamps.append(Stamped(now, "token", 1))
            made += 1
            now += rng.uniform(0.01, 0.1)
        if stop is not None:
            stamps.append(Stamped(now, "preempted", 16 * chunks + made - 1))
    return [*stamps, Stamped(now, "finished")]


def _test_latencies(answer: Any, rng: random.Random) -> None:
    by_hand = [(0.0, "arrived"), (1.0, "waiting"), (1.5, "prefilling"), (1.5, "chunk_start"), (2.0, "chunk")]
    by_hand += [(2.0, "running"), (2.0, "token"), (2.5, "token"), (4.0, "token"), (4.0, "finished")]
    cases = [
        ("arrived at 0 s, queued at 1 s, tokens at 2, 2.5 and 4 s", [Stamped(*stamp) for stamp in by_hand], (2.0, 1.0)),
    ]
    for what, chunks, tokens, preempt_after in (
        ("a single token", 2, 1, None),
        ("ended before its first token", 1, 0, None),
        (f"{rng.randint(2, 5)} chunks", rng.randint(2, 5), rng.randint(2, 30), None),
        ("preempted in the middle", 3, rng.randint(6, 20), rng.randint(2, 5)),
    ):
        stamps = _history(rng, chunks, tokens, preempt_after)
        cases.append((what, stamps, latencies_solution(stamps)))  # type: ignore[arg-type]
    for what, stamps, want in cases:
        got = answer(list(stamps))
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise Wrong(f"{what}: expected a pair (TTFT, TPOT), got {describe(got)}")
        for name, found, expected in zip(("TTFT", "TPOT"), got, want, strict=True):
            if expected is None or found is None:
                expect_equal(found, expected, f"{what}: {name}")
            else:
                expect_close(found, expected, f"{what}: {name} in seconds", atol=1e-9, rtol=1e-6)


latencies = Exercise(
    notebook="04",
    name="latencies",
    title="TTFT and TPOT from a request's stamps",
    test=_test_latencies,
    stub=latencies_stub,
    solution=latencies_solution,
    hints=(
        "Two lists are all you need: the time of the `arrived` stamp, and the times of all `token` stamps.",
        "TTFT counts from `arrived`, not from `waiting`: a client does not care why nobody had picked up the request.",
        "n tokens have n - 1 gaps between them: `(last - first) / (n - 1)`. A preemption needs no special case, since "
        "it is a gap like any other.",
    ),
    mistakes=(
        Mistake(_counts_from_waiting, says="TTFT in seconds: expected 2, got 1"),
        Mistake(_divides_by_all_tokens, says="TPOT in seconds: expected 1,"),
        Mistake(_counts_prefill_into_tpot, says="TPOT in seconds: expected 1,"),
        Mistake(_until_the_first_chunk, says="TTFT"),
        Mistake(_cannot_do_without_tokens, says="expected None, got 0"),
    ),
)

# --- whom to preempt -------------------------------------------------------------------------------------------


class Seated(NamedTuple):
    """A request that holds a seat."""

    name: str
    num_blocks: int  # blocks that it holds, shared with nobody
    needs_block: bool  # its last block is full: without another one it cannot get its next token


def choose_victims_stub(seated: list[Seated], num_free_blocks: int) -> list[str]:
    """Names of the requests to preempt before the next step, in the order in which they go.

    seated: in order of arrival, the oldest first. Each request that needs_block takes one free block in this step.
    A preempted request gives all of its blocks back and needs none. Preempt no more than necessary, the latest arrival
    first, and never the oldest.
    """
    raise NotImplementedError


def choose_victims_solution(seated: list[Seated], num_free_blocks: int) -> list[str]:
    """Names of the requests to preempt before the next step, in the order in which they go."""
    staying, victims = list(seated), []
    while len(staying) > 1 and sum(request.needs_block for request in staying) > num_free_blocks:
        victim = staying.pop()  # the latest arrival
        num_free_blocks += victim.num_blocks
        victims.append(victim.name)
    return victims


def _oldest_goes(seated: list[Seated], num_free_blocks: int) -> list[str]:
    return choose_victims_solution(seated[::-1], num_free_blocks)


def _largest_goes(seated: list[Seated], num_free_blocks: int) -> list[str]:
    return choose_victims_solution(sorted(seated, key=lambda r: -r.num_blocks)[::-1], num_free_blocks)


def _victims_still_need(seated: list[Seated], num_free_blocks: int) -> list[str]:
    staying, victims = list(seated), []
    needed = sum(request.needs_block for request in seated)
    while len(staying) > 1 and needed > num_free_blocks:
        victim = staying.pop()
        num_free_blocks += victim.num_blocks
        victims.append(victim.name)
    return victims


def _only_those_who_need(seated: list[Seated], num_free_blocks: int) -> list[str]:
    victims = []
    for request in reversed(seated[1:]):
        waiting = [r for r in seated if r.needs_block and r.name not in victims]
        if len(waiting) <= num_free_blocks:
            break
        if request.needs_block:
            victims.append(request.name)
            num_free_blocks += request.num_blocks
    return victims


def _everybody_but_the_oldest(seated: list[Seated], num_free_blocks: int) -> list[str]:
    enough = sum(request.needs_block for request in seated) <= num_free_blocks
    return [] if enough else [request.name for request in reversed(seated[1:])]


def _asks_for_one_more(seated: list[Seated], num_free_blocks: int) -> list[str]:
    return choose_victims_solution(seated, num_free_blocks - 1)


def _test_choose_victims(answer: Any, rng: random.Random) -> None:
    def seats(*rows: tuple[int, bool]) -> list[Seated]:
        return [Seated("ABCDEFGHIJKL"[i], blocks, needs) for i, (blocks, needs) in enumerate(rows)]

    def expect(seated: list[Seated], free: int, want: list[str]) -> None:
        rows = ", ".join(f"{r.name} {r.num_blocks}{'+1' if r.needs_block else ''}" for r in seated)
        where = f"{free} free; blocks held, oldest first: {rows}"
        got = answer(list(seated), free)
        if isinstance(got, list | tuple) and seated[0].name in got:
            raise Wrong(f"{where}: {seated[0].name} is the oldest. If it may be preempted, nobody is sure to finish")
        expect_equal(got, want, where)

    expect(seats((3, True), (2, True)), 2, [])  # exactly enough
    expect(seats((3, True), (4, False), (1, False)), 0, ["C"])  # who goes need not be the one who asks
    expect(seats((3, True), (2, True), (1, True)), 0, ["C", "B"])  # C gives 1; A and B need 2
    expect(seats((3, True), (2, True), (1, True)), 1, ["C"])  # C needs none any more
    for _ in range(4):
        seated = seats(*((rng.randint(1, 6), rng.random() < 0.7) for _ in range(rng.randint(2, 12))))
        free = rng.randint(0, 4)
        expect(seated, free, choose_victims_solution(seated, free))


choose_victims = Exercise(
    notebook="04",
    name="choose_victims",
    title="The pool is full. Who has to go?",
    test=_test_choose_victims,
    stub=choose_victims_stub,
    solution=choose_victims_solution,
    hints=(
        "Ask again after each victim: do those who *stay* need more blocks than are free now?",
        "A victim helps twice. Its blocks become free, and its own need is gone.",
        "`while len(staying) > 1 and sum(r.needs_block for r in staying) > num_free_blocks:` it is the turn of the "
        "last of `staying`.",
    ),
    mistakes=(
        Mistake(_oldest_goes, says="A is the oldest"),
        Mistake(_largest_goes, says="free; blocks held"),
        Mistake(_victims_still_need, says="1 free; blocks held, oldest first: A 3+1, B 2+1, C 1+1"),
        Mistake(_only_those_who_need, says="A 3+1, B 4, C 1"),
        Mistake(_everybody_but_the_oldest, says="expected 1 items, got 2"),
        Mistake(_asks_for_one_more, says="2 free; blocks held"),
    ),
)
