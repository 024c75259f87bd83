"""Exercises of notebook 05: P/D workers. What to hand off, who may start, and two curves at equal TPOT."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_close, expect_equal

# --- which blocks to hand off ----------------------------------------------------------------------------------


def blocks_to_send_stub(num_computed: int, sent_blocks: int, block_size: int, is_last: bool) -> tuple[int, int, int]:
    """(first, stop, tokens): what to hand off after a chunk.

    Entries first, first + 1, ..., stop - 1 of the block table, and how many tokens' KV they hold. num_computed tokens
    of the prompt have their KV by now; the first sent_blocks entries were handed off before. A block is sent once: the
    last, partly filled one waits until it is full, or until the prompt's last chunk (is_last).
    """
    raise NotImplementedError


def blocks_to_send_solution(
    num_computed: int, sent_blocks: int, block_size: int, is_last: bool
) -> tuple[int, int, int]:
    """(first, stop, tokens): what to hand off after a chunk."""
    first = sent_blocks
    stop = -(-num_computed // block_size) if is_last else num_computed // block_size
    return first, stop, min(num_computed, stop * block_size) - first * block_size


def _sends_the_part(num_computed: int, sent_blocks: int, block_size: int, is_last: bool) -> tuple[int, int, int]:
    return blocks_to_send_solution(num_computed, sent_blocks, block_size, True)


def _forgets_the_part(num_computed: int, sent_blocks: int, block_size: int, is_last: bool) -> tuple[int, int, int]:
    return blocks_to_send_solution(num_computed, sent_blocks, block_size, False)


def _counts_slots(num_computed: int, sent_blocks: int, block_size: int, is_last: bool) -> tuple[int, int, int]:
    first, stop, _ = blocks_to_send_solution(num_computed, sent_blocks, block_size, is_last)
    return first, stop, (stop - first) * block_size


def _starts_over(num_computed: int, sent_blocks: int, block_size: int, is_last: bool) -> tuple[int, int, int]:
    return blocks_to_send_solution(num_computed, 0, block_size, is_last)


def _one_more_at_the_end(num_computed: int, sent_blocks: int, block_size: int, is_last: bool) -> tuple[int, int, int]:
    first, stop, tokens = blocks_to_send_solution(num_computed, sent_blocks, block_size, False)
    return (first, stop + 1, num_computed - first * block_size) if is_last else (first, stop, tokens)


def _test_blocks_to_send(answer: Any, rng: random.Random) -> None:
    def expect(computed: int, sent: int, size: int, last: bool, want: tuple[int, int, int]) -> None:
        where = (
            f"{computed} tokens computed, {sent} blocks of {size} sent, {'the last chunk' if last else 'more to come'}"
        )
        got = answer(computed, sent, size, last)
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise Wrong(f"{where}: expected (first, stop, tokens), got {describe(got)}")
        for name, found, wanted in zip(("first", "stop", "tokens"), got, want, strict=True):
            expect_equal(found, wanted, f"{where}: {name}")

    expect(32, 0, 16, False, (0, 2, 32))
    expect(40, 0, 16, False, (0, 2, 32))  # 8 tokens lie in a block that is not full
    expect(90, 2, 16, True, (2, 6, 58))
    expect(96, 2, 16, True, (2, 6, 64))  # the last block is full
    expect(12, 0, 16, False, (0, 0, 0))
    for _ in range(4):
        size = rng.choice((8, 16, 32))
        computed, last = rng.randint(1, 20 * size), rng.random() < 0.5
        sent = rng.randint(0, computed // size)
        expect(computed, sent, size, last, blocks_to_send_solution(computed, sent, size, last))


blocks_to_send = Exercise(
    notebook="05",
    name="blocks_to_send",
    title="Which blocks go with this chunk?",
    test=_test_blocks_to_send,
    stub=blocks_to_send_stub,
    solution=blocks_to_send_solution,
    hints=(
        "`first` is easy: what was sent is sent. `stop` counts blocks that are *finished*: full ones, or, when nothing "
        "more will be computed, also the one that will never become full.",
        "Rounding down is `num_computed // block_size`, rounding up is `-(-num_computed // block_size)`.",
        "The tokens are those up to `stop`, but no more than were computed, without those that were sent: "
        "`min(num_computed, stop * block_size) - first * block_size`.",
    ),
    mistakes=(
        Mistake(_sends_the_part, says="40 tokens computed, 0 blocks of 16 sent, more to come: stop"),
        Mistake(_forgets_the_part, says="the last chunk: stop: expected 6, got 5"),
        Mistake(_counts_slots, says="tokens: expected 58, got 64"),
        Mistake(_starts_over, says="first: expected 2, got 0"),
        Mistake(_one_more_at_the_end, says="96 tokens computed, 2 blocks of 16 sent, the last chunk: stop"),
    ),
)

# --- who may start ---------------------------------------------------------------------------------------------


class DecodeSide(NamedTuple):
    """What a decode worker has at this moment."""

    free_blocks: int
    watermark_blocks: int  # to be left free, so that those who run can grow
    block_size: int
    free_seats: int
    waiting_tokens: int  # of the first request of its own that was preempted and waits to come back; 0: nobody does
    is_empty: bool  # nobody runs here and nothing is reserved


def may_start_stub(num_tokens: int, token_limit: int, growth: int, side: DecodeSide) -> bool:
    """Whether a prompt of num_tokens tokens may go to a prefill worker now: the decode side has room for what follows.

    It needs a seat, and blocks for the prompt and growth more tokens, but never for more than token_limit in all
    (prompt and answer together). Besides, there must be room for the first of those who wait on the decode side, if
    anybody does: a seat, and blocks for its tokens. And the watermark must stay free, unless the decode side is empty:
    then it protects nobody.
    """
    raise NotImplementedError


def may_start_solution(num_tokens: int, token_limit: int, growth: int, side: DecodeSide) -> bool:
    """Whether a prompt of num_tokens tokens may go to a prefill worker now."""
    seats = 2 if side.waiting_tokens else 1
    own = -(-min(num_tokens + growth, token_limit) // side.block_size)
    ahead = -(-side.waiting_tokens // side.block_size)
    spare = 0 if side.is_empty else side.watermark_blocks
    return seats <= side.free_seats and own + ahead + spare <= side.free_blocks


def _forgets_growth(num_tokens: int, token_limit: int, growth: int, side: DecodeSide) -> bool:
    return may_start_solution(num_tokens, token_limit, 0, side)


def _grows_past_the_limit(num_tokens: int, token_limit: int, growth: int, side: DecodeSide) -> bool:
    return may_start_solution(num_tokens, 10**9, growth, side)


def _rounds_down(num_tokens: int, token_limit: int, growth: int, side: DecodeSide) -> bool:
    slots = min(num_tokens + growth, token_limit) // side.block_size * side.block_size
    return may_start_solution(slots, slots, 0, side)


def _forgets_the_watermark(num_tokens: int, token_limit: int, growth: int, side: DecodeSide) -> bool:
    return may_start_solution(num_tokens, token_limit, growth, side._replace(watermark_blocks=0))


def _keeps_the_watermark_always(num_tokens: int, token_limit: int, growth: int, side: DecodeSide) -> bool:
    return may_start_solution(num_tokens, token_limit, growth, side._replace(is_empty=False))


def _forgets_the_seat(num_tokens: int, token_limit: int, growth: int, side: DecodeSide) -> bool:
    return may_start_solution(num_tokens, token_limit, growth, side._replace(free_seats=9))


def _overtakes(num_tokens: int, token_limit: int, growth: int, side: DecodeSide) -> bool:
    return may_start_solution(num_tokens, token_limit, growth, side._replace(waiting_tokens=0))


def _test_may_start(answer: Any, rng: random.Random) -> None:
    def expect(num_tokens: int, limit: int, growth: int, side: DecodeSide, want: bool) -> None:
        where = f"prompt {num_tokens}, token_limit {limit}, growth {growth}, {side}"
        expect_equal(answer(num_tokens, limit, growth, side), want, where)

    side = DecodeSide(free_blocks=10, watermark_blocks=2, block_size=16, free_seats=3, waiting_tokens=0, is_empty=False)
    expect(64, 1000, 64, side, True)  # 8 blocks and the watermark: just enough
    expect(65, 1000, 64, side, False)  # one more token, one more block
    expect(120, 124, 64, side, True)  # the answer has 4 tokens: no growth beyond them
    expect(100, 1000, 64, side, False)
    expect(90, 1000, 64, side._replace(is_empty=True), True)
    expect(16, 1000, 64, side._replace(free_seats=0), False)
    expect(16, 1000, 64, side._replace(waiting_tokens=33), True)  # 5 blocks, 3 for who waits, and the watermark
    expect(16, 1000, 64, side._replace(waiting_tokens=49), False)
    expect(16, 1000, 64, side._replace(waiting_tokens=33, free_seats=1), False)
    for _ in range(6):
        num_tokens, growth = rng.randint(1, 200), rng.choice((1, 16, 64))
        limit = num_tokens + rng.randint(1, 100)
        blocks = -(-min(num_tokens + growth, limit) // 16)
        free, empty = max(0, blocks + rng.randint(-1, 4)), rng.random() < 0.4
        waiting = 0 if empty else rng.choice((0, 0, 20))
        random_side = side._replace(
            free_blocks=free, is_empty=empty, free_seats=rng.randint(0, 3), waiting_tokens=waiting
        )
        expect(num_tokens, limit, growth, random_side, may_start_solution(num_tokens, limit, growth, random_side))


may_start = Exercise(
    notebook="05",
    name="may_start",
    title="May this request start?",
    test=_test_may_start,
    stub=may_start_stub,
    solution=may_start_solution,
    hints=(
        "Seats first: one for this request, and one more if somebody waits who was here before.",
        "Slots to reserve: `min(num_tokens + growth, token_limit)`. Blocks hold `block_size` slots each, so round up.",
        "`own + ahead + spare <= free_blocks`: `ahead` are the blocks of who waits, `spare` is the watermark, or 0 if "
        "the decode side is empty: a prompt that fits only without the watermark would otherwise wait for ever.",
    ),
    mistakes=(
        Mistake(_forgets_growth, says="prompt 65, token_limit 1000"),
        Mistake(_grows_past_the_limit, says="prompt 120, token_limit 124"),
        Mistake(_rounds_down, says="prompt 65, token_limit 1000"),
        Mistake(_forgets_the_watermark, says="prompt 65, token_limit 1000"),
        Mistake(_keeps_the_watermark_always, says="prompt 90, token_limit 1000"),
        Mistake(_forgets_the_seat, says="free_seats=0"),
        Mistake(_overtakes, says="waiting_tokens=49"),
    ),
)

# --- two curves at equal TPOT ----------------------------------------------------------------------------------


def prefill_at_stub(curve: list[tuple[float, float]], tpot_ms: float) -> float:
    """Prompt tokens per ms that a curve allows if decodes are to wait tpot_ms for a token.

    curve: points (TPOT in ms, prompt tokens per ms), both ascending. Between two points: on the straight line. Below
    the first point nothing is possible: 0. Beyond the last one nothing was measured: no more than its rate.
    """
    raise NotImplementedError


def prefill_at_solution(curve: list[tuple[float, float]], tpot_ms: float) -> float:
    """Prompt tokens per ms that a curve allows if decodes are to wait tpot_ms for a token."""
    if tpot_ms < curve[0][0]:
        return 0.0
    for (left, low), (right, high) in pairwise(curve):
        if tpot_ms <= right:
            return low + (high - low) * (tpot_ms - left) / (right - left)
    return curve[-1][1]


def _the_point_before(curve: list[tuple[float, float]], tpot_ms: float) -> float:
    return max((rate for tpot, rate in curve if tpot <= tpot_ms), default=0.0)


def _the_nearest(curve: list[tuple[float, float]], tpot_ms: float) -> float:
    return min(curve, key=lambda point: abs(point[0] - tpot_ms))[1] if tpot_ms >= curve[0][0] else 0.0


def _extrapolates(curve: list[tuple[float, float]], tpot_ms: float) -> float:
    if tpot_ms <= curve[-1][0]:
        return prefill_at_solution(curve, tpot_ms)
    (left, low), (right, high) = curve[-2:]
    return low + (high - low) * (tpot_ms - left) / (right - left)


def _possible_below(curve: list[tuple[float, float]], tpot_ms: float) -> float:
    return prefill_at_solution(curve, max(tpot_ms, curve[0][0]))


def _swapped(curve: list[tuple[float, float]], tpot_ms: float) -> float:
    return prefill_at_solution([(rate, tpot) for tpot, rate in curve], tpot_ms)


def _test_prefill_at(answer: Any, rng: random.Random) -> None:
    def expect(curve: list[tuple[float, float]], tpot: float, want: float) -> None:
        expect_close(answer(list(curve), tpot), want, f"curve {curve} at {tpot:g} ms", atol=1e-6, rtol=1e-6)

    curve = [(5.0, 10.0), (6.0, 20.0), (10.0, 30.0)]
    expect(curve, 6.0, 20.0)
    expect(curve, 7.0, 22.5)
    expect(curve, 4.0, 0.0)
    expect(curve, 20.0, 30.0)
    for _ in range(4):
        xs, ys = (sorted(rng.sample(range(1, 100), 5)) for _ in range(2))
        random_curve = [(x / 2, y / 4) for x, y in zip(xs, ys, strict=True)]
        tpot = rng.uniform(0, 60)
        expect(random_curve, tpot, prefill_at_solution(random_curve, tpot))


prefill_at = Exercise(
    notebook="05",
    name="prefill_at",
    title="Read a frontier at a given TPOT",
    test=_test_prefill_at,
    stub=prefill_at_stub,
    solution=prefill_at_solution,
    hints=(
        "First the two ends: before `curve[0]` and behind `curve[-1]`.",
        "`itertools.pairwise(curve)` gives neighbours. You need the first pair whose right end is not below `tpot_ms`.",
        "On the line from (left, low) to (right, high): `low + (high - low) * (tpot_ms - left) / (right - left)`.",
    ),
    mistakes=(
        Mistake(_the_point_before, says="at 7 ms"),
        Mistake(_the_nearest, says="at 7 ms"),
        Mistake(_extrapolates, says="at 20 ms"),
        Mistake(_possible_below, says="at 4 ms"),
        Mistake(_swapped, says="at 6 ms"),
    ),
)
