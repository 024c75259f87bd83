"""Exercises of notebook 00: why prefill and decode are two kinds of work."""

from __future__ import annotations

import random
from typing import Any

from nanopd.course.exercise import Exercise, Mistake, expect_close

# --- arithmetic intensity of a step ----------------------------------------------------------------------------


def step_intensity_stub(num_tokens: int, hidden: int, out: int, dtype_bytes: int) -> float:
    """FLOP per byte of one linear layer [hidden, out] applied to num_tokens tokens."""
    raise NotImplementedError


def step_intensity_solution(num_tokens: int, hidden: int, out: int, dtype_bytes: int) -> float:
    """FLOP per byte of one linear layer [hidden, out] applied to num_tokens tokens."""
    flop = 2 * num_tokens * hidden * out  # one multiply and one add per weight and token
    weights = hidden * out  # read once, however many tokens share them
    activations = num_tokens * (hidden + out)  # read x, write y
    return flop / (dtype_bytes * (weights + activations))


def _forgets_the_add(num_tokens: int, hidden: int, out: int, dtype_bytes: int) -> float:
    return step_intensity_solution(num_tokens, hidden, out, dtype_bytes) / 2


def _reads_weights_per_token(num_tokens: int, hidden: int, out: int, dtype_bytes: int) -> float:
    moved = num_tokens * (hidden * out + hidden + out)
    return 2 * num_tokens * hidden * out / (dtype_bytes * moved)


def _forgets_activations(num_tokens: int, hidden: int, out: int, dtype_bytes: int) -> float:
    return 2 * num_tokens * hidden * out / (dtype_bytes * hidden * out)


def _test_step_intensity(answer: Any, rng: random.Random) -> None:
    by_hand = 2 / 3  # one multiply and one add; read the weight, read x, write y
    expect_close(answer(1, 1, 1, 1), by_hand, "1 token through a [1, 1] layer of 1-byte numbers", rtol=1e-6)
    hidden, out = rng.choice([576, 1024, 4096]), rng.choice([576, 1536, 12288])
    dtype_bytes = rng.choice([1, 2, 4])
    for num_tokens in (1, rng.randint(2, 300), rng.choice([512, 2048, 2049])):
        where = f"{num_tokens} tokens through a [{hidden}, {out}] layer of {dtype_bytes}-byte numbers"
        want = step_intensity_solution(num_tokens, hidden, out, dtype_bytes)
        expect_close(answer(num_tokens, hidden, out, dtype_bytes), want, where, atol=0, rtol=1e-6)


step_intensity = Exercise(
    notebook="00",
    name="step_intensity",
    title="FLOP per byte of a linear layer, for one token and for two thousand",
    test=_test_step_intensity,
    stub=step_intensity_stub,
    solution=step_intensity_solution,
    hints=(
        "Count the floating-point operations first: each weight meets each token once, in a multiply and an add.",
        "Bytes: the weights are read once for the whole step, whatever the number of tokens. "
        "Each token also reads `hidden` numbers and writes `out`.",
        "`2 * num_tokens * hidden * out / (dtype_bytes * (hidden * out + num_tokens * (hidden + out)))`",
    ),
    mistakes=(
        Mistake(_forgets_the_add, says="2 times too little"),
        Mistake(_reads_weights_per_token, says="tokens through a ["),
        Mistake(_forgets_activations, says="3 times too much"),
    ),
)
