"""CUDA C++ to machine code at run time, through NVRTC and cuda.core.

NVRTC is a library that pip installs. It needs no nvcc, no host compiler and no GPU, and takes about 0.1 s for a kernel
of ours, so kernels are specialised by ``-D`` options for exactly the shapes in use, and a notebook cell can edit one
and run it at once. Results are cached on disk.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanopd.errors import CudaUnavailableError, KernelCompileError
from nanopd.ops.disk_cache import DiskCache
from nanopd.ops.launch import Kernel

__all__ = [
    "DEFAULT_ARCH",
    "CompiledSource",
    "Kernel",
    "KernelLibrary",
    "KernelUsage",
    "cache_dir",
    "compile_source",
    "compile_with_log",
    "csrc_dir",
    "define_options",
    "device_arch",
    "require_cuda_core",
]

DEFAULT_ARCH = "sm_80"  # what we compile for where there is no GPU to ask

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def cache_dir() -> Path:
    """Where compiled kernels and converted models are kept: ``$NANOPD_CACHE``, else ``~/.cache/nanopd``."""
    return Path(os.environ.get("NANOPD_CACHE") or "~/.cache/nanopd").expanduser()


def csrc_dir() -> Path:
    """The folder of .cu files: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


def install_command() -> str:
    """The pip command that installs cuda-core for torch's CUDA version."""
    major = (torch.version.cuda or "13").split(".")[0]
    return f"pip install 'cuda-core[cu{major}]'"


def require_cuda_core() -> Any:
    """Import cuda.core, or say how to install it.

    Raises:
        CudaUnavailableError: not installed (or, on macOS, not available at all).
    """
    try:
        import cuda.core
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the library behind the binding is loaded on first use
    except Exception as error:  # a missing NVRTC library surfaces as one of several exception types
        raise CudaUnavailableError(
            f"compiling CUDA kernels needs cuda-core and NVRTC ({type(error).__name__}: {error}). "
            f"Install them with: {install_command()}   (not available on macOS)"
        ) from error
    return cuda.core


def device_arch(device: torch.device) -> str:
    """``sm_XY`` of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@dataclass(frozen=True)
class KernelUsage:
    """What one kernel takes of an SM, as ptxas reports it."""

    registers: int  # per thread
    spill_bytes: int  # stored to local memory per thread because registers ran out
    shared_bytes: int  # static, per block

    def __str__(self) -> str:
        spills = f"{self.spill_bytes} bytes spilled" if self.spill_bytes else "no spills"
        return f"{self.registers} registers, {spills}, {self.shared_bytes} bytes of static shared memory"


@dataclass(frozen=True)
class CompiledSource:
    """Machine code and what the compiler said about it."""

    cubin: bytes
    log: str  # ptxas' report and any warnings
    arch: str

    def usage(self) -> dict[str, KernelUsage]:
        """Resource usage by kernel name. Names of kernels that are not ``extern "C"`` are mangled."""
        found = {}
        for part in self.log.split("Compiling entry function '")[1:]:
            registers, spilled, shared = (
                int(match.group(1)) if (match := re.search(pattern, part)) else 0
                for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem")
            )
            found[part.split("'", 1)[0]] = KernelUsage(registers, spilled, shared)
        return found


def compile_source(
    source: str,
    options: Sequence[str],
    arch: str,
    *,
    name: str = "kernel.cu",
    include: Sequence[Path | str] | None = None,
    cache: DiskCache | None = None,
) -> bytes:
    """Compile CUDA C++ to a cubin.

    Args:
        source: the text of one .cu file. Kernels should be ``extern "C"`` so that their names stay as written.
        options: ``-DNAME=VALUE``, ``-I folder``, ``--use_fast_math``, ``-lineinfo``, ``--maxrregcount=N``,
            ``-std=c++17``; each is split at spaces outside of quotes.
        arch: ``sm_80``, ``sm_90``, ``sm_90a``, ...
        name: how error messages call the source: ``name(line): error: ...``.
        include: folders searched for ``#include "..."``, before those of ``-I``; csrc by default.
        cache: where to look first; by default a folder in ``cache_dir()``.

    Raises:
        KernelCompileError: NVRTC refused the source or an option is unknown.
        CudaUnavailableError: cuda-core or NVRTC is not installed.
    """
    return compile_with_log(source, options, arch, name=name, include=include, cache=cache).cubin


def compile_with_log(
    source: str,
    options: Sequence[str],
    arch: str,
    *,
    name: str = "kernel.cu",
    include: Sequence[Path | str] | None = None,
    cache: DiskCache | None = None,
) -> CompiledSource:
    """``compile_source``, with the compiler's log beside the cubin."""
    core = require_cuda_core()
    cache = cache or DiskCache(cache_dir() / "kernels")
    folders = [str(folder) for folder in (include if include is not None else (csrc_dir(),))]
    arguments = _program_arguments(options)
    folders += arguments.pop("include_path", [])
    try:
        key = _cache_key(source, options, arch, name, folders)
    except UnicodeEncodeError as error:
        raise KernelCompileError(f"{name} is not valid Unicode text: {error}") from error
    found = cache.get(key)
    if found is not None:
        return CompiledSource(found[0], found[1], arch)
    log = io.StringIO()
    try:
        settings = core.ProgramOptions(name=name, arch=arch, include_path=folders, ptxas_options=["-v"], **arguments)
        cubin = bytes(core.Program(source, "c++", settings).compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core has several: NVRTCError, CUDAError, ValueError of an option
        raise KernelCompileError(f"{name} does not compile for {arch}:\n{_clean_log(str(error))}") from error
    cache.put(key, cubin, log.getvalue())
    return CompiledSource(cubin, log.getvalue(), arch)


def _clean_log(message: str) -> str:
    """NVRTC's own lines, without cuda.core's preamble."""
    return message.split("compilation log:", 1)[-1].replace("\x00", "").strip()


def _program_arguments(options: Sequence[str]) -> dict[str, Any]:
    """Command-line spellings to the fields of cuda.core's ProgramOptions."""
    macros: list[str | tuple[str, str]] = []
    result: dict[str, Any] = {}
    try:
        pending = [word for option in options for word in shlex.split(option)]
    except ValueError as error:
        raise KernelCompileError(f"cannot read the compiler options {list(options)}: {error}") from error
    while pending:
        word = pending.pop(0)
        if word in ("-D", "-I") and pending:
            word += pending.pop(0)
        flag, _, value = word.partition("=")
        if word.startswith("-D") and len(word) > 2:
            macro, has_value, text = word[2:].partition("=")
            macros.append((macro, text) if has_value else macro)
        elif word.startswith("-I") and len(word) > 2:
            result.setdefault("include_path", []).append(word[2:])
        elif flag.lstrip("-") == "use_fast_math":
            result["use_fast_math"] = True
        elif flag.lstrip("-") in ("lineinfo", "generate-line-info"):
            result["lineinfo"] = True
        elif flag.lstrip("-") == "maxrregcount" and value.isdigit():
            result["max_register_count"] = int(value)
        elif flag.lstrip("-") == "std" and value:
            result["std"] = value
        else:
            raise KernelCompileError(
                f"unknown compiler option {word!r}; known: -DNAME=VALUE, -Ifolder, --use_fast_math, -lineinfo, "
                "--maxrregcount=N, -std=c++17"
            )
    if macros:
        result["define_macro"] = macros
    return result


def _cache_key(source: str, options: Sequence[str], arch: str, name: str, folders: Sequence[str]) -> str:
    """Digest of everything that can change the result: source, the files it includes, options, arch, NVRTC."""
    from cuda.bindings import nvrtc

    digest = hashlib.sha256()
    for part in (str(nvrtc.nvrtcVersion()[1:]), arch, name, *options, source):
        digest.update(part.encode() + b"\0")
    seen: set[Path] = set()
    pending = [source]
    while pending:
        for header in _INCLUDE.findall(pending.pop()):
            path = next((Path(folder) / header for folder in folders if (Path(folder) / header).is_file()), None)
            if path is not None and path not in seen:
                seen.add(path)
                content = path.read_bytes()
                digest.update(header.encode() + b"\0" + content + b"\0")
                pending.append(content.decode(errors="replace"))
    return digest.hexdigest()


def define_options(defines: Mapping[str, object]) -> tuple[str, ...]:
    """``{"HEAD_DIM": 128}`` to ``("-DHEAD_DIM=128",)``; bool becomes 0 or 1. Quoted where the value has spaces."""
    return tuple(
        shlex.quote(f"-D{key}={int(value) if isinstance(value, bool) else value}") for key, value in defines.items()
    )


class KernelLibrary:
    """The compiled kernels of one device. Compiles on first use, then answers from memory.

    Args:
        device: a CUDA device.

    Raises:
        CudaUnavailableError: no such GPU, or cuda-core is missing.
    """

    def __init__(self, device: torch.device) -> None:
        device = torch.device(device)
        if device.type != "cuda" or not torch.cuda.is_available():
            raise CudaUnavailableError(f"a CUDA device is needed to load kernels, not {device}")
        self.device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self.arch = device_arch(self.device)
        require_cuda_core()
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def get(
        self,
        file: str,
        function: str,
        defines: Mapping[str, object],
        *,
        options: Sequence[str] = (),
        arch: str | None = None,
    ) -> Kernel:
        """The kernel ``function`` of ``csrc/file``, specialised by ``defines``.

        Args:
            file: name inside csrc, e.g. ``"store_kv.cu"``.
            function: name of an ``extern "C" __global__`` function in it.
            defines: macro name to value, e.g. ``{"HEAD_DIM": 128, "SCALAR": "bf16"}``.
            options: further compiler options.
            arch: compile for this instead of the device's arch, e.g. ``"sm_90a"`` for Hopper-only instructions.
        """
        key = (file, function, *defines.items(), tuple(options), arch)
        kernel = self._kernels.get(key)
        if kernel is None:
            source = (csrc_dir() / file).read_text(encoding="utf-8")
            kernel = self.load(source, function, (*define_options(defines), *options), name=file, arch=arch)
            self._kernels[key] = kernel
        return kernel

    def load(
        self,
        source: str,
        function: str,
        options: Sequence[str] = (),
        *,
        name: str = "kernel.cu",
        arch: str | None = None,
    ) -> Kernel:
        """Compile ``source`` and load its kernel ``function``; what ``get`` does, for text that is in no file."""
        compiled = compile_with_log(source, options, arch or self.arch, name=name)
        return Kernel(compiled.cubin, function, self.device)
