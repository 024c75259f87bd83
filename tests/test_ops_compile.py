"""Every kernel compiles for every architecture, without a GPU.

What is compiled: each kernel of ``csrc`` in every combination that ``CudaOps`` and ``PagedAttention`` list as their
variants. The attention kernels are the expensive ones, so all head dims and dtypes are compiled for sm_80 and sm_90,
and for sm_86, 89 and 100 head dims 64 and 128 in bfloat16 only: those architectures run the same instructions, what
could differ is a limit of the target. Results are cached on disk, so that only the first run takes a minute or two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from nanopd.errors import CudaUnavailableError, KernelCompileError
from nanopd.ops import attention, cuda
from nanopd.ops.compiler import compile_with_log, csrc_dir, define_options, require_cuda_core

try:
    require_cuda_core()
except CudaUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
FULL_ARCHS = ("sm_80", "sm_90")
MAX_SPILL_BYTES = 64

Job = tuple[str, tuple[str, ...], str]  # file, options, arch


def jobs() -> list[Job]:
    """Distinct compilations; several functions of one file and set of defines are one."""
    found: dict[Job, None] = {}

    def add(file: str, defines: dict[str, object], archs: Iterable[str]) -> None:
        for arch in archs:
            found[(file, define_options(defines), arch)] = None

    for file, _, defines in cuda.variants():
        add(file, defines, ARCHS)
    for file, _, defines in attention.variants():
        add(file, defines, FULL_ARCHS)
    for file, _, defines in attention.variants((torch.bfloat16,), (64, 128)):
        add(file, defines, ARCHS)
    for file, _, defines in attention.variants((torch.bfloat16,), (64, 128), block_sizes=(8, 32)):
        add(file, defines, ("sm_90",))
    for file, _, defines in attention.wgmma_variants():
        add(file, defines, (attention.WGMMA_ARCH,))
    return list(found)


def compile_one(job: Job) -> tuple[Job, str, str | None]:
    """(job, log, error)"""
    file, options, arch = job
    try:
        return job, compile_with_log((csrc_dir() / file).read_text(), options, arch, name=file).log, None
    except KernelCompileError as error:
        return job, "", str(error)


@pytest.fixture(scope="module")
def compiled() -> list[tuple[Job, str, str | None]]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_one, jobs(), chunksize=8))


def test_every_source_file_is_compiled() -> None:
    assert {file for file, _, _ in jobs()} == {path.name for path in csrc_dir().glob("*.cu")}


def test_every_variant_compiles(compiled: list[tuple[Job, str, str | None]]) -> None:
    failures = [f"{job}: {error}" for job, _, error in compiled if error is not None]
    assert not failures, "\n\n".join(failures[:5])


def test_no_warnings(compiled: list[tuple[Job, str, str | None]]) -> None:
    warned = [f"{job}: {log}" for job, log, _ in compiled if "warning" in log.lower()]
    assert not warned, "\n\n".join(warned[:5])


def test_hardly_any_register_spills(compiled: list[tuple[Job, str, str | None]]) -> None:
    """A spilled register goes through memory. A few words outside the inner loop are harmless; more are not."""
    spilled = []
    for job, log, _ in compiled:
        if any(int(count) > MAX_SPILL_BYTES for count in re.findall(r"(\d+) bytes spill stores", log)):
            spilled.append(f"{job}: {[line for line in log.splitlines() if 'spill' in line or 'Used' in line]}")
    assert not spilled, "\n".join(spilled)


def test_sources_use_no_toolkit_header() -> None:
    for path in [*csrc_dir().glob("*.cu"), *csrc_dir().glob("*.cuh")]:
        assert not re.findall(r"#\s*include\s*<.*>", path.read_text()), path.name


def test_every_function_exists(compiled: list[tuple[Job, str, str | None]]) -> None:
    """The names that are asked for are the kernels that ptxas reports."""
    logs = {job: log for job, log, _ in compiled}
    for file, function, defines in [*cuda.variants(), *attention.variants()]:
        log = logs[(file, define_options(defines), "sm_90")]
        assert f"entry function '{function}'" in log, (file, function, Path(file))
    for file, function, defines in attention.wgmma_variants():
        log = logs[(file, define_options(defines), attention.WGMMA_ARCH)]
        assert f"entry function '{function}'" in log, (file, function, Path(file))
