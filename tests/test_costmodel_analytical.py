"""The analytical model: published numbers, rule and formulas, fits; the step-time cost behind the same interface."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanopd.costmodel import (
    AnalyticalModel,
    Estimate,
    HardwareProfile,
    LoadState,
    RequestSize,
    StepFeatures,
    StepPoint,
    StepTimeCost,
    StepTimeModel,
    preset,
)
from nanopd.costmodel.analytical_fit import fit_alpha, fit_beta, fit_gamma
from nanopd.errors import ConfigError, FitError


def profile(**changes: object) -> HardwareProfile:
    values = {
        "device": "toy", "model": "m", "dtype": "float32", "alpha_ms_per_token": 0.5, "beta_ms": 10.0,
        "gamma_ms_per_token": 0.2, "batch_thresh": 4, "kv_bytes_per_token": 1_000_000, "bandwidth_gb_s": 10.0,
    }  # fmt: skip
    return HardwareProfile(**{**values, **changes})  # type: ignore[arg-type]


# --- the published numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rate", "ratio", "threshold"),
    [("rtx-4090", 0.011434, 7.601, 2.105), ("h20", 0.00037602, 346.36, 0.046)],
)
def test_published_transfer_rates_ratios_and_thresholds(name: str, rate: float, ratio: float, threshold: float) -> None:
    model = AnalyticalModel(preset(name))
    assert float(f"{model.transfer_rate_ms_per_token:.5g}") == rate
    assert float(f"{model.ratio:.{3 if ratio < 100 else 2}f}") == ratio
    assert round(model.threshold_load, 3) == threshold


def test_published_conclusions() -> None:
    assert not AnalyticalModel(preset("rtx-4090")).prefers_disaggregation(2)
    assert AnalyticalModel(preset("rtx-4090")).prefers_disaggregation(3)
    assert AnalyticalModel(preset("h20")).prefers_disaggregation(1)
    assert not AnalyticalModel(preset("h20")).prefers_disaggregation(0)


# --- formulas ----------------------------------------------------------------------------------------------------


def test_terms_by_hand() -> None:
    model, request = AnalyticalModel(profile()), RequestSize(100, 20)
    assert model.decode_step_ms(3) == 10 and model.decode_step_ms(8) == 20
    collocated = model.collocated(request, LoadState(num_decodes=2))
    assert dict(collocated.terms) == {"prefill": 50.0, "decode": 200.0, "interference": 0.2 * 100 * 2 / 4}
    assert collocated.total_ms == 260.0
    crowded = model.collocated(request, LoadState(num_decodes=8)).terms
    assert crowded["decode"] == 400.0 and crowded["interference"] == 20.0, "interference stops growing at B*"
    disaggregated = model.disaggregated(request, LoadState(num_decodes=7))
    assert dict(disaggregated.terms) == {"prefill": 50.0, "transfer": pytest.approx(10.0), "decode": 400.0}


@given(load=st.floats(0, 16), gamma=st.floats(0, 10), bandwidth=st.floats(0.1, 1e4), prompt=st.integers(1, 10**5))
def test_the_rule_is_the_comparison_without_decode(load: float, gamma: float, bandwidth: float, prompt: int) -> None:
    """Up to B* and without output tokens, rule and formulas say the same, whatever the prompt."""
    model = AnalyticalModel(profile(gamma_ms_per_token=gamma, bandwidth_gb_s=bandwidth, batch_thresh=16))
    request = RequestSize(prompt, 0)
    here, there = (f(request, LoadState(load)).total_ms for f in (model.collocated, model.disaggregated))
    if not math.isclose(here, there, rel_tol=1e-9):
        assert model.prefers_disaggregation(load) == (here > there)


def test_without_a_link_nothing_is_moved() -> None:
    model = AnalyticalModel(profile(bandwidth_gb_s=None))
    assert model.disaggregated(RequestSize(100, 1), LoadState()).terms["transfer"] == 0.0
    assert model.ratio == math.inf and model.threshold_load == 0.0
    assert model.prefers_disaggregation(0.1) and not model.prefers_disaggregation(0)


def test_without_interference_it_never_disaggregates() -> None:
    model = AnalyticalModel(profile(gamma_ms_per_token=0.0))
    assert model.threshold_load == math.inf and not model.prefers_disaggregation(1e9)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: RequestSize(0, 1), "prompt_tokens .* got 0"),
        (lambda: RequestSize(10, 1, 10), "cached_tokens must be in .* got 10 of 10"),
        (lambda: RequestSize(10, math.nan), "output_tokens .* got nan"),
        (lambda: LoadState(kv_tokens=-1), "kv_tokens .* got -1"),
        (lambda: Estimate({"decode": math.inf}), "'decode' .* got inf"),
        (lambda: RequestSize(math.inf, 1), "prompt_tokens .* got inf"),  # type: ignore[arg-type]
        (lambda: RequestSize(10, "5"), "output_tokens .* got '5'"),  # type: ignore[arg-type]
        (lambda: LoadState(True), "num_decodes .* got True"),
        (lambda: LoadState(10**400), "num_decodes .* got 1000"),
        (lambda: Estimate({"decode": None}), "'decode' .* got None"),  # type: ignore[dict-item]
        (lambda: cost(bandwidth_gb_s=-1.0), "bandwidth_gb_s .* got -1.0"),
        (lambda: cost(chunk_size=0), "chunk_size .* got 0"),
    ],
    ids=[
        "empty prompt",
        "all cached",
        "output nan",
        "negative load",
        "infinite term",
        "endless prompt",
        "output text",
        "load true",
        "load huge",
        "no term",
        "bandwidth",
        "chunk",
    ],
)
def test_impossible_requests_loads_and_terms_are_refused(make, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        make()


def test_an_estimate_cannot_be_changed_from_outside() -> None:
    terms = {"a": 1.0, "b": 2.0}
    estimate = Estimate(terms)
    terms["a"] = 50.0
    assert estimate.total_ms == 3.0 and str(estimate) == "3 ms = a 1 + b 2"
    with pytest.raises(TypeError):
        estimate.terms["a"] = 1.0  # type: ignore[index]


# --- fits --------------------------------------------------------------------------------------------------------


def point(kind: str, ms: float, features: StepFeatures, held_out: bool = False) -> StepPoint:
    return StepPoint(features, ms, kind, held_out=held_out)


def test_alpha_is_the_slope() -> None:
    made = [point("prefill", 3.0 + 0.02 * n, StepFeatures().with_chunk(n)) for n in (100, 500, 1000, 2000)]
    made += [point("prefill", 500.0, StepFeatures().with_chunk(50), held_out=True), point("random", 1, StepFeatures())]
    fit = fit_alpha(made)
    assert fit.alpha_ms_per_token == pytest.approx(0.02) and fit.intercept_ms == pytest.approx(3.0)
    assert fit.quality.r2 == pytest.approx(1.0) and fit.quality.num_points == 4 and fit.quality.warnings == ()
    offset = fit_alpha([point("prefill", 50 + 0.02 * n, StepFeatures().with_chunk(n)) for n in (100, 500, 1000)])
    assert "fixed 50 ms" in offset.quality.warnings[0]


def test_alpha_refuses_what_is_no_line() -> None:
    with pytest.raises(FitError, match="1 different prompt lengths"):
        fit_alpha([point("prefill", 5.0, StepFeatures().with_chunk(8))] * 3)
    with pytest.raises(FitError, match="does not grow"):
        fit_alpha([point("prefill", 500 - n, StepFeatures().with_chunk(n)) for n in (10, 100)])


def test_beta_and_the_threshold_of_a_batch() -> None:
    batches = (1, 2, 4, 8, 12, 16, 24, 32, 64)
    made = [point("decode", 7.0 * max(1.0, b / 16), StepFeatures.decode(b, 100 * b)) for b in batches]
    fit = fit_beta(made)
    assert fit.beta_ms == pytest.approx(7.0, rel=0.01) and fit.batch_thresh == pytest.approx(16, rel=0.03)
    flat = fit_beta(made[:5])
    assert flat.batch_thresh == 12 and "no knee up to batch 12" in flat.quality.warnings[0]
    with pytest.raises(FitError, match="no decode step"):
        fit_beta([point("mixed", 1.0, StepFeatures.decode(1, 1))])


def test_beta_warns_where_kv_matters() -> None:
    made = [
        point("decode", 4 + 1e-4 * b * kv, StepFeatures.decode(b, b * kv)) for b in (1, 16, 64) for kv in (100, 8000)
    ]
    assert any("poor fit" in warning for warning in fit_beta(made).quality.warnings)


def test_gamma_is_the_delay_per_prompt_token() -> None:
    decodes = {b: StepFeatures.decode(b, b * 1000) for b in (4, 32)}
    made = [point("decode", 5.0 + b / 8, f) for b, f in decodes.items()]
    made += [point("mixed", 5.0 + b / 8 + 0.03 * n, f.with_chunk(n)) for b, f in decodes.items() for n in (64, 512)]
    fit = fit_gamma(made)
    assert fit.gamma_ms_per_token == pytest.approx(0.03) and fit.quality.median_error < 1e-9
    assert sorted(n for n, _ in fit.pairs) == [64, 64, 512, 512]
    assert [delay for _, delay in fit.pairs] == pytest.approx([0.03 * n for n, _ in fit.pairs])
    with pytest.raises(FitError, match="0 mixed"):
        fit_gamma(made[:2])


def test_gamma_is_never_negative() -> None:
    f = StepFeatures.decode(4, 100)
    fit = fit_gamma([point("decode", 5.0, f), point("mixed", 4.0, f.with_chunk(10))])
    assert fit.gamma_ms_per_token == 0.0 and "no slower" in fit.quality.warnings[0]


# --- the other model behind the same interface -------------------------------------------------------------------

WHOLE = StepTimeModel(4.0, 0.004, 0.014, 100, 6e-7, 0.0, 4e-5, 0.2, 0.01)
PREFILL = StepTimeModel(5.0, 0.03, pair_ms=9e-7)
DECODE = StepTimeModel(6.0, 0.02, kv_token_ms=6e-5, sequence_ms=0.01)


def cost(**changes: object) -> StepTimeCost:
    values = {"whole": WHOLE, "prefill": PREFILL, "decode": DECODE, "kv_bytes_per_token": 147_456, "chunk_size": 256}
    return StepTimeCost(**{**values, **changes})  # type: ignore[arg-type]


def test_step_time_cost_is_what_running_the_steps_takes() -> None:
    """Against a loop over the request's own steps: chunks beside 8 decodes, then each decode step with grown KV."""
    request, load = RequestSize(600, 11, 100), LoadState(num_decodes=8, kv_tokens=16_000)
    terms = cost().collocated(request, load).terms
    beside = StepFeatures.decode(8, 16_000)
    chunks = [beside.with_chunk(256, 100), beside.with_chunk(244, 356)]
    assert terms["prefill"] == pytest.approx(sum(map(WHOLE.step_ms, chunks)))
    delays = sum(WHOLE.step_ms(c) - WHOLE.step_ms(beside) for c in chunks)
    assert terms["others wait for the prefill"] == pytest.approx(8 * delays)
    grown = [16_000 + 8 * (i + 0.5) for i in range(10)]
    steps = [WHOLE.step_ms(StepFeatures.decode(9, kv + 600 + i + 0.5)) for i, kv in enumerate(grown)]
    assert terms["decode"] == pytest.approx(sum(steps))
    slower = sum(step - WHOLE.step_ms(StepFeatures.decode(8, kv)) for step, kv in zip(steps, grown))
    assert terms["others decode in a larger batch"] == pytest.approx(8 * slower)
    assert terms["queue"] == 0.0


def test_step_time_cost_of_the_other_path() -> None:
    request = RequestSize(1000, 2)
    load = LoadState(num_decodes=4, kv_tokens=4000, waiting_tokens=2000, link_bytes=1e9)
    terms = cost(bandwidth_gb_s=50.0).disaggregated(request, load).terms
    assert terms["prefill"] == pytest.approx(PREFILL.prefill_ms(1000, chunk_size=256))
    assert terms["queue"] == pytest.approx(2 * terms["prefill"])
    assert terms["link queue"] == pytest.approx(20.0) and terms["transfer"] == pytest.approx(1000 * 147_456 / 50e6)
    assert terms["decode"] == pytest.approx(DECODE.step_ms(StepFeatures.decode(5, 4000 + 2 + 1000.5)))
    assert "others wait for the prefill" not in terms
    shared = cost().disaggregated(request, load).terms
    assert shared["transfer"] == shared["link queue"] == 0.0


def test_an_idle_machine_delays_nobody() -> None:
    terms = cost().collocated(RequestSize(100, 1), LoadState()).terms
    assert {name for name, ms in terms.items() if ms} == {"prefill"}
