"""Loading and launching compiled kernels: arguments, streams, graphs, threads, and every way a launch can go wrong."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from nanopd.errors import KernelCompileError, KernelLaunchError, UnsupportedShapeError
from nanopd.ops.compiler import Kernel, KernelLibrary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FILL = """
extern "C" __global__ void fill(float* out, int n, float value) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = value;
}
"""


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return KernelLibrary(torch.device("cuda"))


@pytest.fixture
def fill(library: KernelLibrary) -> Kernel:
    return library.load(FILL, "fill")


def test_fill(fill: Kernel) -> None:
    x = torch.zeros(1000, device="cuda")
    fill(4, 256, x, 999, 2.5)
    assert (x[:999] == 2.5).all() and x[999] == 0


def test_arguments_of_every_kind(library: KernelLibrary) -> None:
    source = """
    extern "C" __global__ void kinds(double* out, int a, long long b, float c, double d, unsigned char e, void* null,
                                     int last) {
      out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = null == nullptr; out[6] = last;
    }
    """
    kernel = library.load(source, "kinds")
    out = torch.zeros(7, dtype=torch.float64, device="cuda")
    kernel(1, 1, out, -3, -(2**40), 0.1, np.float64(0.1), np.uint8(200), None, 2**31 - 1)
    assert out.tolist() == [-3, -(2**40), float(np.float32(0.1)), 0.1, 200, 1, 2**31 - 1]


def test_grid_and_block_of_three_dimensions(library: KernelLibrary) -> None:
    source = """
    extern "C" __global__ void where(int* out) {
      int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
    }
    """
    out = torch.zeros(2 * 3 * 4 * 5 * 6 * 7, dtype=torch.int32, device="cuda")
    library.load(source, "where")((2, 3, 4), (5, 6, 7), out)
    assert (out == 1).all()


def test_library_keeps_kernels_and_specialises_by_defines(library: KernelLibrary) -> None:
    first = library.get("store_kv.cu", "store_kv", {"ROW_VECS": 16})
    assert library.get("store_kv.cu", "store_kv", {"ROW_VECS": 16}) is first
    assert library.get("store_kv.cu", "store_kv", {"ROW_VECS": 24}) is not first
    assert first.num_registers > 0 and first.local_bytes == 0
    with pytest.raises(KernelCompileError, match="ROW_VECS"):
        library.get("store_kv.cu", "store_kv", {})
    with pytest.raises(KernelLaunchError, match="no_such_kernel"):
        library.get("store_kv.cu", "no_such_kernel", {"ROW_VECS": 16})


def test_launch_errors_leave_the_process_and_the_device_usable(library: KernelLibrary, fill: Kernel) -> None:
    x = torch.zeros(32, device="cuda")
    for grid, block, shared, message in [
        (1, 2048, 0, "2048 threads"),
        (0, 32, 0, "at least 1"),
        ((1, 70_000), 32, 0, "70000"),
        (1, 32, 10**6, "1000000 bytes of dynamic shared memory"),
        (1, 32, -1, "at least 1"),
    ]:
        with pytest.raises(KernelLaunchError, match=message):
            fill(grid, block, x, 32, 1.0, shared=shared)
    with pytest.raises(UnsupportedShapeError, match="cpu"):
        fill(1, 32, torch.zeros(32), 32, 1.0)
    with pytest.raises((KernelLaunchError, TypeError)):
        fill(1, 32, "not an argument", 32, 1.0)
    torch.cuda.synchronize()
    fill(1, 32, x, 32, 3.0)
    assert (x == 3).all()


def test_large_dynamic_shared_memory(library: KernelLibrary) -> None:
    source = """
    extern "C" __global__ void reverse(float* x, int n) {
      extern __shared__ float tile[];
      for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = x[i];
      __syncthreads();
      for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = tile[n - 1 - i];
    }
    """
    kernel = library.load(source, "reverse")
    for n in (1000, 24_000, 20_000):  # 96 KB; sm_86 and sm_89 allow 99 KB
        x = torch.arange(n, dtype=torch.float32, device="cuda")
        kernel(1, 1024, x, n, shared=4 * n)
        assert torch.equal(x, torch.arange(n - 1, -1, -1, dtype=torch.float32, device="cuda"))


def test_explicit_stream(fill: Kernel) -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000)  # on the current stream; the side stream does not wait for it
    fill(1, 32, x, 32, 1.0, stream=side)
    side.synchronize()
    assert (x == 1).all()


def test_graph_capture(fill: Kernel) -> None:
    x = torch.zeros(32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(1, 32, x, 32, 5.0)
    assert (x == 0).all()
    graph.replay()
    assert (x == 5).all()


def test_launch_is_the_first_thing_a_thread_does(fill: Kernel) -> None:
    x = torch.zeros(32, device="cuda")
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            fill(1, 32, x, 32, 7.0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures
    torch.cuda.synchronize()
    assert (x == 7).all()


def test_disk_cache_serves_a_second_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path))
    x = torch.zeros(32, device="cuda")
    for value in (1.0, 2.0):
        KernelLibrary(torch.device("cuda")).load(FILL, "fill")(1, 32, x, 32, value)
        assert (x == value).all()
    assert len(list(tmp_path.rglob("*.bin"))) == 1
