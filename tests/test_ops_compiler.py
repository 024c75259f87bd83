"""The run-time compiler and its disk cache, which need no GPU."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nanopd.errors import CudaUnavailableError, KernelCompileError
from nanopd.ops import compiler
from nanopd.ops.compiler import KernelLibrary, compile_source, compile_with_log, csrc_dir, define_options
from nanopd.ops.disk_cache import DiskCache

try:
    compiler.require_cuda_core()
    HAVE_COMPILER = True
except CudaUnavailableError:
    HAVE_COMPILER = False

needs_compiler = pytest.mark.skipif(not HAVE_COMPILER, reason="needs cuda-core and NVRTC")

SOURCE = """
extern "C" __global__ void fill(float* out) {
  out[threadIdx.x] = VALUE;
}
"""


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.bin"))


@needs_compiler
def test_second_compile_comes_from_disk(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_with_log(SOURCE, ("-DVALUE=1.f",), "sm_80")
    assert first.cubin.startswith(b"\x7fELF") and "registers" in first.log
    assert len(entries(fresh_cache)) == 1

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("cuda.core.Program", refuse)
    assert compile_with_log(SOURCE, ("-DVALUE=1.f",), "sm_80") == first
    with pytest.raises(KernelCompileError, match="compiled again"):
        compile_source(SOURCE, ("-DVALUE=2.f",), "sm_80")


@needs_compiler
def test_everything_that_matters_is_in_the_key(tmp_path: Path, fresh_cache: Path) -> None:
    header = tmp_path / "outer.cuh"
    inner = tmp_path / "inner.cuh"
    source = '#include "outer.cuh"\n' + SOURCE
    header.write_text('#include "inner.cuh"\n')
    seen = set()
    for content, options, arch in [
        ("#define VALUE 1.f", (), "sm_80"),
        ("#define VALUE 2.f", (), "sm_80"),  # two headers down
        ("#define VALUE 2.f", ("-lineinfo",), "sm_80"),
        ("#define VALUE 2.f", (), "sm_90"),
    ]:
        inner.write_text(content)
        compile_source(source, options, arch, include=(tmp_path,))
        seen.update(entries(fresh_cache))
    assert len(seen) == 4


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_damaged_entry_is_replaced(fresh_cache: Path, damage: str) -> None:
    good = compile_source(SOURCE, ("-DVALUE=1.f",), "sm_80")
    (path,) = entries(fresh_cache)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes({"empty": b"", "cut": path.read_bytes()[:100], "flipped": bytes(raw)}[damage])
    assert compile_source(SOURCE, ("-DVALUE=1.f",), "sm_80") == good
    assert DiskCache(fresh_cache / "kernels").get(path.stem) is not None


def test_concurrent_writers_leave_one_whole_entry(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    payloads = [bytes([i]) * 200_000 for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(cache.put, "ab" * 32, data, str(data[0])) for data in payloads]
        reads = [pool.submit(cache.get, "ab" * 32) for _ in range(32)]
        for future in writes:
            future.result()
        for entry in [future.result() for future in reads] + [cache.get("ab" * 32)]:
            assert entry is None or (entry[0] in payloads and entry[1] == str(entry[0][0]))
    assert cache.get("ab" * 32) is not None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ab" * 32 + ".bin"]


def test_cache_that_cannot_be_written_only_costs_the_caching(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a file where the folder should be")
    cache = DiskCache(file)
    cache.put("cd" * 32, b"binary", "log")
    assert cache.get("cd" * 32) is None


@needs_compiler
def test_error_has_the_line_of_the_source() -> None:
    with pytest.raises(KernelCompileError) as caught:
        compile_source('#include "common.cuh"\n\nint f( { return 1; }\n', (), "sm_90", name="cell.cu")
    assert "cell.cu(3): error:" in str(caught.value)
    assert "NVRTC_ERROR" not in str(caught.value)


@needs_compiler
@pytest.mark.parametrize("option", ["--frobnicate", "-x", "--maxrregcount=many", "-D"])
def test_unknown_options_are_named(option: str) -> None:
    with pytest.raises(KernelCompileError, match=option):
        compile_source(SOURCE, ("-DVALUE=1.f", option), "sm_80")


@needs_compiler
def test_options_take_effect(tmp_path: Path) -> None:
    (tmp_path / "value.cuh").write_text("#define OTHER 1.f\n")
    source = '#include "value.cuh"\n' + SOURCE
    for options in (
        ("-DVALUE=OTHER", f"-I{tmp_path}"),
        ("-D", "VALUE=OTHER", "-I", str(tmp_path), "--use_fast_math", "-lineinfo", "--maxrregcount=32", "-std=c++20"),
        (f"-D VALUE=OTHER -I {tmp_path}",),
    ):
        assert compile_source(source, options, "sm_80")
    with pytest.raises(KernelCompileError, match=r"value\.cuh"):
        compile_source(source, ("-DVALUE=OTHER",), "sm_80")


@needs_compiler
def test_unknown_architecture() -> None:
    with pytest.raises(KernelCompileError, match="sm_1"):
        compile_source(SOURCE, ("-DVALUE=1.f",), "sm_1")


@needs_compiler
def test_usage_is_read_from_the_log() -> None:
    source = """
    extern "C" __global__ void none(int* x) { x[0] = 1; }
    extern "C" __global__ void shared(int* x) { __shared__ int s[64]; s[threadIdx.x] = *x; __syncthreads(); *x = s[1]; }
    """
    usage = compile_with_log(source, (), "sm_90").usage()
    assert set(usage) == {"none", "shared"}
    assert usage["none"].shared_bytes == 0 and usage["shared"].shared_bytes == 256
    assert usage["none"].registers > 0 and usage["none"].spill_bytes == 0


def test_defines() -> None:
    assert define_options({"A": 1, "B": "bf16", "C": True}) == ("-DA=1", "-DB=bf16", "-DC=1")


def test_missing_cuda_core_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(CudaUnavailableError, match=r"pip install 'cuda-core\[cu\d+\]'"):
        compile_source(SOURCE, (), "sm_80")


def test_csrc_is_found() -> None:
    assert (csrc_dir() / "common.cuh").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_library_needs_a_gpu() -> None:
    with pytest.raises(CudaUnavailableError, match="cuda"):
        KernelLibrary(torch.device("cuda"))
    with pytest.raises(CudaUnavailableError, match="cpu"):
        KernelLibrary(torch.device("cpu"))
