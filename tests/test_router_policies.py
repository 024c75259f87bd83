"""The policies without a model of time, the seed's conclusions, and what happens when a path has no workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_cases import MODELS, request, snapshot, trio, worker

from nanopd.costmodel.hardware_profile import preset
from nanopd.errors import ConfigError, NoWorkerError
from nanopd.router.decision import Path
from nanopd.router.policies import POLICY_NAMES, RoundRobin, make_policy, request_index
from nanopd.router.rule import SeedEstimate, SeedRule
from nanopd.router.snapshot import Snapshot
from nanopd.workers.worker import Role

OPTIONS: dict[str, dict[str, Any]] = {
    "seed-rule": {"profile": "h20"},
    "seed-estimate": {"profile": "rtx-4090"},
    "slo": {"models": MODELS, "ttft_ms": 500.0, "tpot_ms": 50.0},
}


def every_policy() -> list[Any]:
    return [make_policy(name, **OPTIONS.get(name, {})) for name in POLICY_NAMES]


# --- all of them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", every_policy(), ids=lambda p: p.name)
def test_the_same_question_gets_the_same_answer(policy: Any) -> None:
    situations = [
        (request(n, request_id=f"r{n}"), snapshot(*trio(num_running=n % 9, running_tokens=n * 7)))
        for n in (1, 40, 3000)
    ]
    first = [policy.decide(r, s, 80.0) for r, s in situations]
    again = [policy.decide(r, s, 80.0) for r, s in reversed(situations)]
    assert first == again[::-1]
    assert all(d.predicted_output == 80.0 and d.reason for d in first)


@pytest.mark.parametrize("policy", every_policy(), ids=lambda p: p.name)
@pytest.mark.parametrize("prompt", [5, 5000])
def test_only_a_path_that_has_workers_is_taken(policy: Any, prompt: int) -> None:
    alone = snapshot(worker(Role.COLLOCATED))
    apart = snapshot(worker(Role.PREFILL), worker(Role.DECODE))
    half = snapshot(worker(Role.COLLOCATED), worker(Role.DECODE))
    assert policy.decide(request(prompt), alone).path is Path.COLLOCATED
    assert policy.decide(request(prompt), half).path is Path.COLLOCATED
    assert policy.decide(request(prompt), apart).path is Path.DISAGGREGATED
    for workers in ((), (worker(Role.PREFILL),), (worker(Role.DECODE),)):
        with pytest.raises(NoWorkerError, match="'r' with"):
            policy.decide(request(prompt), snapshot(*workers))


@pytest.mark.parametrize("policy", every_policy(), ids=lambda p: p.name)
def test_a_pool_that_is_too_small_is_no_place_to_go(policy: Any) -> None:
    small = {"total_blocks": 10, "free_blocks": 10}  # 160 tokens
    collocated, prefill, decode = worker(Role.COLLOCATED, **small), worker(Role.PREFILL), worker(Role.DECODE)
    assert policy.decide(request(160), snapshot(collocated, prefill, decode)).path is Path.DISAGGREGATED
    assert policy.decide(request(159), snapshot(collocated)).path is Path.COLLOCATED
    with pytest.raises(NoWorkerError, match="160 tokens"):
        policy.decide(request(160), snapshot(collocated, prefill))
    narrow = snapshot(worker(Role.COLLOCATED), prefill, worker(Role.DECODE, **small))
    assert policy.decide(request(160), narrow).path is Path.COLLOCATED


# --- by name ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_each_name_makes_the_policy_of_that_name(name: str) -> None:
    assert make_policy(name, **OPTIONS.get(name, {})).name == name


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("best", {}, "collocated, disaggregated, round-robin, seed-rule, seed-estimate, threshold, slo"),
        ("threshold", {"limit": 3}, "no option limit.*max_local_prefill_length, max_prefill_queue_size"),
        ("seed-rule", {}, "needs profile.*profile, default_output"),
        ("slo", {"models": {}, "ttft_ms": 5.0}, "needs tpot_ms"),
        ("seed-rule", {"profile": "abacus"}, "h20"),
        ("round-robin", {"share": 1.5}, "share.*1.5"),
        ("threshold", {"max_local_prefill_length": -1}, "max_local_prefill_length.*-1"),
        ("threshold", {"max_prefill_queue_size": 0}, "max_prefill_queue_size.*0"),
        ("collocated", {"share": 1}, "has no option share; it has none"),
        ("threshold", {"max_local_prefill_length": "many"}, "max_local_prefill_length.*'many'"),
        ("threshold", {"max_local_prefill_length": float("nan")}, "max_local_prefill_length.*nan"),
        ("slo", {"models": 5, "ttft_ms": 5.0, "tpot_ms": 5.0}, "cannot be made of .*5"),
        ("seed-rule", {"profile": 5}, "profile must be.*5"),
        ("seed-estimate", {"profile": "h20", "default_output": float("nan")}, "default_output.*nan"),
        ("adaptive", {}, "no policy is called 'adaptive'.*slo.*made in Python"),
        ("round-robin", {"share": True}, "share.*True"),
        ("threshold", {"max_prefill_queue_size": True}, "max_prefill_queue_size.*True"),
        ("slo", {"models": MODELS, "ttft_ms": 10**400, "tpot_ms": 5.0}, "cannot be made of .*ttft_ms=1000"),
        ("slo", {"models": "1", "ttft_ms": 5.0, "tpot_ms": 5.0}, "cannot be made of .*models='1'"),
    ],
    ids=[
        "name",
        "option",
        "missing",
        "missing-slo",
        "profile",
        "share",
        "length",
        "queue",
        "none",
        "text",
        "nan",
        "int",
        "no-profile",
        "no-output",
        "adaptive",
        "share-true",
        "queue-true",
        "huge",
        "no-models",
    ],
)
def test_wrong_names_and_options_list_the_right_ones(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_policy(name, **options)


@pytest.mark.parametrize("predicted", [float("nan"), -1.0, "5"], ids=["nan", "negative", "text"])
@pytest.mark.parametrize("name", ["seed-rule", "seed-estimate", "slo"])
def test_a_prediction_that_is_none_is_refused(name: str, predicted: Any) -> None:
    options = {"models": MODELS, "ttft_ms": 500.0, "tpot_ms": 50.0} if name == "slo" else {"profile": "h20"}
    with pytest.raises(ConfigError, match=f"predicted output .* got {predicted!r}"):
        make_policy(name, **options).decide(request(100), snapshot(*trio()), predicted)


# --- round robin -----------------------------------------------------------------------------------------------


def test_round_robin_takes_turns_by_the_number_of_the_request() -> None:
    policy, situation = RoundRobin(), snapshot(*trio())
    for prefix in ("run-", "1732900000000000", "9" * 5000):  # a clock's number is beyond what a float tells apart
        taken = [policy.decide(request(request_id=f"{prefix}{i}"), situation).path for i in range(6)]
        assert taken == [Path.COLLOCATED, Path.DISAGGREGATED] * 3
    policy.decide(request(request_id="\ud800"), situation)


@given(st.floats(0, 1), st.integers(0, 500))
def test_round_robin_keeps_its_share_in_every_prefix(share: float, n: int) -> None:
    policy, situation = RoundRobin(share), snapshot(*trio())
    apart = sum(policy.decide(request(1, request_id=str(i)), situation).path is Path.DISAGGREGATED for i in range(n))
    assert abs(apart - share * n) <= 1


def test_ids_without_a_number_are_spread_evenly() -> None:
    ids = [f"{chr(97 + i % 26)}{chr(97 + i // 26)}x" for i in range(600)]
    policy, situation = RoundRobin(), snapshot(*trio())
    apart = sum(policy.decide(request(1, request_id=i), situation).path is Path.DISAGGREGATED for i in ids)
    assert 240 < apart < 360
    assert request_index("abc") == request_index("abc") != request_index("abd")


# --- threshold -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "waiting", "backlog", "path", "words"),
    [
        (512, 0, 0, Path.COLLOCATED, "512 tokens to prefill, at most 512"),
        (513, 0, 0, Path.DISAGGREGATED, "513 tokens to prefill, more than 512"),
        (513, 3, 0, Path.DISAGGREGATED, "3 of 4"),
        (513, 4, 0, Path.COLLOCATED, "4 requests wait"),
        (513, 1, 3, Path.COLLOCATED, "4 requests wait"),
        (10, 0, 9, Path.COLLOCATED, "10 tokens"),
    ],
)
def test_threshold_and_queue_limit(prompt: int, waiting: int, backlog: int, path: Path, words: str) -> None:
    prefill = worker(Role.PREFILL, num_waiting=waiting)
    situation = snapshot(worker(Role.COLLOCATED), prefill, worker(Role.DECODE), backlog_requests=backlog)
    decision = make_policy("threshold").decide(request(prompt), situation)
    assert decision.path is path and words in decision.reason


# --- the seed's rule and estimate ------------------------------------------------------------------------------


def at_load(load: int) -> Snapshot:
    """``load`` requests decode on each of the two workers that do."""
    return snapshot(*trio(num_running=load, running_tokens=100 * load))


@given(load=st.integers(0, 300), prompt=st.integers(1, 20_000), output=st.floats(1, 4000))
def test_the_rule_on_a_4090_is_load_2_105_whatever_the_request(load: int, prompt: int, output: float) -> None:
    decision = SeedRule("rtx-4090").decide(request(prompt, 5000), at_load(load), output)
    assert decision.path is (Path.DISAGGREGATED if load > 2.105 else Path.COLLOCATED)
    assert "2.105" in decision.reason


@given(load=st.integers(1, 300), prompt=st.integers(1, 20_000))
def test_the_rule_on_an_h20_always_disaggregates_once_there_is_anybody(load: int, prompt: int) -> None:
    decision = SeedRule("h20").decide(request(prompt), at_load(load))
    assert decision.path is Path.DISAGGREGATED
    assert SeedRule("h20").model.threshold_load == pytest.approx(0.046, abs=5e-4)


def test_the_rule_counts_requests_wherever_they_are() -> None:
    rule = SeedRule("rtx-4090")
    collocated, prefill, decode = trio()
    collocated, prefill = replace(collocated, num_running=2), replace(prefill, num_waiting=1)
    spread = snapshot(collocated, prefill, replace(decode, num_running=2))
    assert rule.decide(request(), spread).path is Path.DISAGGREGATED  # 5 requests on 2 workers
    assert rule.decide(request(), snapshot(collocated, prefill, decode)).path is Path.COLLOCATED
    assert rule.decide(request(), snapshot(*trio(), backlog_requests=5)).path is Path.DISAGGREGATED
    assert rule.decide(request(), snapshot(*trio(), backlog_requests=4)).path is Path.COLLOCATED


@pytest.mark.parametrize("name", ["rtx-4090", "h20"])
@pytest.mark.parametrize("load", [0, 1, 2, 3, 15])
def test_both_estimates_are_the_formulas(name: str, load: int) -> None:
    p, prompt, output = preset(name), 1000, 200.0
    decision = SeedEstimate(name).decide(request(prompt), at_load(load), output)
    alpha, beta, gamma, b = p.alpha_ms_per_token, p.beta_ms, p.gamma_ms_per_token, p.batch_thresh
    assert decision.collocated is not None and decision.disaggregated is not None and p.bandwidth_gb_s is not None
    together = alpha * prompt + beta * max(1, load / b) * output + gamma * prompt * min(load, b) / b
    apart = alpha * prompt + prompt * 147_456 / p.bandwidth_gb_s / 1e6 + beta * output
    assert decision.collocated.total_ms == pytest.approx(together)
    assert decision.disaggregated.total_ms == pytest.approx(apart)
    assert decision.path is (Path.DISAGGREGATED if apart < together else Path.COLLOCATED)


def test_the_batch_is_that_of_the_least_loaded_decode_worker() -> None:
    workers = (*trio(), worker(Role.DECODE, "busy", num_running=100))
    decision = SeedEstimate("h20").decide(request(1000), snapshot(*workers), 10.0)
    assert decision.disaggregated is not None
    assert decision.disaggregated.terms["decode"] == pytest.approx(33.1031 * 10)


def test_the_full_estimate_agrees_with_the_rule_while_decode_steps_cost_the_same() -> None:
    """Up to the batch threshold d(load) = d(batch + 1), and the rule is what is left."""
    for name in ("rtx-4090", "h20"):
        for load in range(16):
            full = SeedEstimate(name).decide(request(1000), at_load(load), 200.0)
            assert full.path is SeedRule(name).decide(request(1000), at_load(load), 200.0).path, (name, load)


def test_the_estimate_says_by_how_little_it_decides() -> None:
    decision = SeedEstimate("rtx-4090").decide(request(1000), at_load(3), 200.0)
    assert decision.collocated is not None and decision.disaggregated is not None
    share = 1 - decision.disaggregated.total_ms / decision.collocated.total_ms
    assert 0 < share < 1e-3
    assert f"({share:.2%})" in decision.reason
    assert "most of all by interference (0 ms against 16.3 ms)" in decision.reason
