"""OutputLengthPredictor: Student's t against tables, the posterior against formulas and grids, calibration, cuts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanopd.course.texts import Root
from nanopd.engine.request import FinishReason, Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import ConfigError
from nanopd.router.conjugate import Moments, NormalInverseGamma
from nanopd.router.predictor import LengthPrediction, OutputLengthPredictor, bucket_of, bucket_span
from nanopd.router.student_t import t_cdf, t_pdf, t_quantile

TRACE = Root.find(Path(__file__).parent).path.parent / "shared" / "data" / "mooncake_synthetic_trace.jsonl"
UNLIMITED = 10**9
LEVELS = (0.5, 0.8, 0.95)


# --- Student's t -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dof", "p", "expected"),
    [  # from the printed tables (for example NIST/SEMATECH e-Handbook, 1.3.6.7.2)
        (1, 0.9, 3.078), (1, 0.975, 12.706), (2, 0.95, 2.920), (2, 0.995, 9.925), (3, 0.975, 3.182), (4, 0.99, 3.747),
        (5, 0.95, 2.015), (7, 0.975, 2.365), (10, 0.995, 3.169), (20, 0.9, 1.325), (30, 0.975, 2.042),
        (60, 0.99, 2.390), (100, 0.975, 1.984), (10**6, 0.975, 1.960),
    ],
)  # fmt: skip
def test_quantiles_are_the_tables(dof: float, p: float, expected: float) -> None:
    assert t_quantile(p, dof) == pytest.approx(expected, abs=6e-4)
    assert t_quantile(1 - p, dof) == pytest.approx(-expected, abs=6e-4)


@given(dof=st.floats(0.5, 1e5), p=st.floats(1e-4, 1 - 1e-4))
def test_quantile_inverts_the_distribution_function(dof: float, p: float) -> None:
    assert t_cdf(t_quantile(p, dof), dof) == pytest.approx(p, abs=1e-8)


@pytest.mark.parametrize("dof", [1.0, 2.5, 8.0, 50.0])
def test_the_distribution_function_is_the_integral_of_the_density(dof: float) -> None:
    step, total = 1e-3, 0.5
    for k in range(2000):
        total += t_pdf((k + 0.5) * step, dof) * step
    assert t_cdf(2.0, dof) == pytest.approx(total, abs=1e-6)
    assert t_cdf(-2.0, dof) == pytest.approx(1 - total, abs=1e-6)


@pytest.mark.parametrize(("p", "dof"), [(0.0, 3), (1.0, 3), (-0.1, 3), (0.5, 0), (0.7, -1), (float("nan"), 3)])
def test_no_quantile_outside_of_the_domain(p: float, dof: float) -> None:
    with pytest.raises(ConfigError, match=r"in \(0, 1\)|positive"):
        t_quantile(p, dof)


# --- the conjugate update --------------------------------------------------------------------------------------


@given(st.lists(st.floats(-5, 12), min_size=2, max_size=30), st.integers(1, 29))
def test_moments_merge_as_if_seen_at_once(values: list[float], cut: int) -> None:
    def moments(part: list[float]) -> Moments:
        mean = sum(part) / len(part)
        return Moments(len(part), mean, sum((v - mean) ** 2 for v in part))

    cut = min(cut, len(values) - 1)
    merged = moments(values[:cut]).merge(moments(values[cut:]))
    assert merged == pytest.approx(moments(values), abs=1e-9)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12))
def test_one_by_one_is_all_at_once(values: list[float]) -> None:
    start = NormalInverseGamma(0.5, 2.0, 3.0, 1.5)
    together, stepwise = Moments(), start
    for value in values:
        together = together.merge(Moments(1.0, value))
        stepwise = stepwise.update(Moments(1.0, value))
    assert start.update(together) == pytest.approx(stepwise, abs=1e-9)


def test_the_posterior_is_bayes_rule_on_a_grid() -> None:
    """Independent of conjugacy: prior times likelihood, summed over a grid of (mu, sigma²)."""
    prior = NormalInverseGamma(1.0, 2.0, 3.0, 2.0)
    data = [0.2, 1.9, 2.4, 1.1]
    mass = mean = variance = 0.0
    for i in range(400):
        mu = -3 + i * 0.02
        for j in range(1, 600):
            v = j * 0.02
            log = -(prior.shape + 1) * math.log(v) - prior.rate / v
            log += -0.5 * math.log(v) - prior.kappa * (mu - prior.mean) ** 2 / (2 * v)
            log += sum(-0.5 * math.log(v) - (x - mu) ** 2 / (2 * v) for x in data)
            weight = math.exp(log)
            mass, mean, variance = mass + weight, mean + weight * mu, variance + weight * v
    n, average = len(data), sum(data) / len(data)
    posterior = prior.update(Moments(n, average, sum((x - average) ** 2 for x in data)))
    assert posterior.mean == pytest.approx(mean / mass, abs=1e-3)
    assert posterior.rate / (posterior.shape - 1) == pytest.approx(variance / mass, rel=5e-3)


# --- predictions -----------------------------------------------------------------------------------------------


def test_the_mean_is_that_of_a_log_normal_with_many_degrees_of_freedom() -> None:
    wide = LengthPrediction(location=4.0, scale=0.7, dof=1e5, max_tokens=UNLIMITED)
    assert wide.mean == pytest.approx(math.exp(4.0 + 0.7**2 / 2), rel=1e-3)
    assert wide.median == pytest.approx(math.exp(4.0))


@pytest.mark.parametrize("dof", [2.0, 5.0, 40.0])
def test_the_mean_counts_what_is_beyond_the_limit_as_the_limit(dof: float) -> None:
    prediction = LengthPrediction(location=5.0, scale=1.0, dof=dof, max_tokens=300)
    n = 4000
    by_quantiles = sum(prediction.quantile((i + 0.5) / n) for i in range(n)) / n
    assert prediction.mean == pytest.approx(by_quantiles, rel=2e-3)
    assert prediction.mean < 300 == prediction.quantile(0.99)


@given(st.floats(-2, 12), st.floats(0.01, 4), st.floats(1, 200), st.integers(0, 10**6))
def test_predictions_stay_between_one_token_and_the_limit(loc: float, scale: float, dof: float, most: int) -> None:
    prediction = LengthPrediction(loc, scale, dof, most)
    values = [prediction.quantile(0.05), prediction.median, prediction.quantile(0.95)]
    assert values == sorted(values)
    for value in (*values, prediction.mean):
        assert min(1, most) * 0.999 <= value <= most


def test_without_any_data_the_prior_speaks() -> None:
    prediction = OutputLengthPredictor().distribution(1000, 4096)
    assert prediction.median == pytest.approx(128)
    low, high = prediction.interval(0.8)
    assert low < 40 and high > 400


@pytest.mark.parametrize(("tokens", "span"), [(1, (1, 2)), (2, (2, 4)), (3, (2, 4)), (1023, (512, 1024))])
def test_buckets_are_powers_of_two(tokens: int, span: tuple[int, int]) -> None:
    assert bucket_span(bucket_of(tokens)) == span


# --- calibration -----------------------------------------------------------------------------------------------

SHAPES = {100: (5.0, 0.6), 1000: (6.0, 1.0), 8000: (3.5, 1.4)}  # prompt tokens -> mean and deviation of log length


def synthetic(n: int, seed: int) -> Iterator[tuple[int, int]]:
    rng = random.Random(seed)
    for _ in range(n):
        prompt = rng.choice(list(SHAPES))
        yield prompt, max(1, round(rng.lognormvariate(*SHAPES[prompt])))


def coverage(pairs: Iterator[tuple[int, int]]) -> dict[int, dict[float, float]]:
    """Each length is predicted before it is shown. Per prompt length: share of lengths inside of each interval."""
    predictor, inside, count = OutputLengthPredictor(), {}, {}
    for prompt, output in pairs:
        prediction = predictor.distribution(prompt, UNLIMITED)
        key = bucket_of(prompt)
        count[key] = count.get(key, 0) + 1
        hits = inside.setdefault(key, dict.fromkeys(LEVELS, 0))
        for level in LEVELS:
            low, high = prediction.interval(level)
            hits[level] += low <= output <= high
        predictor.learn(prompt, output)
    return {key: {level: hits[level] / count[key] for level in LEVELS} for key, hits in inside.items()}


def test_intervals_cover_what_they_say_in_every_bucket() -> None:
    shares = coverage(synthetic(3000, seed=5))
    assert len(shares) == 3
    for share in shares.values():
        for level in LEVELS:  # three standard errors of some 1,000 samples, and the rounding to whole tokens
            assert share[level] == pytest.approx(level, abs=0.015 + 3 * math.sqrt(level * (1 - level) / 1000))


def test_intervals_cover_from_the_first_observations_on() -> None:
    """Averaged over many short histories: 15 lengths each, so that the uncertainty of the parameters matters."""
    inside, total = dict.fromkeys(LEVELS, 0.0), 0
    for seed in range(120):
        for share in coverage(synthetic(15, seed)).values():
            total += 1
            for level in LEVELS:
                inside[level] += share[level]
    for level in LEVELS:
        assert inside[level] / total == pytest.approx(level, abs=0.06)


@pytest.mark.skipif(not TRACE.exists(), reason="the Mooncake trace is not there")
def test_intervals_cover_real_lengths() -> None:
    """The trace's lengths are no log-normals (two populations share a bucket), so the tolerance is wider."""
    predictor, inside, n = OutputLengthPredictor(), dict.fromkeys(LEVELS, 0), 0
    for line in TRACE.read_text().splitlines():
        record = json.loads(line)
        prompt, output = record["input_length"], record["output_length"]
        prediction = predictor.distribution(prompt, UNLIMITED)
        for level in LEVELS:
            low, high = prediction.interval(level)
            inside[level] += low <= output <= high
        n += 1
        predictor.learn(prompt, output)
    for level in LEVELS:
        assert inside[level] / n == pytest.approx(level, abs=0.06)


# --- sharing between buckets -----------------------------------------------------------------------------------


def feed(predictor: OutputLengthPredictor, prompt: int, mean: float, sigma: float, n: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(n):
        predictor.learn(prompt, max(1, round(rng.lognormvariate(mean, sigma))))


def test_an_empty_bucket_predicts_the_global_mean_and_spread() -> None:
    predictor = OutputLengthPredictor()
    feed(predictor, 100, 5.0, 0.5, 200)
    feed(predictor, 3000, 6.0, 0.5, 200)
    everything = predictor.global_posterior
    empty = predictor.distribution(20_000, UNLIMITED)
    assert empty.location == pytest.approx(everything.mean)
    assert empty.scale == pytest.approx(everything.predictive_scale)


def test_a_bucket_leaves_the_global_mean_smoothly() -> None:
    """Each observation of its own moves it further, by no jump: the shrinkage weight is n / (n + strength)."""
    predictor = OutputLengthPredictor(prior_strength=8.0)
    feed(predictor, 100, 6.0, 0.3, 400)
    places, target = [], math.log(20)
    for n in range(40):
        m0 = predictor.global_posterior.mean
        location = predictor.distribution(5000, UNLIMITED).location
        kappa = 8.0 + predictor.prior.kappa
        assert location == pytest.approx((kappa * m0 + n * target) / (kappa + n), abs=1e-6)
        places.append(location)
        predictor.learn(5000, 20)
    assert all(after < before for before, after in pairwise(places))
    assert max(before - after for before, after in pairwise(places)) < 0.4
    assert places[-1] < target + 0.7


def test_a_bucket_that_differs_learns_and_leaves_the_others_alone() -> None:
    predictor = OutputLengthPredictor()
    feed(predictor, 100, 6.0, 0.3, 300)
    before = predictor.distribution(100, UNLIMITED).median
    feed(predictor, 5000, 2.0, 0.3, 300, seed=1)
    assert math.log(predictor.distribution(5000, UNLIMITED).median) == pytest.approx(2.0, abs=0.2)
    assert predictor.distribution(100, UNLIMITED).median == pytest.approx(before, rel=0.1)


def test_a_bucket_does_not_count_its_own_observations_twice() -> None:
    """Alone it has nothing to borrow; with 3 observations elsewhere it borrows 3, and never more than the strength."""
    predictor = OutputLengthPredictor(prior_strength=8.0)
    feed(predictor, 100, 5.0, 0.5, 20)
    (alone,) = predictor.buckets()
    assert alone.posterior.kappa == pytest.approx(predictor.prior.kappa + 20)
    feed(predictor, 5000, 5.0, 0.5, 3)
    first, second = predictor.buckets()
    assert first.posterior.kappa == pytest.approx(predictor.prior.kappa + 20 + 3)
    assert second.posterior.kappa == pytest.approx(predictor.prior.kappa + 3 + 8)


def test_forgetting_follows_a_change() -> None:
    forgets, remembers = OutputLengthPredictor(forgetting=0.98), OutputLengthPredictor()
    for predictor in (forgets, remembers):
        feed(predictor, 100, 6.0, 0.3, 300)
        feed(predictor, 100, 3.0, 0.3, 300, seed=1)
    assert math.log(forgets.distribution(100, UNLIMITED).median) == pytest.approx(3.0, abs=0.15)
    assert math.log(remembers.distribution(100, UNLIMITED).median) == pytest.approx(4.5, abs=0.15)
    assert forgets.buckets()[0].observed < 51


# --- lengths that were cut -------------------------------------------------------------------------------------


def cut_at_limit(rng: random.Random) -> int:
    return 150  # the median of the lengths below is 148


def cut_anywhere(rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(5.2, 1.0)))


@pytest.mark.parametrize("limit", [cut_at_limit, cut_anywhere], ids=["max_tokens", "aborted"])
def test_cut_lengths_leave_no_bias(limit: Callable[[random.Random], int]) -> None:
    rng, predictor, naive = random.Random(3), OutputLengthPredictor(), OutputLengthPredictor()
    cuts = 0
    for _ in range(2000):
        length, most = max(1, round(rng.lognormvariate(5.0, 0.8))), limit(rng)
        predictor.learn(500, min(length, most), cut=length > most)
        naive.learn(500, min(length, most))
        cuts += length > most
    assert cuts > 700
    posterior = predictor.buckets()[0].posterior
    assert posterior.mean == pytest.approx(5.0, abs=0.08)
    assert posterior.sigma == pytest.approx(0.8, abs=0.08)
    assert naive.buckets()[0].posterior.mean < 4.75, "the test would pass without any treatment"


def test_the_prediction_after_nothing_but_cuts_lies_beyond_them() -> None:
    predictor = OutputLengthPredictor()
    for _ in range(50):
        predictor.learn(500, 200, cut=True)
    assert 200 < predictor.distribution(500, UNLIMITED).median < math.inf
    assert predictor.distribution(500, 200).mean > 150


@pytest.mark.parametrize(
    ("reason", "ignore_eos", "observed", "cut"),
    [
        (FinishReason.STOP, False, 1, 0),
        (FinishReason.LENGTH, False, 0, 1),
        (FinishReason.LENGTH, True, 1, 0),
        (FinishReason.ABORTED, False, 0, 1),
        (FinishReason.ABORTED, True, 0, 1),
        (FinishReason.FAILED, False, 0, 1),
    ],
)
def test_what_a_finished_request_shows(reason: FinishReason, ignore_eos: bool, observed: int, cut: int) -> None:
    request = Request("r", [1] * 70, SamplingParams(max_tokens=9, ignore_eos=ignore_eos))
    for token in range(9):
        request.append_token(token)
    request.finish(reason, 1.0)
    predictor = OutputLengthPredictor()
    predictor.observe(request)
    (bucket,) = predictor.buckets()
    assert (bucket.low, bucket.high, bucket.observed, bucket.cut) == (64, 128, observed, cut)


def test_a_request_gets_the_mean_of_its_bucket_below_its_limit() -> None:
    predictor = OutputLengthPredictor()
    feed(predictor, 70, 5.0, 0.5, 100)
    short, long = (Request("r", [1] * 70, SamplingParams(max_tokens=most)) for most in (50, 5000))
    assert predictor.predict(short) == predictor.distribution(70, 50).mean < 50
    assert predictor.predict(long) == pytest.approx(math.exp(5.0 + 0.5**2 / 2), rel=0.15)


def test_a_request_without_output_says_nothing() -> None:
    predictor = OutputLengthPredictor()
    predictor.learn(10, 0, cut=True)
    assert predictor.buckets() == []


@given(st.lists(st.tuples(st.integers(1, 10**5), st.integers(1, 10**6), st.booleans()), max_size=40))
def test_no_history_breaks_it(history: list[tuple[int, int, bool]]) -> None:
    predictor = OutputLengthPredictor(forgetting=0.9)
    for prompt, output, cut in history:
        predictor.learn(prompt, output, cut=cut)
    for prompt in (1, 100, 10**6):
        prediction = predictor.distribution(prompt, 4096)
        assert 1 <= prediction.quantile(0.1) <= prediction.median <= prediction.quantile(0.9) <= 4096
        assert math.isfinite(prediction.mean)


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OutputLengthPredictor(prior_strength=0), "prior_strength"),
        (lambda: OutputLengthPredictor(forgetting=1.5), "forgetting"),
        (lambda: OutputLengthPredictor(forgetting=0), "forgetting"),
        (lambda: OutputLengthPredictor(prior=NormalInverseGamma(1, 0, 1, 1)), "kappa"),
        (lambda: OutputLengthPredictor().distribution(0, 5), "prompt_tokens .* got 0"),
        (lambda: OutputLengthPredictor().distribution(5, -1), "max_tokens"),
        (lambda: OutputLengthPredictor().distribution(5, 9).interval(1.0), r"\(0, 1\)"),
        (lambda: OutputLengthPredictor().distribution(5, 9).interval(0), r"coverage .* got 0"),
        (lambda: OutputLengthPredictor(prior_strength=math.inf), "prior_strength .* got inf"),
        (lambda: OutputLengthPredictor(prior=NormalInverseGamma(math.nan, 1, 1, 1)), "mean of the prior .* got nan"),
        (lambda: OutputLengthPredictor(prior=None), "prior must be .* got None"),  # type: ignore[arg-type]
        (lambda: OutputLengthPredictor().distribution(5, math.inf), "max_tokens .* got inf"),  # type: ignore[arg-type]
        (lambda: OutputLengthPredictor().distribution("5", 5), "prompt_tokens .* got '5'"),  # type: ignore[arg-type]
    ],
    ids=[
        "strength",
        "forgetting-high",
        "forgetting-zero",
        "prior",
        "prompt",
        "max_tokens",
        "interval",
        "coverage",
        "strength-inf",
        "prior-nan",
        "no-prior",
        "endless",
        "text",
    ],
)
def test_bad_input_is_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("tokens", [math.nan, math.inf, -1, "5", True], ids=str)
def test_a_length_that_is_none_teaches_nothing(tokens: Any, cut: bool) -> None:
    predictor = OutputLengthPredictor()
    with pytest.raises(ConfigError, match=f"output_tokens .* got {tokens!r}"):
        predictor.learn(5, tokens, cut=cut)
    assert predictor.buckets() == []


def test_a_limit_beyond_all_floats_is_no_limit() -> None:
    assert OutputLengthPredictor().distribution(5, 10**400).quantile(0.9) < 10_000
