"""The server: the central scheduler on real threads, with fake devices and links."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue

import pytest

from nanopd.engine.outputs import RequestOutput
from nanopd.engine.plan import StepPlan
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import (
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    EngineClosedError,
    InvalidRequestError,
    InvalidTokenError,
    LeaseExpiredError,
    NanoPDError,
    NonFiniteLogitsError,
    NoWorkerError,
    OverloadedError,
    PromptTooLongError,
    StepFailedError,
    UnknownRequestError,
    WorkerFailedError,
)
from nanopd.kv.fingerprint import LayoutFingerprint
from nanopd.router.central import CentralConfig, CentralScheduler
from nanopd.workers.worker import Worker
from tests.fake_cluster import AtRandom, all_links, make_workers
from tests.fake_link import FakeLink
from tests.fake_runner import VOCAB, oracle
from tests.server_cases import COLLOCATED, DISAGGREGATED, MAX_LEN, check_idle, no_new_threads, prompts, serve


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    with no_new_threads():
        yield


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("cluster", ["c0", "p0 d0", "c0 p0 p1 d0 d1"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_generate_gives_the_oracles_tokens(cluster: str, shared: bool, streamed: bool) -> None:
    workers = make_workers(cluster, shared_pool=shared)
    server = serve(workers, AtRandom(), link={"delay_s": 0.001}, config=CentralConfig(stream_layers=streamed))
    params = [SamplingParams(max_tokens=12, seed=i, n=1 + i % 2) for i in range(30)]
    outputs = server.generate(prompts(30), params, use_tqdm=False)
    for prompt, one, output in zip(prompts(30), params, outputs, strict=True):
        expected = [oracle(prompt, one, i, MAX_LEN) for i in range(one.n)]
        assert [sample.token_ids for sample in output.outputs] == expected
        assert output.metrics is not None and output.metrics.num_output_tokens == sum(map(len, expected))
    check_idle(server)


def test_streams_come_in_order_and_end_when_the_reader_leaves() -> None:
    server = serve(make_workers("p0 d0"))
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    expected = oracle([5, 6, 7], params, 0, MAX_LEN)
    seen = [output.outputs[0].token_ids for output in server.stream([5, 6, 7], params)]
    assert seen[-1] == expected and all(a == b[: len(a)] for a, b in itertools.pairwise(seen))
    for _output in server.stream([5, 6, 7], params):
        break
    assert server.drain(5)
    check_idle(server)


def test_bad_requests_are_refused_and_named() -> None:
    server = serve(make_workers("p0 d0", num_blocks=8), config=CentralConfig(max_unfinished=1))
    sink: SimpleQueue[RequestOutput] = SimpleQueue()
    for prompt, params, error in [
        ([], None, EmptyPromptError),
        ([VOCAB], None, InvalidTokenError),
        ([1] * 70, None, PromptTooLongError),
        ([1] * 20, SamplingParams(max_tokens=40), PromptTooLongError),  # 59 slots, 32 in the pool
        ([1], "greedy", InvalidRequestError),
        ([1], SamplingParams(n=2), OverloadedError),
    ]:
        with pytest.raises(error):
            server.add_request(prompt, params, on_output=sink.put)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="7"):
        server.add_request([1], request_id=7, on_output=sink.put)  # type: ignore[arg-type]
    with pytest.raises(UnknownRequestError):
        server.abort("nobody")
    assert server.central.num_unfinished == 0 and sink.empty()
    check_idle(server)
    with pytest.raises(EngineClosedError):
        server.add_request([1], on_output=sink.put)
    server.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(32, 1), (25, 8), (1, 32)])
def test_a_request_that_exactly_fills_the_pool_is_served(num_prompt: int, max_tokens: int, shared: bool) -> None:
    server = serve(make_workers("p0 d0", num_blocks=8, shared_pool=shared))  # 32 slots; the last token needs none
    params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    prompt = [1 + i % 9 for i in range(num_prompt)]
    finished: SimpleQueue[RequestOutput] = SimpleQueue()
    server.add_request(prompt, params, on_output=finished.put)
    drained = server.drain(5)
    check_idle(server)
    assert drained and finished.get(timeout=1).outputs[0].token_ids == oracle(prompt, params, 0, MAX_LEN)


def test_a_request_goes_to_the_worker_whose_pool_holds_it() -> None:
    workers = [*make_workers("c0 p0", num_blocks=2), *make_workers("c1 p1 d0")]
    server = serve(workers, AtRandom())
    params = [SamplingParams(max_tokens=12, seed=i) for i in range(30)]
    outputs = server.generate(prompts(30), params, use_tqdm=False)
    expected = [oracle(prompt, one, 0, MAX_LEN) for prompt, one in zip(prompts(30), params, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    check_idle(server)


def test_a_request_id_is_taken_until_its_request_has_finished() -> None:
    workers = make_workers("c0")
    gate = threading.Event()
    workers[0].runner.execute = _behind(gate, workers[0].runner.execute)
    server = serve(workers, COLLOCATED)
    sink: SimpleQueue[RequestOutput] = SimpleQueue()
    server.add_request([1], SamplingParams(max_tokens=2), request_id="a", on_output=sink.put)
    with pytest.raises(DuplicateRequestError):
        server.add_request([1], request_id="a", on_output=sink.put)
    server.add_request([1], SamplingParams(max_tokens=2, n=2), request_id="b#1", on_output=sink.put)
    with pytest.raises(DuplicateRequestError):  # its second sample would bear the name of the other request
        server.add_request([1], SamplingParams(n=2), request_id="b", on_output=sink.put)
    gate.set()
    assert sink.get(timeout=5).finished and sink.get(timeout=5).finished
    server.add_request([1], SamplingParams(max_tokens=2), request_id="a", on_output=sink.put)
    assert sink.get(timeout=5).finished
    check_idle(server)


def _behind(gate: threading.Event, execute):
    def wait_first(plan: StepPlan) -> list[list[int]]:
        assert gate.wait(10)
        return execute(plan)

    return wait_first


def test_a_prefill_step_never_stalls_decode() -> None:
    """While the prefill worker is stuck in a step, requests that decode run to their end."""
    workers = make_workers("p0 d0", chunk_size=None)
    gate = threading.Event()
    gate.set()
    launch = workers[0].runner.launch

    def slow_launch(plan: StepPlan, after_layer=None):
        assert gate.wait(10)
        return launch(plan, after_layer)

    workers[0].runner.launch = slow_launch
    server = serve(workers)
    first: SimpleQueue[RequestOutput] = SimpleQueue()
    second: SimpleQueue[RequestOutput] = SimpleQueue()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    server.add_request([1, 2, 3], params, stream=True, on_output=first.put)
    assert not first.get(timeout=5).finished
    gate.clear()  # from now on nobody is prefilled
    server.add_request([4, 5, 6], params, on_output=second.put)
    while not first.get(timeout=5).finished:
        pass
    assert second.empty()
    gate.set()
    assert second.get(timeout=5).finished
    check_idle(server)


def test_a_slow_client_delays_nobody() -> None:
    server = serve(make_workers("c0"), COLLOCATED)
    gate = threading.Event()
    finished: SimpleQueue[RequestOutput] = SimpleQueue()
    server.add_request([1], SamplingParams(max_tokens=1), on_output=lambda output: gate.wait(10))
    server.add_request([2], SamplingParams(max_tokens=5), on_output=finished.put)
    assert server.drain(5)  # computed, though the first client still sits on its output
    assert finished.empty()
    gate.set()
    assert finished.get(timeout=5).finished
    check_idle(server)


def test_a_callback_that_raises_costs_only_its_own_output() -> None:
    server = serve(make_workers("c0"), COLLOCATED)
    finished: SimpleQueue[RequestOutput] = SimpleQueue()

    def broken(output: RequestOutput) -> None:
        raise ValueError("the client's own mistake")

    with pytest.warns(UserWarning, match="the client's own mistake"):
        server.add_request([1], SamplingParams(max_tokens=1), on_output=broken)
        server.add_request([2], SamplingParams(max_tokens=1), on_output=finished.put)
        assert finished.get(timeout=5).finished
        check_idle(server)


# --- faults ----------------------------------------------------------------------------------------------------


class Fault:
    """Makes a runner raise on chosen calls."""

    def __init__(self, worker: Worker, when, error: Exception) -> None:
        self.count = 0
        self.execute, self.launch = worker.runner.execute, worker.runner.launch
        self.when, self.error = when, error
        worker.runner.execute = self._execute
        worker.runner.launch = self._launch

    def _raise(self, plan: StepPlan) -> None:
        self.count += 1
        if self.when(self.count, plan):
            raise self.error

    def _execute(self, plan: StepPlan) -> list[list[int]]:
        self._raise(plan)
        return self.execute(plan)

    def _launch(self, plan: StepPlan, after_layer=None):
        if after_layer is not None:
            after_layer(0)  # it breaks in the middle: one layer is on its way
        self._raise(plan)
        return self.launch(plan, (lambda i: after_layer(i) if i else None) if after_layer else None)


@pytest.mark.parametrize("cluster", ["p0 d0", "p0 p1 d0 d1", "c0 p0 d0"])
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_a_step_that_raises_is_computed_again(victim: str, cluster: str) -> None:
    workers = make_workers(cluster)
    fault = Fault(next(w for w in workers if w.name == victim), lambda n, plan: n == 3, RuntimeError("ECC"))
    server = serve(workers)
    params = [SamplingParams(max_tokens=8, seed=i) for i in range(10)]
    outputs = server.generate(prompts(10), params, use_tqdm=False)
    expected = [oracle(prompt, one, 0, MAX_LEN) for prompt, one in zip(prompts(10), params, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert fault.count > 3
    check_idle(server)


@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_a_worker_that_is_broken_for_good_hands_its_requests_to_others(victim: str) -> None:
    workers = make_workers("p0 p1 d0 d1")
    Fault(next(w for w in workers if w.name == victim), lambda n, plan: n >= 3, RuntimeError("fell off the bus"))
    server = serve(workers, config=CentralConfig(max_failed_steps=2, max_retries=5))
    params = [SamplingParams(max_tokens=8, seed=i) for i in range(20)]
    outputs = server.generate(prompts(20), params, use_tqdm=False)
    expected = [oracle(prompt, one, 0, MAX_LEN) for prompt, one in zip(prompts(20), params, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert not server.central.workers[victim].alive
    check_idle(server)


def test_a_worker_that_says_it_is_gone_is_not_asked_again() -> None:
    workers = make_workers("p0 d0 d1")
    fault = Fault(workers[1], lambda n, plan: n >= 3, WorkerFailedError("its process was killed"))
    server = serve(workers, config=CentralConfig(max_failed_steps=9, max_retries=1))
    params = [SamplingParams(max_tokens=8, seed=i) for i in range(20)]
    outputs = server.generate(prompts(20), params, use_tqdm=False)
    expected = [oracle(prompt, one, 0, MAX_LEN) for prompt, one in zip(prompts(20), params, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert fault.count == 3 and not server.central.workers["d0"].alive
    check_idle(server)


def test_without_another_worker_requests_fail_with_the_reason_and_later_ones_are_refused() -> None:
    workers = make_workers("p0 d0")
    Fault(workers[0], lambda n, plan: True, RuntimeError("fell off the bus"))
    server = serve(workers, config=CentralConfig(max_failed_steps=2, max_retries=9))
    finished: SimpleQueue[RequestOutput] = SimpleQueue()
    for prompt in prompts(5):
        with suppress(NoWorkerError):  # once it is known
            server.add_request(prompt, on_output=finished.put)
    assert server.drain(5)
    output = finished.get(timeout=5)
    assert output.outputs[0].finish_reason == "failed" and isinstance(output.error, WorkerFailedError)
    with pytest.raises(NoWorkerError):
        server.add_request([1], on_output=finished.put)
    check_idle(server)


def test_a_thread_that_cannot_start_takes_only_its_worker_down() -> None:
    workers = make_workers("c0 c1")

    def no_device():
        raise RuntimeError("no such core")

    workers[0].enter = no_device
    server = serve(workers, COLLOCATED)
    outputs = server.generate(prompts(6), SamplingParams(max_tokens=4, seed=0), use_tqdm=False)
    assert len(outputs) == 6
    check_idle(server)


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    workers = make_workers("c0")
    bad = NonFiniteLogitsError("logits without a finite maximum: bad", ("bad",))
    Fault(workers[0], lambda n, plan: any(chunk.request.request_id == "bad" for chunk in plan.chunks), bad)
    server = serve(workers, COLLOCATED)
    finished: SimpleQueue[RequestOutput] = SimpleQueue()
    for name in ("good", "bad", "fine"):
        server.add_request([1, 2], SamplingParams(max_tokens=4, seed=0), request_id=name, on_output=finished.put)
    outputs = {output.request_id: output for output in (finished.get(timeout=5) for _ in range(3))}
    assert outputs["bad"].error is bad
    assert outputs["good"].error is None and outputs["fine"].error is None
    check_idle(server)


def test_a_request_that_keeps_failing_is_given_up() -> None:
    workers = make_workers("c0")
    Fault(workers[0], lambda n, plan: True, RuntimeError("ECC"))
    server = serve(workers, COLLOCATED, config=CentralConfig(max_retries=2, max_failed_steps=100))
    with pytest.raises(StepFailedError, match="ECC"):
        server.generate([[1, 2]], SamplingParams(max_tokens=4), use_tqdm=False)
    check_idle(server)


@pytest.mark.parametrize("cluster", ["p0 d0", "c0 p0 d0"])
def test_transfers_that_fail_are_made_up_for(cluster: str) -> None:
    server = serve(make_workers(cluster), link={"faults": 0.3}, config=CentralConfig(max_retries=50))
    params = [SamplingParams(max_tokens=6, seed=i) for i in range(20)]
    outputs = server.generate(prompts(20), params, use_tqdm=False)
    expected = [oracle(prompt, one, 0, MAX_LEN) for prompt, one in zip(prompts(20), params, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    check_idle(server)


def test_a_link_that_stalls_costs_its_lease_and_then_the_request_is_given_up() -> None:
    server = serve(
        make_workers("p0 d0"), link={"faults": 1.0, "stall_s": 0.2}, config=CentralConfig(lease_s=0.02, max_retries=0)
    )
    for link in server._links.values():
        link.open = lambda handoff, link=link: _never_refuses(link, handoff)
    with pytest.raises(LeaseExpiredError, match=r"0\.02 s"):
        server.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    check_idle(server)


def _never_refuses(link: FakeLink, handoff):
    from tests.fake_link import FakeTransfer

    transfer = FakeTransfer(link, handoff)
    link._open.append(transfer)
    return transfer


def test_layouts_that_differ_are_refused_before_anything_starts() -> None:
    workers = make_workers("p0 d0")
    workers[1].fingerprint = LayoutFingerprint("fake", "bfloat16", 8, 2, 1, 8)
    with pytest.raises(ConfigError, match="block_size: 4 and 8"):
        CentralScheduler(workers, DISAGGREGATED, links=all_links(workers))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_s": 0},
        {"lease_s": True},
        {"lease_s": math.nan},
        {"stream_layers": "x"},
        {"max_retries": -1},
        {"growth_tokens": 1.5},
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_named(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CentralConfig(**wrong)


def test_names_must_be_unique_and_links_must_exist() -> None:
    with pytest.raises(ConfigError, match="unique"):
        CentralScheduler(make_workers("c0 c0"), COLLOCATED)
    with pytest.raises(ConfigError, match="nowhere"):
        CentralScheduler(make_workers("p0 d0"), COLLOCATED, links=[("p0", "nowhere")])
    with pytest.raises(ConfigError, match="at least one"):
        CentralScheduler([], COLLOCATED)


def test_requests_in_every_stage_end_when_the_server_closes() -> None:
    server = serve(make_workers("c0 p0 d0"), AtRandom(), link={"delay_s": 0.01})
    finished: SimpleQueue[RequestOutput] = SimpleQueue()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for prompt in prompts(60):
        server.add_request(prompt, params, on_output=finished.put)
    time.sleep(0.02)
    check_idle(server)
    outputs = [finished.get(timeout=1) for _ in range(60)]
    assert len({output.request_id for output in outputs}) == 60
    assert {output.outputs[0].finish_reason for output in outputs} <= {"aborted", "length"}


@pytest.mark.parametrize("seed", range(10))
def test_stress(seed: int) -> None:
    """2,000 requests; steps, transfers and workers fail, clients go away: each ends in exactly one state."""
    workers = make_workers("c0 p0 p1 d0 d1", num_blocks=40, shared_pool=seed % 3 == 0)
    draw = random.Random(seed)
    for worker in workers:
        coin = random.Random(f"{seed} {worker.name}")
        Fault(worker, lambda n, plan, coin=coin: coin.random() < 0.01, RuntimeError("a cosmic ray"))
    server = serve(
        workers,
        AtRandom(),
        link={"faults": 0.05, "delay_s": 0.0, "stall_s": 0.005},
        config=CentralConfig(
            lease_s=0.5, max_failed_steps=4, stream_layers=seed % 2 == 0, growth_tokens=draw.choice((0, 4, 16))
        ),
    )
    outputs: SimpleQueue[RequestOutput] = SimpleQueue()
    expected, refused = {}, 0
    for i in range(2000):
        prompt = [draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 30))]
        params = SamplingParams(max_tokens=draw.randint(1, 8), seed=i)
        try:
            name = server.add_request(prompt, params, on_output=outputs.put)
        except NoWorkerError:
            refused += 1
            continue
        expected[name] = oracle(prompt, params, 0, MAX_LEN)
        if draw.random() < 0.03:
            with suppress(UnknownRequestError):
                server.abort(draw.choice(list(expected)))
        if i == 1500:
            with server._lock:
                server.central.worker_failed(workers[draw.randrange(5)], RuntimeError("pulled out"), server.clock())
                server._after_change()
    assert server.drain(60)
    check_idle(server)
    ended = [outputs.get(timeout=1) for _ in range(len(expected))]
    assert outputs.empty() and {output.request_id for output in ended} == expected.keys()
    for output in ended:
        sample = output.outputs[0]
        tokens = expected[output.request_id]
        if sample.finish_reason in ("stop", "length"):
            assert sample.token_ids == tokens
        else:
            assert sample.token_ids == tokens[: len(sample.token_ids)]
            assert sample.finish_reason == "aborted" or isinstance(output.error, NanoPDError)
