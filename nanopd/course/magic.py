"""``%%cuda``: a notebook cell of CUDA C++ becomes kernels that Python can launch.

    %%cuda scale -D FACTOR=3
    extern "C" __global__ void scale(float* x, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) x[i] *= FACTOR;
    }

binds ``scale``, to be called as ``scale(grid, block, x, n)``. Every ``extern "C"`` kernel of the cell is bound under
its own name; the word after ``%%cuda`` only names the cell in error messages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import torch
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser

from nanopd.errors import CudaUnavailableError, KernelCompileError
from nanopd.ops.compiler import (
    DEFAULT_ARCH,
    CompiledSource,
    Kernel,
    KernelUsage,
    compile_with_log,
    define_options,
    device_arch,
)

_KERNEL_NAME = re.compile(
    r"__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)"
)


class CellCompileError(KernelCompileError):
    """A ``%%cuda`` cell that NVRTC refused. IPython shows the compiler's words and no Python traceback."""

    def _render_traceback_(self) -> list[str]:  # looked up by IPython
        bold, red, plain = "\x1b[1m", "\x1b[31m", "\x1b[0m"
        lines = []
        for line in str(self).splitlines():
            is_error = re.search(r"\): (catastrophic )?error", line)
            lines.append(f"{bold}{red}{line}{plain}" if is_error else line)
        return lines


class CellKernel:
    """One kernel of a ``%%cuda`` cell. ``kernel(grid, block, *args, shared=0, stream=None)`` launches it.

    It exists without a GPU too: ``usage`` then still says what the compiler made of it, and a launch raises
    ``CudaUnavailableError``.

    Attributes:
        name: the function's name.
        source: the cell's text, with a ``#line`` directive in front.
        options: compiler options it was compiled with.
        arch: e.g. ``sm_90``.
        usage: registers, spills and static shared memory; None where there is no compiler.
    """

    def __init__(
        self, name: str, source: str, options: Sequence[str], arch: str, label: str, compiled: CompiledSource | None
    ) -> None:
        self.name, self.source, self.options, self.arch = name, source, tuple(options), arch
        self.usage: KernelUsage | None = compiled.usage().get(name) if compiled else None
        self._label = label
        self._cubin = compiled.cubin if compiled else None
        self._loaded: dict[int, Kernel] = {}

    def __call__(
        self, grid: int | tuple[int, ...], block: int | tuple[int, ...], *args: Any, shared: int = 0, stream: Any = None
    ) -> None:
        """Launch on the GPU of the first tensor argument; see ``nanopd.ops.launch.Kernel`` for arguments and errors."""
        self.on_device(args)(grid, block, *args, shared=shared, stream=stream)

    def on_device(self, args: Sequence[Any] = ()) -> Kernel:
        """The loaded kernel, for the GPU of the first tensor in ``args`` or else torch's current one."""
        if not torch.cuda.is_available():
            raise CudaUnavailableError(f"{self.name} cannot be launched: torch {torch.__version__} sees no CUDA GPU")
        if self._cubin is None:
            raise CudaUnavailableError(f"{self.name} was not compiled: cuda-core was missing when its cell ran")
        tensor = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda), None)
        index = torch.cuda.current_device() if tensor is None else tensor.get_device()
        kernel = self._loaded.get(index)
        if kernel is None:
            kernel = self._loaded[index] = Kernel(self._cubin, self.name, torch.device("cuda", index))
        return kernel

    def with_defines(self, **defines: object) -> CellKernel:
        """The same kernel compiled with these macros instead of, or beside, the cell's own ``-D`` options.

        Raises:
            KernelCompileError: it does not compile this way.
        """
        new, options = dict(zip(defines, define_options(defines), strict=True)), []
        # Each in its place: options in another order are another key of our cache, and NVRTC, whose own cache knows
        # the code then, reports no registers.
        for option in self.options:
            key = next((key for key in defines if re.match(rf"'?-D{re.escape(key)}(=|'?$)", option)), None)
            if key is None:
                options.append(option)
            elif key in new:
                options.append(new.pop(key))
        options += new.values()
        compiled = _compile(self.source, options, self.arch, self._label)
        return CellKernel(self.name, self.source, options, self.arch, self._label, compiled)

    def __repr__(self) -> str:
        return f"{self.name} for {self.arch}: {self.usage or 'not compiled'}"


@magics_class
class CudaMagics(Magics):
    """The ``%%cuda`` cell magic."""

    @cell_magic
    def cuda(self, line: str, cell: str) -> None:
        """Compile the cell and bind its kernels.

        %%cuda [NAME] [-D MACRO=VALUE]... [-I FOLDER]... [--arch sm_XY] [other compiler options]

        ``#include "common.cuh"`` and the other headers of csrc are found. Line numbers in errors are those that
        JupyterLab shows beside the cell, the %%cuda line being 1.
        """
        label, options, arch = _parse(line)
        source = f'#line 2 "{label}"\n{cell}'
        compiled = _compile(source, options, arch, label)
        if compiled is None:
            names = _KERNEL_NAME.findall(cell)
        else:
            names = [name for name in compiled.usage() if not name.startswith("_Z")]
        if not names:
            raise UsageError('this cell defines no kernel; write one as: extern "C" __global__ void name(...) {...}')
        for name in sorted(names):
            kernel = CellKernel(name, source, options, arch, label, compiled)
            self.shell.user_ns[name] = kernel
            print(kernel)


def _parse(line: str) -> tuple[str, tuple[str, ...], str]:
    """(label, compiler options, arch) of the magic's line."""
    parser = MagicArgumentParser(prog="%%cuda", add_help=False)
    parser.add_argument("name", nargs="?", default="cell")
    parser.add_argument("-D", action="append", default=[], dest="defines", metavar="MACRO=VALUE")
    parser.add_argument("-I", action="append", default=[], dest="folders", metavar="FOLDER")
    parser.add_argument("--arch")
    try:
        known, others = parser.parse_known_args(shlex.split(line))
    except ValueError as error:  # an unclosed quote
        raise UsageError(f"%%cuda: {error}") from error
    arch = known.arch
    if arch is None:
        on_gpu = torch.cuda.is_available()
        arch = device_arch(torch.device("cuda", torch.cuda.current_device())) if on_gpu else DEFAULT_ARCH
    label = known.name if known.name.endswith(".cu") else f"{known.name}.cu"
    if not re.fullmatch(r"\w[\w./ -]*", label):
        raise UsageError(f"%%cuda: the name {known.name!r} may hold letters, digits, and . / - _ only")
    options = (*(f"-D{define}" for define in known.defines), *(f"-I{folder}" for folder in known.folders), *others)
    return label, tuple(map(shlex.quote, options)), arch


def _compile(source: str, options: Sequence[str], arch: str, label: str) -> CompiledSource | None:
    """None where there is no compiler (macOS), so that the rest of a notebook still runs."""
    try:
        return compile_with_log(source, options, arch, name=label)
    except KernelCompileError as error:
        raise CellCompileError(str(error)) from None
    except CudaUnavailableError as error:
        print(error)
        return None


def register(shell: Any) -> None:
    """Add the magics to an IPython shell."""
    shell.register_magics(CudaMagics(shell))
