"""Exercises of notebook 08: the router. The rule of two ratios, the delay of others, what one bucket learns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_close, expect_equal


def _expect_numbers(got: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(got, tuple | list) or len(got) != len(names):
        raise Wrong(f"{where}: expected ({', '.join(names)}), got {describe(got)}")


# --- the rule of two ratios ------------------------------------------------------------------------------------


def seed_rule_stub(
    gamma: float, kv_bytes_per_token: int, bandwidth_gb_s: float, batch_thresh: float, load: float
) -> tuple[float, float, bool]:
    """(transfer_rate in ms per token, threshold load, whether to disaggregate) of the rule.

    gamma is in ms per token, bandwidth in GB/s, with 1 GB = 1e9 bytes. The rule: gamma / transfer_rate must be larger
    than batch_thresh / load. The threshold is the load at which both are equal. load may be 0: nobody is disturbed.
    """
    raise NotImplementedError


def seed_rule_solution(
    gamma: float, kv_bytes_per_token: int, bandwidth_gb_s: float, batch_thresh: float, load: float
) -> tuple[float, float, bool]:
    """(transfer_rate in ms per token, threshold load, whether to disaggregate) of the rule."""
    transfer_rate = kv_bytes_per_token / (bandwidth_gb_s * 1e9) * 1e3
    threshold = batch_thresh * transfer_rate / gamma
    return transfer_rate, threshold, load > threshold


def _rate_in_seconds(gamma: float, kv: int, gb_s: float, thresh: float, load: float) -> tuple[float, float, bool]:
    rate = kv / (gb_s * 1e9)
    return rate, thresh * rate / gamma, load > thresh * rate / gamma


def _binary_gigabytes(gamma: float, kv: int, gb_s: float, thresh: float, load: float) -> tuple[float, float, bool]:
    return seed_rule_solution(gamma, kv, gb_s * 2**30 / 1e9, thresh, load)


def _upside_down(gamma: float, kv: int, gb_s: float, thresh: float, load: float) -> tuple[float, float, bool]:
    rate = kv / gb_s / 1e6
    return rate, thresh * gamma / rate, load > thresh * gamma / rate


def _only_the_decision(gamma: float, kv: int, gb_s: float, thresh: float, load: float) -> Any:
    return seed_rule_solution(gamma, kv, gb_s, thresh, load)[2]


def _divides_by_the_load(gamma: float, kv: int, gb_s: float, thresh: float, load: float) -> tuple[float, float, bool]:
    rate = kv / gb_s / 1e6
    return rate, thresh * rate / gamma, gamma / rate > thresh / load


def _test_seed_rule(answer: Any, rng: random.Random) -> None:
    def expect(gamma: float, kv: int, gb_s: float, thresh: float, load: float) -> None:
        where = f"gamma {gamma:g}, {kv:,} bytes per token, {gb_s:g} GB/s, batch_thresh {thresh:g}, load {load:g}"
        got = answer(gamma, kv, gb_s, thresh, load)
        rate, threshold, yes = seed_rule_solution(gamma, kv, gb_s, thresh, load)
        _expect_numbers(got, ("transfer_rate", "threshold", "decision"), where)
        got_rate, got_threshold, got_yes = got
        expect_close(got_rate, rate, f"transfer_rate for {where}", rtol=1e-6, atol=0.0)
        expect_close(got_threshold, threshold, f"threshold for {where}", rtol=1e-6, atol=0.0)
        expect_equal(bool(got_yes), yes, f"decision for {where}")

    for load in (2, 3):
        expect(0.0869146, 147_456, 12.8962, 16, load)  # an RTX 4090
    expect(0.130235, 147_456, 392.154, 16, 1)  # an H20
    expect(0.0869146, 147_456, 12.8962, 16, 0)
    for _ in range(4):
        gamma, gb_s = 10 ** rng.uniform(-3, 0), 10 ** rng.uniform(0, 3)
        expect(gamma, rng.randint(1, 500) * 1024, gb_s, rng.randint(1, 64), rng.randint(0, 40))


seed_rule = Exercise(
    notebook="08",
    name="seed_rule",
    title="The rule of two ratios",
    test=_test_seed_rule,
    stub=seed_rule_stub,
    solution=seed_rule_solution,
    hints=(
        "transfer_rate: bytes of a token divided by bytes per second gives seconds; the answer is in milliseconds.",
        "Solve `gamma / transfer_rate = batch_thresh / load` for load. That is the threshold.",
        "Compare the load with the threshold instead of dividing by the load, which may be 0.",
    ),
    mistakes=(
        Mistake(_rate_in_seconds, says="transfer_rate"),
        Mistake(_binary_gigabytes, says="transfer_rate"),
        Mistake(_upside_down, says="threshold for"),
        Mistake(_divides_by_the_load, says="ZeroDivisionError"),
        Mistake(_only_the_decision, says="expected (transfer_rate, threshold, decision), got False"),
    ),
)

# --- the delay of others ---------------------------------------------------------------------------------------


def delay_of_others_stub(
    step_ms: Callable[[int, int], float], prompt: int, chunk_size: int, num_decodes: int, num_behind: int
) -> tuple[float, float]:
    """(decodes wait, others queue): ms that one prompt costs all others in a collocated worker, summed over them.

    step_ms(prefill_tokens, decodes) is a step's time. The prompt is computed in chunks of chunk_size, one per step; the
    last one may be shorter. num_decodes requests decode in each of these steps; without the prompt, their steps would
    take step_ms(0, num_decodes). num_behind prompts come after it and start later by as long as its steps take.
    """
    raise NotImplementedError


def delay_of_others_solution(
    step_ms: Callable[[int, int], float], prompt: int, chunk_size: int, num_decodes: int, num_behind: int
) -> tuple[float, float]:
    """(decodes wait, others queue): ms that one prompt costs all others in a collocated worker, summed over them."""
    chunks = [min(chunk_size, prompt - start) for start in range(0, prompt, chunk_size)]
    steps = [step_ms(chunk, num_decodes) for chunk in chunks]
    extra = sum(step - step_ms(0, num_decodes) for step in steps) if num_decodes else 0.0
    return num_decodes * extra, num_behind * sum(steps)


def _whole_steps_count(
    step_ms: Callable[[int, int], float], prompt: int, chunk: int, decodes: int, behind: int
) -> tuple[float, float]:
    total = delay_of_others_solution(step_ms, prompt, chunk, decodes, 1)[1]
    return decodes * total, behind * total


def _one_reader(
    step_ms: Callable[[int, int], float], prompt: int, chunk: int, decodes: int, behind: int
) -> tuple[float, float]:
    waited, queued = delay_of_others_solution(step_ms, prompt, chunk, decodes, behind)
    return waited / max(decodes, 1), queued


def _full_chunks_only(
    step_ms: Callable[[int, int], float], prompt: int, chunk: int, decodes: int, behind: int
) -> tuple[float, float]:
    return delay_of_others_solution(step_ms, -(-prompt // chunk) * chunk, chunk, decodes, behind)


def _one_big_step(
    step_ms: Callable[[int, int], float], prompt: int, chunk: int, decodes: int, behind: int
) -> tuple[float, float]:
    return delay_of_others_solution(step_ms, prompt, prompt, decodes, behind)


def _queue_pays_the_difference(
    step_ms: Callable[[int, int], float], prompt: int, chunk: int, decodes: int, behind: int
) -> tuple[float, float]:
    waited = delay_of_others_solution(step_ms, prompt, chunk, decodes, behind)[0]
    return waited, behind * waited / max(decodes, 1)


def _one_number(step_ms: Callable[[int, int], float], prompt: int, chunk: int, decodes: int, behind: int) -> Any:
    return sum(delay_of_others_solution(step_ms, prompt, chunk, decodes, behind))


def _test_delay_of_others(answer: Any, rng: random.Random) -> None:
    def expect(step_ms: Callable[[int, int], float], prompt: int, chunk: int, decodes: int, behind: int) -> None:
        where = f"prompt {prompt}, chunk_size {chunk}, {decodes} decodes, {behind} behind"
        got = answer(step_ms, prompt, chunk, decodes, behind)
        _expect_numbers(got, ("decodes wait", "others queue"), where)
        waited, queued = got
        want = delay_of_others_solution(step_ms, prompt, chunk, decodes, behind)
        expect_close(waited, want[0], f"decodes wait ({where})", rtol=1e-9, atol=1e-6)
        expect_close(queued, want[1], f"others queue ({where})", rtol=1e-9, atol=1e-6)

    def simple(tokens: int, decodes: int) -> float:
        return 5.0 + 0.02 * tokens + 0.1 * decodes

    expect(simple, 100, 100, 1, 0)
    expect(simple, 100, 100, 4, 0)
    expect(simple, 1000, 256, 4, 2)
    expect(simple, 512, 512, 0, 3)
    for _ in range(3):
        base, knee, rate = rng.uniform(2, 30), rng.randint(10, 400), rng.uniform(0.01, 0.2)

        def step(tokens: int, decodes: int) -> float:  # weights for nothing up to a knee
            return base + rate * max(0, tokens + decodes - knee) + 0.05 * decodes  # noqa: B023

        expect(step, rng.randint(1, 3000), rng.choice([64, 200, 512]), rng.randint(0, 40), rng.randint(0, 5))


delay_of_others = Exercise(
    notebook="08",
    name="delay_of_others",
    title="What does one prompt cost everybody else?",
    test=_test_delay_of_others,
    stub=delay_of_others_stub,
    solution=delay_of_others_solution,
    hints=(
        "First the chunks: 256, 256, 256 and 232 for a prompt of 1000 in chunks of 256.",
        "A running decode would have waited for a step anyway: it loses `step_ms(chunk, n) - step_ms(0, n)` per chunk. "
        "A prompt in the queue loses the whole steps.",
        "Each of them loses that, so multiply by how many there are. Nobody decodes: the first number is 0.",
    ),
    mistakes=(
        Mistake(_whole_steps_count, says="decodes wait"),
        Mistake(_one_reader, says="4 decodes"),
        Mistake(_full_chunks_only, says="prompt 1000, chunk_size 256"),
        Mistake(_one_big_step, says="chunk_size 256"),
        Mistake(_queue_pays_the_difference, says="others queue"),
        Mistake(_one_number, says="expected (decodes wait, others queue)"),
    ),
)

# --- what a bucket learns --------------------------------------------------------------------------------------


def posterior_stub(
    mean: float, kappa: float, shape: float, rate: float, lengths: list[int]
) -> tuple[float, float, float, float]:
    """(mean, kappa, shape, rate) after output lengths were seen.

    Before: log length ~ Normal(mu, s2) with s2 ~ InverseGamma(shape, rate) and mu ~ Normal(mean, s2 / kappa). With n
    observations x (the *logarithms* of the lengths), their mean m and the sum S of their squared deviations from m:
    kappa and shape grow by n and n / 2; the new mean is the average of mean and m, weighted with kappa and n; rate
    grows by S / 2 and by kappa * n * (m - mean)^2 / (2 * (kappa + n)). Without lengths nothing changes.
    """
    raise NotImplementedError


def posterior_solution(
    mean: float, kappa: float, shape: float, rate: float, lengths: list[int]
) -> tuple[float, float, float, float]:
    """(mean, kappa, shape, rate) after output lengths were seen."""
    n = len(lengths)
    if n == 0:
        return mean, kappa, shape, rate
    x = [math.log(length) for length in lengths]
    m = sum(x) / n
    squares = sum((value - m) ** 2 for value in x)
    shift = kappa * n * (m - mean) ** 2 / (2 * (kappa + n))
    return (kappa * mean + n * m) / (kappa + n), kappa + n, shape + n / 2, rate + squares / 2 + shift


Four = tuple[float, float, float, float]


def _no_logarithm(mean: float, kappa: float, shape: float, rate: float, lengths: list[int]) -> Four:
    n, m = len(lengths), sum(lengths) / max(len(lengths), 1)
    squares = sum((value - m) ** 2 for value in lengths)
    shift = kappa * n * (m - mean) ** 2 / (2 * (kappa + n))
    return (kappa * mean + n * m) / (kappa + n), kappa + n, shape + n / 2, rate + squares / 2 + shift


def _log_of_the_mean(mean: float, kappa: float, shape: float, rate: float, lengths: list[int]) -> Four:
    want = posterior_solution(mean, kappa, shape, rate, lengths)
    n = len(lengths)
    m = math.log(sum(lengths) / n) if n else 0.0
    return (kappa * mean + n * m) / (kappa + n), *want[1:]


def _forgets_the_prior(mean: float, kappa: float, shape: float, rate: float, lengths: list[int]) -> Four:
    want = posterior_solution(mean, kappa, shape, rate, lengths)
    n = len(lengths)
    return (sum(map(math.log, lengths)) / n if n else mean), *want[1:]


def _no_shift(mean: float, kappa: float, shape: float, rate: float, lengths: list[int]) -> Four:
    want = posterior_solution(mean, kappa, shape, rate, lengths)
    n = len(lengths)
    m = sum(map(math.log, lengths)) / max(n, 1)
    return *want[:3], want[3] - kappa * n * (m - mean) ** 2 / (2 * (kappa + n))


def _mean_alone(mean: float, kappa: float, shape: float, rate: float, lengths: list[int]) -> Any:
    return posterior_solution(mean, kappa, shape, rate, lengths)[0]


def _variance_not_sum(mean: float, kappa: float, shape: float, rate: float, lengths: list[int]) -> Four:
    want = posterior_solution(mean, kappa, shape, rate, lengths)
    n = len(lengths)
    m = sum(map(math.log, lengths)) / max(n, 1)
    squares = sum((math.log(length) - m) ** 2 for length in lengths)
    return *want[:3], want[3] - squares / 2 + squares / 2 / max(n, 1)


def _test_posterior(answer: Any, rng: random.Random) -> None:
    def expect(prior: Four, lengths: list[int]) -> None:
        got = answer(*prior, list(lengths))
        want = posterior_solution(*prior, lengths)
        shown = ", ".join(f"{value:g}" for value in prior)
        names = ("mean", "kappa", "shape", "rate")
        _expect_numbers(got, names, f"after {lengths}")
        for name, have, need in zip(names, got, want, strict=True):
            expect_close(have, need, f"{name} after {lengths} with the prior ({shown})", rtol=1e-7, atol=1e-9)

    expect((5.0, 2.0, 1.5, 1.0), [])
    expect((0.0, 1.0, 1.0, 1.0), [1])
    expect((5.0, 4.0, 1.5, 1.0), [20, 1000])
    for _ in range(3):
        prior = (rng.uniform(2, 7), rng.uniform(0.1, 9), rng.uniform(0.5, 5), rng.uniform(0.1, 4))
        expect(prior, [round(rng.lognormvariate(5, 1)) + 1 for _ in range(rng.randint(1, 8))])


posterior = Exercise(
    notebook="08",
    name="posterior",
    title="What does a bucket know after some answers?",
    test=_test_posterior,
    stub=posterior_stub,
    solution=posterior_solution,
    hints=(
        "Everything happens to the logarithms: `x = [math.log(length) for length in lengths]`. An empty list has no "
        "mean: deal with it first.",
        "The new mean: `(kappa * mean + n * m) / (kappa + n)`. The prior counts like kappa observations.",
        "rate grows twice: by half of the *sum* of squared deviations around m, and by how far m is from the old mean.",
    ),
    mistakes=(
        Mistake(_no_logarithm, says="mean after [1]"),
        Mistake(_log_of_the_mean, says="mean after [20, 1000]"),
        Mistake(_forgets_the_prior, says="mean after [20, 1000]"),
        Mistake(_no_shift, says="rate after [20, 1000]"),
        Mistake(_variance_not_sum, says="rate after [20, 1000]"),
        Mistake(_mean_alone, says="expected (mean, kappa, shape, rate)"),
    ),
)
