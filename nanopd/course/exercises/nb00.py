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

# --- tokens until memory stops being the limit -----------------------------------------------------------------


def tokens_to_saturate_stub(bandwidth_gb_s: float, rate_tflop_s: float, dtype_bytes: int) -> float:
    """Tokens per step at which reading the weights and computing with them take equally long."""
    raise NotImplementedError


def tokens_to_saturate_solution(bandwidth_gb_s: float, rate_tflop_s: float, dtype_bytes: int) -> float:
    """Tokens per step at which reading the weights and computing with them take equally long."""
    seconds_per_weight_read = dtype_bytes / (bandwidth_gb_s * 1e9)  # once per step
    seconds_per_weight_used = 2 / (rate_tflop_s * 1e12)  # once per token
    return seconds_per_weight_read / seconds_per_weight_used


def _is_the_ridge(bandwidth_gb_s: float, rate_tflop_s: float, dtype_bytes: int) -> float:
    return rate_tflop_s * 1e3 / bandwidth_gb_s


def _mixes_tera_and_giga(bandwidth_gb_s: float, rate_tflop_s: float, dtype_bytes: int) -> float:
    return dtype_bytes * rate_tflop_s / (2 * bandwidth_gb_s)


def _forgets_that_numbers_have_bytes(bandwidth_gb_s: float, rate_tflop_s: float, dtype_bytes: int) -> float:
    return rate_tflop_s * 1e3 / (2 * bandwidth_gb_s)


def _test_tokens_to_saturate(answer: Any, rng: random.Random) -> None:
    # By hand: 1 GB/s reads a one-byte weight in 1 ns, and 1 TFLOP/s uses it in 2 ps.
    expect_close(answer(1.0, 1.0, 1), 500.0, "1 GB/s, 1 TFLOP/s, 1-byte weights", rtol=1e-6)
    for dtype_bytes in (1, 2, 4):
        bandwidth, rate = rng.uniform(10, 5000), rng.uniform(0.05, 1000)
        where = f"{bandwidth:.0f} GB/s, {rate:.2f} TFLOP/s, {dtype_bytes}-byte weights"
        want = tokens_to_saturate_solution(bandwidth, rate, dtype_bytes)
        expect_close(answer(bandwidth, rate, dtype_bytes), want, where, atol=0, rtol=1e-6)


tokens_to_saturate = Exercise(
    notebook="00",
    name="tokens_to_saturate",
    title="Tokens per step at which a step stops being memory-bound",
    test=_test_tokens_to_saturate,
    stub=tokens_to_saturate_stub,
    solution=tokens_to_saturate_solution,
    hints=(
        "Think of a single weight. How long does it take to read it? How long to use it for one token?",
        "Reading takes `dtype_bytes / (bandwidth_gb_s * 1e9)` seconds, once per step. "
        "Using takes `2 / (rate_tflop_s * 1e12)` seconds, once per token.",
        "The ratio of the two is the answer.",
    ),
    mistakes=(
        Mistake(_is_the_ridge, says="2 times too much"),
        Mistake(_mixes_tera_and_giga, says="1 GB/s, 1 TFLOP/s"),
        Mistake(_forgets_that_numbers_have_bytes, says="byte weights"),
    ),
)
