"""SM partitions: work stays inside, partitions are disjoint, and everything that a worker does works in one.

Which SMs ran a kernel is asked of the kernel itself (``%smid``). cuBLAS does not tell, so its SMs are taken away: with
every SM of a partition occupied a product there cannot end, and one in the other partition can.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nanopd.engine import SamplingParams
from nanopd.engine.benchmark import prefilled_request
from nanopd.engine.request import Request
from nanopd.errors import ConfigError
from nanopd.model import LoadedModel, load_model
from nanopd.ops.compiler import Kernel, KernelLibrary
from nanopd.workers import Cluster, SmPartition, Worker, partition_device
from nanopd.workers.partition import _cublas, blas_sms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SOURCE = """
extern "C" __global__ void where(int* seen, long long cycles) {  // stay long enough for the others to go elsewhere
  unsigned id;
  asm volatile("mov.u32 %0, %smid;" : "=r"(id));
  long long start = clock64();
  while (clock64() - start < cycles) {}
  if (threadIdx.x == 0) atomicAdd(&seen[id], 1);
}

extern "C" __global__ void occupy(volatile int* release, int* started, long long cycles) {  // cycles: never hang
  if (threadIdx.x == 0) {
    atomicAdd(started, 1);
    long long start = clock64();
    while (*release == 0 && clock64() - start < cycles) {}
  }
  __syncthreads();
}
"""
FEW, MANY = 200_000, 6_000_000_000  # 0.1 ms and about 3 s


def divided() -> tuple[int, int]:
    """48 and 84 on an H200: a count in whole groups, and the rest."""
    total = torch.cuda.get_device_properties(0).multi_processor_count
    first = total * 3 // 8 // 8 * 8
    return first, total - first


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[SmPartition, SmPartition]]:
    made = partition_device("cuda", divided())
    yield made[0], made[1]
    for partition in made:
        partition.close()


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    library = KernelLibrary(torch.device("cuda", 0))
    return {name: library.load(SOURCE, name) for name in ("where", "occupy")}


def sms_of(partition: SmPartition | None, run: Callable[[torch.Tensor], None]) -> set[int]:
    """SMs on which the blocks ran that ``run`` launches with ``where``."""
    seen = torch.zeros(1024, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(partition.stream if partition else torch.cuda.current_stream()):
        run(seen)
        torch.cuda.current_stream().synchronize()  # torch.cuda.synchronize() waits for torch's own context only
    return set(seen.nonzero().flatten().tolist())


def test_kernels_stay_in_their_partition(pair: tuple[SmPartition, SmPartition], kernels: dict[str, Kernel]) -> None:
    where, (first, second) = kernels["where"], pair

    def run(seen: torch.Tensor) -> None:
        where(600, 256, seen, FEW)

    one, other, whole = sms_of(first, run), sms_of(second, run), sms_of(None, run)
    assert (len(one), len(other)) == (first.num_sms, second.num_sms) == divided()
    assert not one & other
    assert one | other == whole


def test_graphs_stay_in_the_partition_that_they_were_captured_in(
    pair: tuple[SmPartition, SmPartition], kernels: dict[str, Kernel]
) -> None:
    where, (first, second) = kernels["where"], pair
    seen = torch.zeros(1024, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    found, graphs = [], []
    for partition, replayed_in in ((first, first), (second, second), (first, second)):
        graph = torch.cuda.CUDAGraph()
        graphs.append(graph)
        with torch.cuda.stream(partition.stream):
            where(1, 32, torch.zeros_like(seen), 1)  # loads the code there, which capture forbids
            partition.stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            where(600, 256, seen, FEW)
            graph.capture_end()
        with torch.cuda.stream(replayed_in.stream):
            graph.replay()
            replayed_in.stream.synchronize()
        found.append(set(seen.nonzero().flatten().tolist()))
        seen.zero_()
    assert [len(sms) for sms in found] == [first.num_sms, second.num_sms, first.num_sms]
    assert not found[0] & found[1]
    assert found[2] == found[0], "where a graph is replayed does not move it"


def test_a_thread_that_never_saw_the_gpu(pair: tuple[SmPartition, SmPartition], kernels: dict[str, Kernel]) -> None:
    """The worker's way in: its thread enters the partition and launches; other threads keep their streams."""
    seen = torch.zeros(1024, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.current_stream()
    inside: list[Any] = []

    def work() -> None:
        with pair[0].enter():
            inside.append(torch.cuda.current_stream() == pair[0].stream)
            kernels["where"](600, 256, seen, FEW)
            pair[0].stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [True] and torch.cuda.current_stream() == before
    assert seen.count_nonzero() == pair[0].num_sms


def test_a_matrix_product_uses_the_partition_s_sms_only(
    pair: tuple[SmPartition, SmPartition], kernels: dict[str, Kernel]
) -> None:
    a, b = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected, *outs = (torch.matmul(a, b) for _ in range(3))
    borrowed = [partition._context.create_stream() for partition in pair]
    streams = [torch.cuda.ExternalStream(int(stream.handle)) for stream in borrowed]
    release, started = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    for stream, out in zip(streams, outs):  # makes handles and workspaces, which may wait for the device
        with torch.cuda.stream(stream):
            torch.matmul(a, b, out=out)
    for blocked, free in ((0, 1), (1, 0)):
        for tensor in (*outs, release, started):
            tensor.zero_()
        torch.cuda.synchronize()
        take_all_sms(pair[blocked], kernels["occupy"], release, started, streams[free])
        with torch.cuda.stream(streams[blocked]):
            torch.matmul(a, b, out=outs[blocked])
        held = streams[blocked].record_event()
        with torch.cuda.stream(streams[free]):
            torch.matmul(a, b, out=outs[free])
        streams[free].synchronize()
        assert not held.query(), "a product ended although every SM of its partition was taken"
        with torch.cuda.stream(streams[free]):
            release.fill_(1)
        torch.cuda.synchronize()
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=0.05, atol=1.0)
    for stream in borrowed:
        stream.close()


def take_all_sms(
    partition: SmPartition, occupy: Kernel, release: torch.Tensor, started: torch.Tensor, side: torch.cuda.Stream
) -> None:
    """A block on each SM of ``partition`` that leaves no shared memory, until ``release`` is set. ``side``: to look."""
    shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    with torch.cuda.stream(partition.stream):
        occupy(partition.num_sms, 64, release, started, MANY, shared=shared)
    deadline = time.monotonic() + 5
    with torch.cuda.stream(side):
        while started.item() < partition.num_sms:
            assert time.monotonic() < deadline, f"only {started.item()} of {partition.num_sms} SMs were taken"


def test_tensors_made_on_a_partition_s_stream(pair: tuple[SmPartition, SmPartition]) -> None:
    """The caching allocator serves these streams, and events order them."""
    for _ in range(3):
        with torch.cuda.stream(pair[0].stream):
            x = torch.ones(1 << 22, device="cuda")
            torch.cuda._sleep(1_000_000)
            x += 1
            ready = pair[0].stream.record_event()
        with torch.cuda.stream(pair[1].stream):
            pair[1].stream.wait_event(ready)
            assert x.sum().item() == 2 << 22
        x.record_stream(pair[1].stream)
        del x


@pytest.mark.parametrize("counts", [[32, 40], [24, 24, 24], [16, 24, 32]], ids=str)
def test_more_partitions_of_other_sizes(counts: list[int], kernels: dict[str, Kernel]) -> None:
    total = torch.cuda.get_device_properties(0).multi_processor_count
    counts = [*counts, total - sum(counts)]
    made = partition_device("cuda", counts)
    found = [sms_of(partition, lambda seen: kernels["where"](600, 256, seen, FEW)) for partition in made]
    assert [len(sms) for sms in found] == [partition.num_sms for partition in made] == counts
    assert len(set().union(*found)) == total
    for partition in made:
        partition.close()
        partition.close()
        assert "closed" in repr(partition)


def test_one_partition_alone_and_the_rest_idle(kernels: dict[str, Kernel]) -> None:
    for count in divided():
        (made,) = partition_device("cuda", [count])
        assert len(sms_of(made, lambda seen: kernels["where"](600, 256, seen, FEW))) == count
        made.close()


@pytest.mark.parametrize("counts", [[5], [1], [10_000], [48, 49, 11], [0]], ids=str)
def test_impossible_partitions_are_refused(counts: list[int]) -> None:
    with pytest.raises(ConfigError):
        partition_device("cuda", counts)


def test_cublas_is_told_and_forgets() -> None:
    blas = _cublas()
    if blas is None:
        pytest.skip("cuBLAS is linked in, not loaded")

    def target() -> int:
        value = ctypes.c_int(-1)
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        assert blas.cublasGetSmCountTarget(handle, ctypes.byref(value)) == 0
        return value.value

    with blas_sms(48) as told:
        assert told and target() == 48
        inside = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16) @ torch.ones(64, 64, device="cuda").bfloat16()
    assert target() == 0
    assert (inside == 64).all()


# --- workers ---------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024, "use_tqdm": False,
    "graph_sizes": [1, 4, 8],
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("dummy:tiny", device="cuda:0", dtype="bfloat16")


def logits_of(worker: Worker, num_decodes: int, num_prefill: int) -> torch.Tensor:
    """[R, vocab] of one step of ``worker``: decodes over KV that is the same in every block, or one prompt."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    cache = worker.runner.kv_cache.tensor
    cache.copy_(torch.randn((*cache.shape[:2], 1, *cache.shape[3:]), generator=generator, device="cuda"))
    torch.cuda.synchronize()
    params, scheduler = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), worker.scheduler
    for i in range(num_decodes):
        prompt = [(7 * i + j) % 1000 for j in range(100 + i)]
        scheduler.attach(prefilled_request(worker.block_manager, f"d{i}", prompt, params))
    if num_prefill:
        worker.add(Request("p", [j % 1000 for j in range(num_prefill)], params), 0.0)
    plan = scheduler.schedule()
    assert (plan.num_decodes, plan.num_prefill_tokens) == (num_decodes, num_prefill)
    logits = worker.runner.logits(plan).clone()
    torch.cuda.synchronize()
    scheduler.cancel(plan)
    for request in [*scheduler.waiting, *scheduler.running]:
        scheduler.abort(request.request_id)
    return logits


def test_steps_in_partitions_compute_the_same(tiny: LoadedModel) -> None:
    """Eager prefill and decodes from CUDA graphs, against a worker on the whole GPU."""
    with Cluster.build(tiny, collocated=["cuda:0"], **SMALL, enforce_eager=True) as whole:
        (worker,) = whole.workers
        prefill, decode = logits_of(worker, 0, 300), logits_of(worker, 7, 0)
    first, second = divided()
    places = {"prefill": [f"cuda:0/sm={second}"], "decode": [f"cuda:0/sm={first}"]}
    for shared in (True, False):
        with Cluster.build(tiny, **places, **SMALL, shared_pool=shared) as cluster:
            apart = {w.role.value: w for w in cluster.workers}
            assert [w.runner.ops.attention.num_sms for w in cluster.workers] == [second, first]
            assert apart["decode"].profile == f"sm={first}" and apart["decode"].runner.graphs is not None
            torch.testing.assert_close(logits_of(apart["prefill"], 0, 300), prefill, rtol=0.05, atol=0.05)
            torch.testing.assert_close(logits_of(apart["decode"], 7, 0), decode, rtol=0.05, atol=0.05)


def test_weights_are_copied_to_devices_that_do_not_have_them() -> None:
    here = load_model("dummy:tiny", device="cpu", dtype="bfloat16")
    with Cluster.build(here, collocated=["cuda:0", "cpu"], **SMALL) as cluster:
        there, same = (worker.runner.model.weights for worker in cluster.workers)
        assert same is here.model.weights
        assert there.layers[1].gate_up.device == torch.device("cuda", 0)
        for name in ("qkv", "attn_out", "gate_up", "down", "mlp_norm"):
            assert torch.equal(getattr(there.layers[1], name).cpu(), getattr(same.layers[1], name))
        assert there.lm_head is there.embedding and torch.equal(there.lm_head.cpu(), same.lm_head)


def test_two_workers_at_once_do_not_disturb_each_other(tiny: LoadedModel) -> None:
    """Decode graphs replayed in one partition while the other prefills, both in threads: results as when alone."""
    first, second = divided()
    places = {"prefill": [f"cuda:0/sm={second}"], "decode": [f"cuda:0/sm={first}"]}
    with Cluster.build(tiny, **places, **SMALL, shared_pool=False) as cluster:
        prefill, decode = cluster.workers
        jobs = {prefill.name: (prefill, 0, 300), decode.name: (decode, 8, 0)}
        alone = {name: logits_of(*job) for name, job in jobs.items()}
        wrong: list[str] = []

        def work(name: str) -> None:
            with jobs[name][0].enter():
                for _ in range(20):
                    if not torch.allclose(logits_of(*jobs[name]), alone[name], rtol=0.02, atol=0.02):
                        wrong.append(name)

        threads = [threading.Thread(target=work, args=(name,)) for name in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
