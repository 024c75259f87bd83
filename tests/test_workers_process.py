"""Workers in processes of their own: the tokens of threads, one memory, nothing left when they end or are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path as File
from queue import SimpleQueue

import pytest
import torch
from disaggregated_cases import Always, Load, answers_alone, check, check_pools_are_free, float64_model, run
from model_cases import VOCAB

from nanopd import SamplingParams
from nanopd.engine.outputs import RequestOutput
from nanopd.engine.plan import ScheduledChunk, SchedulerConfig, StepPlan
from nanopd.engine.request import Request
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import (
    ConfigError,
    CudaUnavailableError,
    IllegalTransitionError,
    NonFiniteLogitsError,
    NoWorkerError,
    StepFailedError,
    WorkerFailedError,
)
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.cache import KVCache
from nanopd.model.loader import LoadedModel
from nanopd.router.central import CentralConfig
from nanopd.router.decision import Path
from nanopd.router.server import Server
from nanopd.workers.cluster import Cluster
from nanopd.workers.process import PendingAnswer, ProcessRunner
from nanopd.workers.spec import DeviceSpec

LOAD = Load.at_random(11, 60, VOCAB)
SMALL = {"num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "use_tqdm": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    return float64_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> list[list[list[int]]]:
    return answers_alone(model, LOAD)


def build(model: LoadedModel, num_blocks: int = 60, **options) -> Cluster:
    cluster = Cluster.build(
        model,
        **{
            "processes": True,
            "num_blocks": num_blocks,
            "block_size": 8,
            "max_num_seqs": 12,
            "max_num_batched_tokens": 48,
            "prefill_chunk": 20,
            "max_model_len": 128,
            "use_tqdm": False,
            **options,
        },
    )
    for worker in cluster.workers:
        worker.runner.kv_cache.tensor.fill_(float("nan"))  # there too: the memory is one
    return cluster


def gone(pids: list[int], seconds: float = 15.0) -> bool:
    """Whether these processes end within that time; a zombie that nobody has waited for counts as ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return File(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "policy"),
    [
        ({"collocated": ["cpu"], "collocated_chunk": 20}, Always(Path.COLLOCATED)),
        ({"prefill": ["cpu"], "decode": ["cpu"], "shared_pool": True}, Always(Path.DISAGGREGATED)),
        ({"prefill": ["cpu"], "decode": ["cpu"], "shared_pool": False}, Always(Path.DISAGGREGATED)),
    ],
    ids=["collocated", "shared", "separate"],
)
def test_tokens_are_those_of_one_request_alone(
    model: LoadedModel, expected: list[list[list[int]]], where: dict, policy: object
) -> None:
    """Greedy and seeded, prefixes in common, chunks, n = 2, aborts; pools so small that decodes are preempted."""
    preempted: list[int] = []
    with build(model, num_blocks=26, **where) as cluster:
        config = CentralConfig(growth_tokens=0)
        watch = {"on_step": lambda name, step: preempted.append(len(step.plan.preempted))}
        with Server.of(cluster, policy, config=config, **watch) as server:
            final = run(server, LOAD)
        assert check(final, LOAD, expected) > 0
        check_pools_are_free(cluster)
    assert sum(preempted) > 0


# --- processes that die ----------------------------------------------------------------------------------------------


def test_requests_of_a_killed_worker_move_and_without_any_they_fail(
    model: LoadedModel, expected: list[list[list[int]]]
) -> None:
    steps: list[str] = []
    with build(model, collocated=["cpu", "cpu"]) as cluster:

        def on_step(name: str, step: object) -> None:
            steps.append(name)
            if steps.count("collocated0") == 4 and name == "collocated0":
                os.kill(cluster.workers[0].runner.pid, signal.SIGKILL)

        with Server.of(cluster, Always(Path.COLLOCATED), on_step=on_step) as server:
            final = run(server, LOAD)
            check(final, LOAD, expected)
            assert [worker.alive for worker in cluster.workers] == [False, True]
            assert steps.count("collocated0") == 5, "one step failed, and nobody tried another"

            os.kill(cluster.workers[1].runner.pid, signal.SIGKILL)
            outputs: SimpleQueue[RequestOutput] = SimpleQueue()
            server.add_request([1, 2, 3], on_output=outputs.put)
            error = outputs.get(timeout=20).error
            assert isinstance(error, WorkerFailedError) and "exit code -9" in str(error)
            with pytest.raises(NoWorkerError):
                server.add_request([1, 2, 3], on_output=outputs.put)
        check_pools_are_free(cluster)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("victim", ["prefill0", "decode0"])
def test_either_side_may_die(model: LoadedModel, expected: list[list[list[int]]], victim: str) -> None:
    """The other path takes over."""
    where = {"prefill": ["cpu"], "decode": ["cpu"], "collocated": ["cpu"], "shared_pool": victim == "prefill0"}
    with build(model, **where) as cluster:
        count: list[str] = []

        def on_step(name: str, step: object) -> None:
            count.append(name)
            if count.count(victim) == 3 and name == victim:
                os.kill(cluster.worker(victim).runner.pid, signal.SIGKILL)

        with Server.of(cluster, Always(Path.DISAGGREGATED), on_step=on_step) as server:
            check(run(server, LOAD), LOAD, expected)
        assert not cluster.worker(victim).alive
        check_pools_are_free(cluster)


SCRIPT = """
import os, signal, sys
from nanopd import SamplingParams
from nanopd.router.policies import make_policy
from nanopd.router.server import Server
from nanopd.workers import Cluster

def serve():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    small = dict(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, use_tqdm=False)
    with Cluster.build("dummy:tiny", collocated=["cpu", "cpu"], processes=True, **small) as cluster:
        print(*(worker.runner.pid for worker in cluster.workers), flush=True)
        with Server.of(cluster, make_policy("collocated")) as server:
            while True:
                server.generate([[1, 2]] * 4, SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
"""
GUARDED = SCRIPT + "\nif __name__ == '__main__':\n    serve()\n"


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_parent(tmp_path: File, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(GUARDED)
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(_runs(pid) for pid in pids)
        time.sleep(0.3)
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # as a terminal does: parent and children
        else:
            os.kill(parent.pid, number)
        _, stderr = parent.communicate(timeout=30)
        assert gone(pids)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    if number == signal.SIGINT:
        assert stderr.count("Traceback") == 1 and "KeyboardInterrupt" in stderr, stderr


def test_a_script_without_a_guard_is_told_so(tmp_path: File) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('["cpu", "cpu"]', '["cpu"]') + "\nserve()\n")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "WorkerFailedError" in run.stderr
    assert "which must do so under `if __name__ == '__main__':`" in run.stderr


# --- the beginning and the end ---------------------------------------------------------------------------------------


def test_nothing_is_left_after_close(tiny: LoadedModel) -> None:
    shared = File("/dev/shm")
    threads = set(threading.enumerate())
    before = set(shared.iterdir()) if shared.exists() else set()
    cluster = Cluster.build(tiny, collocated=["cpu"], processes=True, **SMALL)
    runner = cluster.workers[0].runner
    pid = runner.pid
    plan, _ = prompt_step(cluster)
    assert len(runner.execute(plan)) == 1
    cluster.close()
    cluster.close()
    runner.close()
    assert runner.pid is None and multiprocessing.active_children() == []
    assert not sys.platform.startswith("linux") or not _runs(pid)
    assert set(threading.enumerate()) <= threads
    assert not shared.exists() or not [f for f in set(shared.iterdir()) - before if "torch" in f.name]
    with pytest.raises(WorkerFailedError, match="collocated0 was closed"):
        runner.execute(plan)


def test_a_process_that_hangs_is_killed_at_the_end(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanopd.workers.process.CLOSE_S", 0.3)
    cluster = Cluster.build(tiny, collocated=["cpu"], processes=True, **SMALL)
    os.kill(cluster.workers[0].runner.pid, signal.SIGSTOP)
    cluster.close()
    assert multiprocessing.active_children() == []


def test_a_step_that_waits_while_another_thread_closes_fails(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanopd.workers.process.CLOSE_S", 0.1)
    monkeypatch.setattr("nanopd.workers.process.LOOK_S", 0.02)
    cluster = Cluster.build(tiny, collocated=["cpu"], processes=True, **SMALL)
    runner = cluster.workers[0].runner
    os.kill(runner.pid, signal.SIGSTOP)
    pending = runner.launch(prompt_step(cluster)[0])
    errors: SimpleQueue[BaseException] = SimpleQueue()

    def wait() -> None:
        try:
            pending.wait()
        except BaseException as error:
            errors.put(error)

    end, go_on = runner._end, threading.Event()
    monkeypatch.setattr(runner, "_end", lambda: (threading.current_thread() is waiting and go_on.wait(20), end())[1])
    waiting = threading.Thread(target=wait)
    waiting.start()
    cluster.close()
    go_on.set()  # it notices once all is closed
    error = errors.get(timeout=20)
    waiting.join(20)
    assert isinstance(error, WorkerFailedError) and "collocated0 ended with exit code -9" in str(error)
    assert multiprocessing.active_children() == []


def test_a_runner_that_cannot_be_made_over_there_is_an_error_here(tiny: LoadedModel) -> None:
    cache = KVCache.allocate(tiny.config, 4, 8, tiny.model.dtype, "cpu")
    runner = ProcessRunner("w", DeviceSpec("cpu"), tiny.model, cache, tiny.model.ops, {"max_num_seqs": 4})
    try:
        with pytest.raises(WorkerFailedError, match=r"worker w did not start: TypeError: .*max_num_batched_tokens"):
            runner.capture_graphs()
        with pytest.raises(WorkerFailedError, match="the process of worker w ended with exit code 0"):
            runner.execute(StepPlan())
    finally:
        runner.close()


def test_shared_memory_that_is_too_small_is_named(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(ConfigError, match=r"2\.1 MB of weights or KV do not fit into shared memory: .*--shm-size"):
        Cluster.build(tiny, collocated=["cpu"], processes=True, **{**SMALL, "num_blocks": 64})
    assert multiprocessing.active_children() == []


class OnGpu(KVCache):
    """Says that it lies on a GPU: its memory is then handed over through the pipe, once the process has started."""

    device = torch.device("cuda:0")


class Unshareable:
    def __reduce__(self) -> str:
        raise RuntimeError("CUDA error: operation not supported")


def test_what_a_gpu_holds_is_handed_over_once_the_process_runs(tiny: LoadedModel) -> None:
    from multiprocessing import resource_sharer

    cache = OnGpu(KVCache.allocate(tiny.config, 16, 16, tiny.model.dtype, "cpu").tensor, "tiny")
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "vocab_size": 1024}
    runner = ProcessRunner("w", DeviceSpec("cpu"), tiny.model, cache, tiny.model.ops, options)
    try:
        runner.capture_graphs()
        scheduler = Scheduler(SchedulerConfig(4, 32, None, 64), BlockManager(16, 16))
        scheduler.add(Request("r", [1, 2, 3], SamplingParams(temperature=0)), 0.0)
        assert len(runner.execute(scheduler.schedule(0.0))) == 1 and cache.tensor.abs().max() > 0
    finally:
        runner.close()
        resource_sharer.stop()  # of multiprocessing: it passes on memory of the CPU where this test pretends

    with pytest.raises(CudaUnavailableError, match=r"memory of cuda:0 reaches no other process: .* not supported"):
        ProcessRunner("w", DeviceSpec("cpu"), tiny.model, cache, tiny.model.ops, {"odd": Unshareable()})
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collocated": ["cuda:0/sm=48"]}, "cuda:0/sm=48: an SM partition is for one process"),
        ({"collocated": ["cpu"], "elastic": True}, "processes=True and elastic=True"),
        ({"collocated": ["cpu"], "processes": 1}, "processes must be True or False, got 1"),
    ],
)
def test_what_processes_cannot_have(tiny: LoadedModel, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster.build(tiny, **{"processes": True, **options})
    assert multiprocessing.active_children() == []


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[Cluster]:
    """One worker, bound to a core."""
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    with Cluster.build("dummy:tiny", collocated=[f"cpu/cores={core}"], processes=True, **SMALL) as cluster:
        yield cluster


def prompt_step(cluster: Cluster, count: int = 1) -> tuple[StepPlan, list[Request]]:
    """Prompts of three tokens, scheduled; end it with ``cancel``."""
    scheduler = cluster.workers[0].scheduler
    requests = [Request(f"r{i}", [5, 6, 7 + i], SamplingParams(max_tokens=4, temperature=0)) for i in range(count)]
    for request in requests:
        scheduler.add(request, 0.0)
    return scheduler.schedule(0.0), requests


def end(cluster: Cluster, plan: StepPlan, requests: list[Request]) -> None:
    scheduler = cluster.workers[0].scheduler
    scheduler.cancel(plan, 0.0)
    for request in requests:
        scheduler.withdraw(request, 0.0)


def test_pool_and_weights_are_one_memory(alone: Cluster) -> None:
    runner = alone.workers[0].runner
    plan, requests = prompt_step(alone)
    cache = runner.kv_cache.tensor
    cache.fill_(float("nan"))
    block = requests[0].table.block_ids[0]
    (drawn,), norm = runner.execute(plan), runner.model.weights.final_norm
    written = cache[:, :, block, :3]
    assert torch.isfinite(written).all() and written.abs().max() > 0
    assert torch.isnan(cache).sum() == cache.numel() - written.numel(), "nothing else was written"
    assert drawn != [0]
    before = norm.clone()
    norm.zero_()
    assert runner.execute(plan) == [[0]], "all logits are equal now: the first of them"
    norm.copy_(before)
    end(alone, plan, requests)


@linux
def test_the_process_keeps_to_its_cores(alone: Cluster) -> None:
    worker = alone.workers[0]
    core = int(worker.place.rpartition(" ")[2])
    for thread in File(f"/proc/{worker.runner.pid}/task").iterdir():
        if thread.name == str(worker.runner.pid):  # the one that computes
            assert os.sched_getaffinity(int(thread.name)) == {core}


def test_layers_are_reported_once_the_step_has_ended(alone: Cluster) -> None:
    runner = alone.workers[0].runner
    plan, requests = prompt_step(alone)
    layers: list[int] = []
    pending = runner.launch(plan, layers.append)
    time.sleep(0.2)
    assert layers == []
    tokens = pending.wait()
    assert layers == list(range(alone.config.num_layers)) and tokens == runner.execute(plan)
    end(alone, plan, requests)


def test_what_a_step_raises_arrives_and_the_process_lives_on(model: LoadedModel, alone: Cluster) -> None:
    runner: ProcessRunner = alone.workers[0].runner
    plan, requests = prompt_step(alone, 2)
    right = runner.execute(plan)
    runner.kv_cache.tensor.fill_(0)
    chunk = plan.chunks[0]
    too_long = StepPlan([ScheduledChunk(chunk.request, 0, 1, ())] * 5)
    with pytest.raises(StepFailedError, match=r"ConfigError: a step of 5 sequences .* limits of 4") as caught:
        runner.execute(too_long)
    assert "process_child.py" in caught.value.__notes__[0]
    block = requests[1].table.block_ids[0]
    after = StepPlan([ScheduledChunk(r, 2, 1, (r,)) for r in requests], num_decodes=2)
    runner.execute(plan)
    runner.kv_cache.tensor[:, :, block, 0] = float("nan")
    with pytest.raises(NonFiniteLogitsError) as wrong:
        runner.execute(after)
    assert wrong.value.request_ids == ("r1",)
    runner.kv_cache.tensor.fill_(0)
    assert runner.execute(plan) == right
    end(alone, plan, requests)


def test_a_step_that_nobody_waited_for_is_no_step_to_go_on_from(alone: Cluster) -> None:
    runner = alone.workers[0].runner
    plan, requests = prompt_step(alone)
    pending = runner.launch(plan)
    with pytest.raises(IllegalTransitionError, match="collocated0 has a step that nobody has waited for"):
        runner.launch(plan)
    assert pending.wait() == runner.execute(plan)
    end(alone, plan, requests)


def test_a_step_that_was_refused_leaves_nothing_half_known(alone: Cluster) -> None:
    """Of a table only its news cross the pipe: what was not sent is news still."""
    runner = alone.workers[0].runner
    plan, requests = prompt_step(alone, 2)
    first, second = (StepPlan([chunk]) for chunk in plan.chunks)
    pending = runner.launch(first)
    with pytest.raises(IllegalTransitionError):
        runner.launch(second)
    assert [pending.wait()[0], runner.execute(second)[0]] == runner.execute(plan)
    end(alone, plan, requests)


def test_an_interrupt_waits_for_the_step_to_end_over_there(alone: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are given to somebody else next. And the process goes on."""
    runner: ProcessRunner = alone.workers[0].runner
    plan, requests = prompt_step(alone)
    right = runner.execute(plan)
    os.kill(runner.pid, signal.SIGSTOP)  # a step that takes long
    wake = threading.Timer(0.3, os.kill, (runner.pid, signal.SIGCONT))
    pending = runner.launch(plan)
    look = Connection.poll

    def interrupted(self: Connection, *timeout: float) -> bool:
        monkeypatch.setattr(Connection, "poll", look)
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "poll", interrupted)
    wake.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert time.monotonic() - began > 0.2
    assert runner.execute(plan) == right
    end(alone, plan, requests)


def test_an_interrupt_stays_one_if_the_process_ends_by_it_too() -> None:
    class Dying:
        errors = iter([KeyboardInterrupt(), WorkerFailedError("the process ended")])

        def _receive(self) -> None:
            raise next(self.errors)

    with pytest.raises(KeyboardInterrupt):
        PendingAnswer(Dying(), None).wait()
    assert list(Dying.errors) == []
