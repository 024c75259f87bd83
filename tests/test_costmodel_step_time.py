"""Step-time model: features against counting, the fit against known coefficients, the solver against brute force."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopd.costmodel import StepFeatures, StepPoint, StepTimeModel, fit_step_time, prefill_steps
from nanopd.costmodel.nnls import nnls
from nanopd.engine import Request, SamplingParams, Scheduler, SchedulerConfig
from nanopd.errors import ConfigError, FitError
from nanopd.kv.block_manager import BlockManager

TRUE = StepTimeModel(
    base_ms=4.2,
    token_ms=0.004,
    dense_token_ms=0.016,
    knee_tokens=120,
    pair_ms=6e-7,
    kv_token_ms=3.7e-5,
    chunk_ms=0.3,
    sequence_ms=0.012,
    launch_ms=6.0,
)


def random_features(rng: random.Random) -> StepFeatures:
    """A step like those an 8B model serves: chunks of up to 2,048 tokens, batches up to 128, contexts up to 16k."""
    batch = rng.choice([0, 1, 4, 8, 16, 32, 64, 128])
    features = StepFeatures.decode(batch, batch * round(10 ** rng.uniform(2, 4.2)))
    if batch == 0 or rng.random() < 0.7:
        start = rng.choice([0, 1]) * round(10 ** rng.uniform(2, 3.9))
        features = features.with_chunk(round(10 ** rng.uniform(1, 3.3)), start)
    return features


def points(model: StepTimeModel, n: int, noise: float, seed: int = 0) -> list[StepPoint]:
    rng = random.Random(seed)
    made = [random_features(rng) for _ in range(n)]
    return [StepPoint(f, model.step_ms(f) * math.exp(rng.gauss(0, noise))) for f in made]


# --- features ----------------------------------------------------------------------------------------------------


def test_pairs_are_the_pairs_that_attention_computes() -> None:
    for length, start in itertools.product((1, 2, 7), (0, 1, 30)):
        counted = sum(1 for query in range(start, start + length) for key in range(query + 1))
        assert StepFeatures().with_chunk(length, start).prefill_pairs == counted


def test_features_of_a_plan_are_what_the_step_computes() -> None:
    """Through the real scheduler, against counts of the chunks themselves, over a whole run with mixed steps."""
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12), BlockManager(64, 4))
    runner = FakeRunner(64, 4)
    for i, length in enumerate((5, 17, 9)):
        scheduler.add(Request(f"r{i}", range(1, length + 1), SamplingParams(max_tokens=6, ignore_eos=True)))
    kinds = set()
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        features = StepFeatures.of(plan)
        prefills, decodes = plan.chunks[plan.num_decodes :], plan.chunks[: plan.num_decodes]
        assert features.prefill_tokens == sum(c.num_tokens for c in prefills)
        assert features.prefill_pairs == sum(c.start + i + 1 for c in prefills for i in range(c.num_tokens))
        assert (features.num_prefills, features.num_decodes) == (len(prefills), len(decodes))
        assert features.kv_tokens == sum(c.start + 1 for c in decodes)
        assert features.num_tokens == plan.num_tokens
        kinds.add((bool(prefills), bool(decodes)))
        scheduler.update(plan, runner.execute(plan))
    assert kinds == {(True, False), (True, True), (False, True)}


def test_context_of_a_chunk_is_the_mean_over_its_queries() -> None:
    features = StepFeatures().with_chunk(4, 10)
    assert features.chunk_context == np.mean([11, 12, 13, 14])
    assert StepFeatures.decode(3, 30).chunk_context == 0.0


def test_chunks_cover_a_prompt() -> None:
    steps = prefill_steps(100, 7, 32, StepFeatures.decode(2, 50))
    assert [step.prefill_tokens for step in steps] == [32, 32, 32, 4]
    assert sum(step.prefill_pairs for step in steps) == sum(range(8, 108))
    assert all(step.decodes_only == StepFeatures.decode(2, 50) for step in steps)
    assert prefill_steps(100) == [StepFeatures().with_chunk(100)]


@pytest.mark.parametrize(
    "values",
    [
        {"num_decodes": -1},
        {"kv_tokens": math.nan},
        {"prefill_pairs": math.inf},
        {"prefill_tokens": "5"},
        {"num_prefills": None},
        {"kv_tokens": 10**400},
    ],
    ids=lambda values: f"{next(iter(values))}-{str(next(iter(values.values())))[:6]}",
)
def test_impossible_counts_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        StepFeatures(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, "5", None, True, 10**400], ids=lambda ms: str(ms)[:6])
def test_impossible_times_are_refused(ms: float) -> None:
    with pytest.raises(ConfigError, match="> 0"):
        StepPoint(StepFeatures(), ms)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((None,), "num_tokens"), ((-1,), "num_tokens"), ((5, math.nan), "start"), ((5, 0, 0), "chunk_size")],
    ids=["none", "negative", "start", "chunk"],
)
def test_impossible_prompts_are_refused(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an int"):
        prefill_steps(*arguments)


# --- model -------------------------------------------------------------------------------------------------------


def test_the_terms_are_what_the_docstring_says() -> None:
    features = StepFeatures.decode(10, 5000).with_chunk(300, 1000)
    terms = TRUE.terms(features)
    assert terms == pytest.approx(
        {
            "weights and fixed costs": 4.2,
            "linear layers": 0.004 * 310 + 0.016 * 190,
            "prefill attention": 6e-7 * 300 * (1000 + 301 / 2),
            "decode attention": 3.7e-5 * 5000,
            "chunks": 0.3,
            "waiting for launches": 0.0,
            "sequences": 0.012 * 11,
        }
    )
    assert TRUE.step_ms(features) == sum(terms.values())


def test_a_step_with_prefill_waits_for_its_launches_and_a_decode_step_does_not() -> None:
    small = StepFeatures().with_chunk(8)
    assert TRUE.step_ms(small) == pytest.approx(6.0 + 0.012)
    assert TRUE.step_ms(StepFeatures.decode(8, 100)) < 5.0


def test_interference_is_the_difference_of_two_steps() -> None:
    decodes = StepFeatures.decode(32, 32 * 1024)
    mixed = decodes.with_chunk(512)
    assert TRUE.interference_ms(mixed) == pytest.approx(TRUE.step_ms(mixed) - TRUE.step_ms(decodes))
    assert TRUE.interference_ms(decodes) == 0.0
    assert TRUE.interference_ms(StepFeatures().with_chunk(512)) == 0.0, "nobody decodes, so nobody is held up"


def test_prefill_time_is_the_sum_of_its_steps() -> None:
    beside = StepFeatures.decode(4, 4000)
    by_hand = sum(TRUE.step_ms(beside.with_chunk(n, s)) for n, s in ((512, 100), (512, 612), (76, 1124)))
    assert TRUE.prefill_ms(1100, start=100, chunk_size=512, beside=beside) == pytest.approx(by_hand)


@given(st.lists(st.floats(0, 1e3), min_size=10, max_size=10), st.integers(0, 10**6))
def test_no_prediction_is_negative_or_not_a_number(values: list[float], seed: int) -> None:
    model = StepTimeModel(*values)
    ms = model.step_ms(random_features(random.Random(seed)))
    assert math.isfinite(ms) and ms >= 0


def test_json_round_trip_and_what_it_refuses() -> None:
    assert StepTimeModel.from_dict(TRUE.as_dict()) == TRUE
    with pytest.raises(ConfigError, match=r"missing or unknown: \['base_ms'\]"):
        StepTimeModel.from_dict({k: v for k, v in TRUE.as_dict().items() if k != "base_ms"})
    with pytest.raises(ConfigError, match=r"pair_ms .* got -1"):
        replace(TRUE, pair_ms=-1.0)


# --- non-negative least squares ----------------------------------------------------------------------------------


def brute_force(matrix: np.ndarray, target: np.ndarray) -> float:
    """The least squared error over all sets of coefficients that may differ from zero, if theirs are not negative."""
    n = matrix.shape[1]
    best = float(target @ target)
    for size in range(1, n + 1):
        for columns in itertools.combinations(range(n), size):
            part = matrix[:, columns]
            x = np.linalg.lstsq(part, target, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(((part @ x - target) ** 2).sum()))
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 9))
def test_nnls_finds_the_best_of_all_active_sets(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(m, n)) * 10.0 ** rng.integers(-6, 7, size=n)
    target = rng.normal(size=m)
    x = nnls(matrix, target)
    assert (x >= 0).all()
    # No worse than the best set: any x >= 0 is an upper bound of the minimum, and so is what brute force finds.
    assert ((matrix @ x - target) ** 2).sum() <= brute_force(matrix, target) * (1 + 1e-7) + 1e-12


def test_nnls_gives_a_column_of_zeros_nothing() -> None:
    x = nnls(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([2.0, 4.0]))
    assert x == pytest.approx([3.0, 0.0])


# --- fit ---------------------------------------------------------------------------------------------------------


def test_the_fit_recovers_a_known_model_from_noisy_points() -> None:
    fit = fit_step_time(points(TRUE, 160, noise=0.02), seed=3)
    assert (fit.quality.num_points, fit.quality.num_held_out) == (128, 32)
    assert fit.quality.median_error < 0.03 and fit.quality.r2 > 0.99 and fit.quality.warnings == ()
    unseen = points(TRUE, 200, noise=0.0, seed=99)
    errors = [abs(fit.model.step_ms(p.features) / p.ms - 1) for p in unseen]
    assert np.median(errors) < 0.02 and np.quantile(errors, 0.9) < 0.06
    assert fit.model.base_ms == pytest.approx(TRUE.base_ms, rel=0.05)
    assert fit.model.kv_token_ms == pytest.approx(TRUE.kv_token_ms, rel=0.05)
    assert fit.model.launch_ms == pytest.approx(TRUE.launch_ms, rel=0.05)
    above = fit.model.token_ms + fit.model.dense_token_ms
    assert above == pytest.approx(TRUE.token_ms + TRUE.dense_token_ms, rel=0.05)


def test_a_roofline_is_within_reach_of_the_form() -> None:
    """max(reading the weights, computing the tokens), which is not a case of the model's linear layers unless a = 0."""
    rng = random.Random(5)
    made = [random_features(rng) for _ in range(150)]
    ms = [0.5 + max(4.0, 0.018 * f.num_tokens) + 6e-7 * f.prefill_pairs + 3.7e-5 * f.kv_tokens for f in made]
    fit = fit_step_time([StepPoint(f, t) for f, t in zip(made, ms)])
    assert fit.quality.median_error < 0.02 and fit.quality.p90_error < 0.05


def test_a_few_steps_that_somebody_held_up_do_not_bend_the_model() -> None:
    clean = points(TRUE, 160, noise=0.02)
    rng = random.Random(1)
    held_up = [replace(p, ms=p.ms * rng.choice([2, 20])) if rng.random() < 0.12 else p for p in clean]
    assert held_up != clean
    fit = fit_step_time(held_up, holdout=0)
    errors = [fit.model.step_ms(p.features) / TRUE.step_ms(p.features) - 1 for p in clean]
    assert np.median(np.abs(errors)) < 0.02 and abs(np.mean(errors)) < 0.02


def test_held_out_points_are_not_fitted_to() -> None:
    training = points(TRUE, 60, noise=0.01)
    wrong = [replace(p, ms=3 * p.ms, held_out=True) for p in points(TRUE, 20, noise=0.0, seed=8)]
    fit = fit_step_time(training + wrong)
    alone = fit_step_time(training, holdout=0)
    assert fit.model == alone.model
    assert fit.quality.num_held_out == 20 and fit.quality.median_error == pytest.approx(2 / 3, abs=0.05)
    assert any("poor fit" in warning for warning in fit.quality.warnings)
    assert [p.held_out for p in fit.points] == [False] * 60 + [True] * 20


def test_the_same_seed_holds_out_the_same_points() -> None:
    made = points(TRUE, 60, noise=0.05)
    assert fit_step_time(made, seed=4) == fit_step_time(made, seed=4)
    assert fit_step_time(made, seed=4).points != fit_step_time(made, seed=5).points


def test_too_few_points_are_refused_and_the_message_says_how_many() -> None:
    with pytest.raises(FitError, match=r"7 points to fit to, at least 8"):
        fit_step_time(points(TRUE, 7, 0.0), holdout=0)
    with pytest.raises(ConfigError, match="holdout"):
        fit_step_time(points(TRUE, 20, 0.0), holdout=1.0)


def test_what_was_never_measured_costs_nothing_and_is_said() -> None:
    decodes = [p for p in points(TRUE, 200, 0.01) if not p.features.num_prefills]
    fit = fit_step_time(decodes)
    assert fit.model.pair_ms == fit.model.chunk_ms == fit.model.launch_ms == 0.0
    assert any("only decodes were measured" in warning for warning in fit.quality.warnings)
    prefills = [p for p in points(TRUE, 400, 0.01) if not p.features.num_decodes]
    assert any("only prefill was measured" in w for w in fit_step_time(prefills).quality.warnings)


def test_points_that_are_all_alike_give_their_mean() -> None:
    same = StepFeatures.decode(4, 4000)
    fit = fit_step_time([StepPoint(same, ms) for ms in (4.9, 5.0, 5.1) * 5], holdout=0)
    assert fit.model.step_ms(same) == pytest.approx(5.0, rel=0.01)
    assert fit.quality.warnings
    assert math.isfinite(fit.model.step_ms(StepFeatures().with_chunk(100)))
