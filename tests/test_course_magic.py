"""The ``%%cuda`` cell magic, in a real IPython shell, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nanopd.course.magic import CellCompileError, CellKernel
from nanopd.errors import CudaUnavailableError, KernelCompileError
from nanopd.ops.compiler import require_cuda_core

try:
    require_cuda_core()
except CudaUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

SCALE = """
#include "common.cuh"
extern "C" __global__ void scale(float* x, int n) {
  __shared__ float unused[FACTOR];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unused[threadIdx.x % FACTOR] = 1.f;
  __syncthreads();
  if (i < n) x[i] *= FACTOR * unused[(threadIdx.x + 1) % FACTOR];
}
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path))
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "nanopd.course")
    return shell


def test_cell_binds_its_kernels(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell_magic("cuda", "demo -D FACTOR=3 --arch sm_90", SCALE + SCALE.replace("void scale", "void other"))
    scale = shell.user_ns["scale"]
    assert isinstance(scale, CellKernel) and isinstance(shell.user_ns["other"], CellKernel)
    assert (scale.arch, scale.options) == ("sm_90", ("-DFACTOR=3",))
    assert scale.usage is not None and scale.usage.registers > 0 and scale.usage.shared_bytes == 12
    assert "scale for sm_90" in capsys.readouterr().out


def test_kernel_can_be_compiled_again_with_other_defines(shell: Any) -> None:
    shell.run_cell_magic("cuda", "-DFACTOR=3", SCALE)
    wider = shell.user_ns["scale"].with_defines(FACTOR=16)
    assert wider.options == ("-DFACTOR=16",) and wider.usage.shared_bytes == 64
    with pytest.raises(KernelCompileError, match="error"):
        wider.with_defines(FACTOR="oops")


def test_the_same_defines_again_are_found_in_the_cache(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC has a cache of its own, and says nothing of registers when the code comes from there."""
    shell.run_cell_magic("cuda", "-D FACTOR=3 -D BEHIND=1", SCALE)
    scale = shell.user_ns["scale"]
    monkeypatch.setattr("cuda.core.Program", None)  # a second compilation would fail
    again = scale.with_defines(FACTOR=3)
    assert again.options == scale.options and again.usage == scale.usage is not None


ONE = 'extern "C" __global__ void one(float* x) { x[0] = 1; }\n'


def test_a_quoted_macro_may_hold_spaces(shell: Any) -> None:
    shell.run_cell_magic("cuda", "-D 'VALUE=2 + 3'", ONE.replace("= 1", "= VALUE"))
    one = shell.user_ns["one"]
    assert one.with_defines(VALUE="4 - 1").options == ("'-DVALUE=4 - 1'",)
    with pytest.raises(KernelCompileError):
        one.with_defines(VALUE='"')


def test_a_folder_of_headers_apart_from_its_option(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "seven.cuh").write_bytes(b"// latin-1: \xe9\n#define SEVEN 7\n")
    shell.run_cell_magic("cuda", f"-I '{tmp_path}/a folder'", '#include "seven.cuh"\n' + ONE.replace("= 1", "= SEVEN"))
    assert "one" in shell.user_ns


def test_text_that_cannot_be_encoded_is_refused(shell: Any) -> None:
    with pytest.raises(KernelCompileError, match="not valid Unicode"):
        shell.run_cell_magic("cuda", "", ONE + "// \ud800\n")


@pytest.mark.parametrize("name", ["-", "../x", "'\"'", "'a;b'"])
def test_a_name_that_would_confuse_the_compiler_is_refused(shell: Any, name: str) -> None:
    with pytest.raises(UsageError, match="the name"):
        shell.run_cell_magic("cuda", name, ONE)


def test_error_shows_the_line_as_jupyter_counts_it(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cell = '%%cuda demo\nextern "C" __global__ void broken(float* x) {\n  x[0] = not_defined;\n}\n'
    result = shell.run_cell(cell)
    assert isinstance(result.error_in_exec, CellCompileError)
    shown = capsys.readouterr().out
    assert 'demo.cu(3): error: identifier "not_defined" is undefined' in shown
    assert "Traceback" not in shown and "magic.py" not in shown


def test_cell_without_a_kernel_and_unknown_options(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%%cuda\n__global__ void mangled(float* x) { x[0] = 1; }\n")
    assert 'extern "C"' in capsys.readouterr().err
    assert isinstance(shell.run_cell("%%cuda demo --frobnicate\nint x;").error_in_exec, CellCompileError)
    assert "--frobnicate" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_launch_without_a_gpu_says_so(shell: Any) -> None:
    shell.run_cell_magic("cuda", "-D FACTOR=2", SCALE)
    with pytest.raises(CudaUnavailableError, match="scale cannot be launched"):
        shell.user_ns["scale"](1, 32, torch.zeros(4), 4)


def test_notebook_goes_on_where_there_is_no_compiler(
    shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise CudaUnavailableError("pip install something")

    monkeypatch.setattr("nanopd.ops.compiler.require_cuda_core", missing)
    shell.run_cell_magic("cuda", "-D FACTOR=2", SCALE)
    assert "pip install something" in capsys.readouterr().out
    with pytest.raises(CudaUnavailableError):
        shell.user_ns["scale"](1, 32, torch.zeros(4), 4)
