"""Kernels of csrc/ on the CPU: compiled by a C++ compiler, with cuda_on_cpu.h in the place of the GPU, bf16 only.

That shows whether a kernel's indices, masks and merges are right, where there is no GPU to ask. It does not show races,
copies that are waited for too late, nor what NVIDIA's compilers make of the source: tests/gpu does.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from nanopd.ops.compiler import csrc_dir

COMPILER = shutil.which("g++") if sys.platform == "linux" else None  # a Mac's is clang, and has no ucontext
HEADER = Path(__file__).with_name("cuda_on_cpu.h")

# Inline assembly by what stands in it, and what does the same here.
_ASSEMBLY = {
    "cvt.rn.bf16x2": "y = bf16_pair(lo, hi);",
    "cvt.rn.bf16.f32": "y.bits = bf16_bits(x);",
    "ex2.approx": "y = exp2f(x);",
    "movmatrix": "transposed = transpose_pairs(pair);",
    "ldmatrix.sync.aligned.m8n8.x4.trans": "load_four_matrices(r, address, true);",
    "ldmatrix": "load_four_matrices(r, address, false);",
    "cp.async.cg": "copy16(to_shared, from_global, valid);",
    "cp.async": ";",
    "griddepcontrol": ";",
    ".f32.bf16.bf16.f32": "multiply_add(c, a, b0, b1);",
    "f16": 'fail("fp16 is not done here");',
}
_TYPES = {"float": ctypes.c_float, "int": ctypes.c_int, "i64": ctypes.c_longlong}


class CpuKernel:
    """``kernel(grid, threads, *args)`` runs it; tensors are passed as addresses. A deadlock or a misaligned access ends
    the process, with a message.

    Args:
        name: of the kernel and its file.
        folder: where to compile.
        defines: macros, as for the GPU; SCALAR is bf16.
    """

    def __init__(self, name: str, folder: Path, **defines: object) -> None:
        sources = folder / "csrc"
        sources.mkdir(exist_ok=True)
        for file in _with_includes(f"{name}.cu"):
            (sources / file).write_text(_translated((csrc_dir() / file).read_text()))
        parameters = _parameters((csrc_dir() / f"{name}.cu").read_text(), name)
        self._types = [ctypes.c_void_p if "*" in declared else _TYPES[declared.split()[0]] for declared in parameters]
        names = ", ".join(re.findall(r"\w+$", declared)[0] for declared in parameters)
        program = f"""
            #include "{HEADER}"
            #include "{sources / name}.cu"
            extern "C" void run(unsigned x, unsigned y, unsigned z, int threads, {", ".join(parameters)}) {{
              body = [=] {{ {name}({names}); }};
              gridDim = {{x, y, z}};
              for (unsigned i = 0; i < x * y * z; ++i) {{
                blockIdx = {{i % x, i / x % y, i / x / y}};
                run_block(threads);
              }}
            }}"""
        library = folder / f"{name}-{'-'.join(map(str, defines.values()))}.so"
        options = [f"-D{key}={value}" for key, value in {"SCALAR": "bf16", **defines}.items()]
        command = [COMPILER, "-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", "-x", "c++", "-"]
        done = subprocess.run([*command, *options, "-o", library], input=program, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        self._run: Callable[..., None] = ctypes.CDLL(str(library)).run

    def __call__(self, grid: tuple[int, ...], threads: int, *args: torch.Tensor | int | float | None) -> None:
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        dims = (*grid, 1, 1)[:3]
        self._run(
            *map(ctypes.c_uint, dims), threads, *(kind(value) for kind, value in zip(self._types, values, strict=True))
        )


def _with_includes(file: str) -> set[str]:
    included = re.findall(r'#include "(.+)"', (csrc_dir() / file).read_text())
    return {file}.union(*map(_with_includes, included))


def _parameters(source: str, name: str) -> list[str]:
    """The kernel's parameters, each as it is declared, without comments."""
    inside = source.partition(f"{name}(")[2].partition(") {")[0]
    plain = re.sub(r"//.*|__restrict__|const ", "", inside)
    return [" ".join(declared.split()) for declared in plain.split(",")]


def _translated(source: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        return next(here for there, here in _ASSEMBLY.items() if there in match[0])

    source = re.sub(r'asm(?: volatile)?\((?:[^;"]|"[^"]*")*?\);', replacement, source)
    source = re.sub(r"extern __shared__ .*? shared\[\];", "unsigned char* shared = dynamic_shared;", source)
    return source.replace("__cvta_generic_to_shared(p)", "shared_offset(p)").replace('extern "C" __global__', "")
