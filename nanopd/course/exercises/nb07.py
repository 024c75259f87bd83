"""Exercises of notebook 07: what a step computes, a fit on relative error, what a prompt costs those who read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_close

# --- the counts of a step --------------------------------------------------------------------------------------


def count_step_stub(chunks: list[tuple[int, int]], num_decodes: int) -> tuple[int, float, int, int, int]:
    """(prefill_tokens, prefill_pairs, num_prefills, num_decodes, kv_tokens) of one step.

    chunks: (start, num_tokens) of each request in the step, decodes first. A token attends to itself and to all tokens
    before it. prefill_pairs: query-key pairs of the prefill chunks. kv_tokens: keys that the decodes read.
    """
    raise NotImplementedError


def count_step_solution(chunks: list[tuple[int, int]], num_decodes: int) -> tuple[int, float, int, int, int]:
    """(prefill_tokens, prefill_pairs, num_prefills, num_decodes, kv_tokens) of one step."""
    decodes, prefills = chunks[:num_decodes], chunks[num_decodes:]
    tokens = sum(n for _, n in prefills)
    pairs = sum(n * start + n * (n + 1) / 2 for start, n in prefills)  # n rows over the prefix, and a triangle
    kv_tokens = sum(start + 1 for start, _ in decodes)
    return tokens, pairs, len(prefills), num_decodes, kv_tokens


def _no_prefix(chunks: list[tuple[int, int]], num_decodes: int) -> tuple[int, float, int, int, int]:
    tokens, _, prefills, decodes, kv = count_step_solution(chunks, num_decodes)
    return tokens, sum(n * (n + 1) / 2 for _, n in chunks[num_decodes:]), prefills, decodes, kv


def _not_causal(chunks: list[tuple[int, int]], num_decodes: int) -> tuple[int, float, int, int, int]:
    tokens, _, prefills, decodes, kv = count_step_solution(chunks, num_decodes)
    return tokens, sum(n * (start + n) for start, n in chunks[num_decodes:]), prefills, decodes, kv


def _forgets_itself(chunks: list[tuple[int, int]], num_decodes: int) -> tuple[int, float, int, int, int]:
    tokens, pairs, prefills, decodes, _ = count_step_solution(chunks, num_decodes)
    return tokens, pairs, prefills, decodes, sum(start for start, _ in chunks[:num_decodes])


def _decodes_are_prefill(chunks: list[tuple[int, int]], num_decodes: int) -> tuple[int, float, int, int, int]:
    _, pairs, prefills, decodes, kv = count_step_solution(chunks, num_decodes)
    return sum(n for _, n in chunks), pairs, prefills, decodes, kv


def _test_count_step(answer: Any, rng: random.Random) -> None:
    names = ("prefill_tokens", "prefill_pairs", "num_prefills", "num_decodes", "kv_tokens")

    def expect(chunks: list[tuple[int, int]], num_decodes: int, want: tuple) -> None:
        where = f"chunks {chunks}, {num_decodes} of them decodes"
        got = answer(list(chunks), num_decodes)
        if not isinstance(got, tuple | list) or len(got) != 5:
            raise Wrong(f"{where}: expected five counts, got {describe(got)}")
        for name, found, expected in zip(names, got, want, strict=True):
            expect_close(found, expected, f"{where}: {name}", atol=0, rtol=1e-9)

    # By hand: 3 tokens see 1, 2 and 3 keys; behind 10 others, 11, 12 and 13.
    expect([(0, 3)], 0, (3, 6, 1, 0, 0))
    expect([(10, 3)], 0, (3, 36, 1, 0, 0))
    expect([(7, 1), (20, 1), (0, 2)], 2, (2, 3, 1, 2, 29))
    for _ in range(3):
        num_decodes = rng.randint(0, 5)
        chunks = [(rng.randint(1, 500), 1) for _ in range(num_decodes)]
        chunks += [(rng.choice([0, rng.randint(1, 300)]), rng.randint(1, 200)) for _ in range(rng.randint(0, 3))]
        expect(chunks, num_decodes, count_step_solution(chunks, num_decodes))


count_step = Exercise(
    notebook="07",
    name="count_step",
    title="The five counts of a step, from the scheduler's plan",
    test=_test_count_step,
    stub=count_step_stub,
    solution=count_step_solution,
    hints=(
        "Split the list: `chunks[:num_decodes]` decode, `chunks[num_decodes:]` prefill.",
        "Draw the attention of a chunk as a picture: one row for each of its n tokens, one column for each key. Left "
        "is a full rectangle, n × start; right is a triangle with its diagonal, n × (n + 1) / 2.",
        "A decode at `start` reads the keys of the `start` tokens before it and its own: `start + 1`.",
    ),
    mistakes=(
        Mistake(_no_prefix, says="chunks [(10, 3)]"),
        Mistake(_not_causal, says="prefill_pairs"),
        Mistake(_forgets_itself, says="kv_tokens"),
        Mistake(_decodes_are_prefill, says="prefill_tokens"),
    ),
)

# --- least squares on relative error ---------------------------------------------------------------------------


def relative_fit_stub(rows: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """The [n] costs that make the sum of squared *relative* errors, ((rows @ costs - ms) / ms)², smallest.

    rows: [m, n] counts of m measured steps; ms: [m] their times. np.linalg.lstsq(a, b)[0] gives the x that makes the
    sum of squares of a @ x - b smallest.
    """
    raise NotImplementedError


def relative_fit_solution(rows: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """The [n] costs that make the sum of squared *relative* errors, ((rows @ costs - ms) / ms)², smallest."""
    return np.linalg.lstsq(rows / ms[:, None], np.ones(len(ms)), rcond=None)[0]


def _absolute(rows: np.ndarray, ms: np.ndarray) -> np.ndarray:
    return np.linalg.lstsq(rows, ms, rcond=None)[0]


def _half_way(rows: np.ndarray, ms: np.ndarray) -> np.ndarray:
    weights = np.sqrt(1 / ms)
    return np.linalg.lstsq(rows * weights[:, None], ms * weights, rcond=None)[0]


def _only_the_rows(rows: np.ndarray, ms: np.ndarray) -> np.ndarray:
    return np.linalg.lstsq(rows / ms[:, None], ms, rcond=None)[0]


def _all_that_lstsq_returns(rows: np.ndarray, ms: np.ndarray) -> Any:
    return np.linalg.lstsq(rows / ms[:, None], np.ones(len(ms)), rcond=None)


def _weights_upside_down(rows: np.ndarray, ms: np.ndarray) -> np.ndarray:
    return np.linalg.lstsq(rows * ms[:, None], ms * ms, rcond=None)[0]


def _test_relative_fit(answer: Any, rng: random.Random) -> None:
    # By hand: one cost c for steps of 1 and 2 ms. (c - 1)² + (c/2 - 1)² is smallest at c = 1.2, not at the mean, 1.5.
    got = answer(np.ones((2, 1)), np.array([1.0, 2.0]))
    if isinstance(got, tuple):
        raise Wrong(f"expected the costs alone; np.linalg.lstsq returns {len(got)} things, and they are the first, [0]")
    expect_close(got, [1.2], "a constant through 1 ms and 2 ms", rtol=1e-6)
    m = rng.randint(8, 30)
    counts = np.array([[1, rng.randint(1, 500), rng.randint(0, 9000)] for _ in range(m)], dtype=float)
    exact = np.array([rng.uniform(1, 5), rng.uniform(0.01, 0.1), rng.uniform(1e-4, 1e-3)])
    expect_close(answer(counts, counts @ exact), exact, f"{m} steps without noise", atol=0, rtol=1e-5)
    ms = counts @ exact * np.array([rng.uniform(0.7, 1.3) for _ in range(m)])
    want = relative_fit_solution(counts, ms)
    expect_close(answer(counts, ms), want, f"{m} steps with noise", atol=1e-9, rtol=1e-5)


relative_fit = Exercise(
    notebook="07",
    name="relative_fit",
    title="Least squares on relative error",
    test=_test_relative_fit,
    stub=relative_fit_stub,
    solution=relative_fit_solution,
    hints=(
        "(rows @ costs - ms) / ms is (rows / ms) @ costs - 1, where each row is divided by its own time.",
        "So it is ordinary least squares with other rows and another target. What is the target?",
        "Rows: `rows / ms[:, None]`. Target: ones.",
    ),
    mistakes=(
        Mistake(_absolute, says="1 ms and 2 ms"),
        Mistake(_half_way, says="1 ms and 2 ms"),
        Mistake(_only_the_rows, says="1 ms and 2 ms"),
        Mistake(_weights_upside_down, says="1 ms and 2 ms"),
        Mistake(_all_that_lstsq_returns, says="they are the first"),
    ),
)

# --- what a prompt costs those who read ------------------------------------------------------------------------

StepMs = Callable[[StepFeatures], float]


def readers_delay_stub(prompt: int, chunk_size: int, decodes: StepFeatures, step_ms: StepMs) -> float:
    """By how many ms each reader's tokens come later, in all, because a prompt is computed in the same steps.

    The prompt is computed in chunks of chunk_size (the last one may be shorter), one chunk a step, beside the readers'
    decodes, which stay as they are. step_ms(features) gives the time of a step; decodes.with_chunk(num_tokens, start)
    is the step with a chunk added to it.
    """
    raise NotImplementedError


def readers_delay_solution(prompt: int, chunk_size: int, decodes: StepFeatures, step_ms: StepMs) -> float:
    """By how many ms each reader's tokens come later, in all, because a prompt is computed in the same steps."""
    delay = 0.0
    for start in range(0, prompt, chunk_size):
        mixed = decodes.with_chunk(min(chunk_size, prompt - start), start)
        delay += step_ms(mixed) - step_ms(decodes)  # without the prompt, the step would have taken that long anyway
    return delay


def _prefill_alone(prompt: int, chunk_size: int, decodes: StepFeatures, step_ms: StepMs) -> float:
    starts = range(0, prompt, chunk_size)
    return sum(step_ms(StepFeatures().with_chunk(min(chunk_size, prompt - start), start)) for start in starts)


def _whole_steps(prompt: int, chunk_size: int, decodes: StepFeatures, step_ms: StepMs) -> float:
    starts = range(0, prompt, chunk_size)
    return sum(step_ms(decodes.with_chunk(min(chunk_size, prompt - start), start)) for start in starts)


def _no_prefix_for_chunks(prompt: int, chunk_size: int, decodes: StepFeatures, step_ms: StepMs) -> float:
    lengths = [min(chunk_size, prompt - start) for start in range(0, prompt, chunk_size)]
    return sum(step_ms(decodes.with_chunk(n)) - step_ms(decodes) for n in lengths)


def _one_large_step(prompt: int, chunk_size: int, decodes: StepFeatures, step_ms: StepMs) -> float:
    return step_ms(decodes.with_chunk(prompt)) - step_ms(decodes)


def _summed_over_readers(prompt: int, chunk_size: int, decodes: StepFeatures, step_ms: StepMs) -> float:
    return decodes.num_decodes * readers_delay_solution(prompt, chunk_size, decodes, step_ms)


def _full_last_chunk(prompt: int, chunk_size: int, decodes: StepFeatures, step_ms: StepMs) -> float:
    starts = range(0, prompt, chunk_size)
    return sum(step_ms(decodes.with_chunk(chunk_size, start)) - step_ms(decodes) for start in starts)


def _test_readers_delay(answer: Any, rng: random.Random) -> None:
    def expect(prompt: int, chunk_size: int, decodes: StepFeatures, model: StepTimeModel, where: str) -> None:
        want = readers_delay_solution(prompt, chunk_size, decodes, model.step_ms)
        what = f"prompt {prompt}, chunks of {chunk_size}, {decodes.num_decodes} readers, {where}"
        expect_close(answer(prompt, chunk_size, decodes, model.step_ms), want, what, atol=1e-9, rtol=1e-6)

    # A step costs 5 ms, each token 1 ms: two chunks of 10 delay everybody by 20 ms.
    readers = StepFeatures.decode(4, 400)
    plain = StepTimeModel(5.0, 1.0)
    expect_close(answer(20, 10, readers, plain.step_ms), 20.0, "prompt 20, chunks of 10, 1 ms per token", rtol=1e-6)
    expect(25, 10, readers, plain, "1 ms per token")
    expect(64, 16, readers, StepTimeModel(5.0, 1.0, pair_ms=0.01), "1 ms per token and 0.01 ms per pair")
    expect(25, 10, readers, StepTimeModel(5.0, 1.0, chunk_ms=2.0), "1 ms per token and 2 ms per chunk")
    batch = rng.randint(1, 64)
    model = StepTimeModel(
        rng.uniform(1, 9), rng.uniform(0.01, 0.1), rng.uniform(0, 0.1), rng.uniform(10, 90), rng.uniform(1e-5, 1e-3)
    )
    decodes = StepFeatures.decode(batch, batch * rng.randint(10, 4000))
    expect(rng.randint(1, 900), rng.choice([1, 16, 100, 256]), decodes, model, "a knee and pairs")


readers_delay = Exercise(
    notebook="07",
    name="readers_delay",
    title="How much later do those who read get their tokens?",
    test=_test_readers_delay,
    stub=readers_delay_stub,
    solution=readers_delay_solution,
    hints=(
        "Chunk by chunk: `for start in range(0, prompt, chunk_size)`. How long is the chunk that begins at `start`?",
        "In each of these steps a reader would have waited `step_ms(decodes)` anyway. Only what goes beyond that is "
        "the prompt's doing.",
        "`step_ms(decodes.with_chunk(length, start)) - step_ms(decodes)`, summed over the chunks.",
    ),
    mistakes=(
        Mistake(_prefill_alone, says="prompt 20, chunks of 10"),
        Mistake(_whole_steps, says="prompt 20, chunks of 10"),
        Mistake(_no_prefix_for_chunks, says="per pair"),
        Mistake(_full_last_chunk, says="prompt 25, chunks of 10"),
        Mistake(_one_large_step, says="2 ms per chunk"),
        Mistake(_summed_over_readers, says="that is 4 times too much"),
    ),
)
