"""Timing, and writing down what was timed together with where and how."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nanopd.errors import ConfigError

Inputs = Sequence[Sequence[Any]]


def time_in_turn(
    device: torch.device | str,
    calls: Mapping[str, tuple[Callable[..., Any], Inputs]],
    *,
    graph: bool = True,
    samples: int = 15,
    sample_ms: float = 2.0,
) -> dict[str, float]:
    """Median time of one call of each function, in milliseconds, for times that are to be compared.

    The functions take turns, one timing of each per round: a GPU under load lowers its clock and a laptop's speed
    drifts, and of two functions timed one after the other the second would be measured on another machine.

    Args:
        device: CPU or CUDA device. On the latter calls are captured into CUDA graphs, which takes the time of Python
            out; ``graph=False`` leaves it in, and is needed for a function that waits for the device.
        calls: by name a function and sets of arguments. Calls rotate over these, so that with enough different ones
            caches do not help.
        samples: how many timings the median is taken of.
        sample_ms: a timing repeats the inputs until it takes about this long.

    Raises:
        ConfigError: a device of another kind, no inputs, fewer samples than one, or a ``sample_ms`` that is not finite.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device} cannot be timed: only a CPU or a CUDA device can")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ConfigError(f"samples must be an int >= 1, got {samples!r:.60}")
    if not math.isfinite(sample_ms) or sample_ms < 0:
        raise ConfigError(f"sample_ms must be a finite number of milliseconds >= 0, got {sample_ms!r:.60}")
    if empty := [name for name, (_, inputs) in calls.items() if not len(inputs)]:
        raise ConfigError(f"inputs must hold at least one set of arguments; {', '.join(map(repr, empty))} has none")
    if device.type != "cuda":
        return _rounds({name: _cpu_timer(fn, inputs, sample_ms) for name, (fn, inputs) in calls.items()}, samples)
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            timers = {name: _cuda_timer(fn, inputs, sample_ms, graph) for name, (fn, inputs) in calls.items()}
            times = _rounds(timers, samples)
        torch.cuda.current_stream().wait_stream(side)
    return times


def time_op(device: torch.device | str, fn: Callable[..., Any], inputs: Inputs = ((),), **options: Any) -> float:
    """``time_in_turn`` of one function alone: the median time of ``fn(*args)`` in milliseconds."""
    return time_in_turn(device, {"": (fn, inputs)}, **options)[""]


def _rounds(timers: Mapping[str, Callable[[], float]], samples: int) -> dict[str, float]:
    rounds = [{name: timer() for name, timer in timers.items()} for _ in range(samples)]
    return {name: statistics.median(times[name] for times in rounds) for name in timers}


def _cuda_timer(fn: Callable[..., Any], inputs: Inputs, sample_ms: float, graph: bool) -> Callable[[], float]:
    """What times some calls on the current stream, warmed up. It returns milliseconds per call."""
    for args in inputs:  # compiles, allocates, warms up
        fn(*args)
    first_ms = _between_events(lambda: [fn(*args) for args in inputs])
    rounds = max(1, min(50, math.ceil(sample_ms / max(first_ms, 1e-3))))

    def run() -> None:
        for _ in range(rounds):
            for args in inputs:
                fn(*args)

    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
            run()
        run = captured.replay
    run()
    return lambda: _between_events(run) / (rounds * len(inputs))


def _between_events(run: Callable[[], Any]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _cpu_timer(fn: Callable[..., Any], inputs: Inputs, sample_ms: float) -> Callable[[], float]:
    def round_ms() -> float:
        begin = time.perf_counter()
        for args in inputs:
            fn(*args)
        return (time.perf_counter() - begin) * 1e3

    round_ms()
    rounds = max(1, math.ceil(sample_ms / max(round_ms(), 1e-3)))
    return lambda: sum(round_ms() for _ in range(rounds)) / (rounds * len(inputs))


# --- records -------------------------------------------------------------------------------------------------------


def environment(device: torch.device | str, command: str | None = None) -> dict[str, str]:
    """What a measurement depends on: gpu (or CPU), driver, torch, cuda, python, commit, date, command."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({_cpu_name()})",
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if on_gpu
        else "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "commit": os.environ.get("NANOPD_COMMIT") or _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def results_dir() -> Path:
    """Where records go: ``$NANOPD_RESULTS``, else docs/results of the checkout, else that path below the cwd."""
    if os.environ.get("NANOPD_RESULTS"):
        return Path(os.environ["NANOPD_RESULTS"])
    checkout = Path(__file__).resolve().parents[2]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / "docs" / "results"


def gpu_slug(device: torch.device | str) -> str:
    """Folder name of a device: ``NVIDIA H200`` is ``nvidia-h200``; every CPU is ``cpu``."""
    device = torch.device(device)
    if device.type != "cuda":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def write_result(
    name: str,
    values: Mapping[str, Any],
    *,
    device: torch.device | str,
    command: str | None = None,
    folder: Path | None = None,
) -> Path:
    """Write ``<folder>/<gpu slug>/<name>.json``: the environment, and ``values`` under "values".

    Floats are rounded to five significant digits, which is more than any timing repeats to.

    Returns: the path written.
    """
    path = (folder or results_dir()) / gpu_slug(device) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**environment(device, command), "values": _rounded(values)}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def recorded(name: str, gpu: str = "nvidia-h200", *, folder: Path | None = None) -> dict[str, Any] | None:
    """The record ``<folder>/<gpu>/<name>.json`` as ``write_result`` left it, or None if nobody has measured it."""
    path = (folder or results_dir()) / gpu / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def _commit() -> str:
    folder = str(Path(__file__).resolve().parent)
    commit = _first_line("git", "-C", folder, "rev-parse", "--short=10", "HEAD")
    if commit == "unknown":
        return commit
    return commit + ("-dirty" if _first_line("git", "-C", folder, "status", "--porcelain", "-uno", default="") else "")


def _first_line(*command: str, default: str = "unknown") -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return default
    return (done.stdout.strip().splitlines() or [default])[0]
