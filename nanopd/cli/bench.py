"""``nanopd bench-kernels`` and ``bench-engine``: run the benchmark of a layer, show it, write it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanopd.costmodel.files import check_writable, write_whole


def run_kernels(*, device: str | None, dtype: str | None, out: Path | None) -> None:
    """Every kernel against the ceilings of the device."""
    from nanopd.model.loader import resolve_device, resolve_dtype
    from nanopd.ops.benchmark import bench_kernels

    place = resolve_device(device)
    if out is not None:
        check_writable("--out", out)
    _finish("kernels", bench_kernels(place, resolve_dtype(dtype, place)), str(place), out)


def run_engine(*, model: str, device: str | None, dtype: str | None, out: Path | None) -> None:
    """Prefill and decode steps of the engine."""
    from nanopd.engine.benchmark import bench_engine
    from nanopd.model.loader import resolve_device, resolve_dtype

    place = resolve_device(device)
    if out is not None:
        check_writable("--out", out)
    _finish("engine", bench_engine(model, place, resolve_dtype(dtype, place)), str(place), out)


def _finish(title: str, values: Mapping[str, Any], device: str, out: Path | None) -> None:
    Console().print(table(title, values))
    if out is not None:
        from nanopd.ops.measure import environment

        record = {**environment(device, f"nanopd bench-{title}"), "values": values}
        write_whole(out, [json.dumps(record, indent=1), "\n"])
        print(f"written: {out}")


def table(title: str, values: Mapping[str, Any]) -> Table:
    """Nested results as rows "path  value": the same dotted paths that texts use to cite a result."""
    result = Table(title=title, box=None, title_justify="left", pad_edge=False)
    result.add_column("result")
    result.add_column("value", justify="right")
    for path, value in leaves(values):
        result.add_row(escape(path), f"{value:.4g}" if isinstance(value, float) else escape(str(value)))
    return result


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is no mapping and no list."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from leaves(value, f"{path}.{index}" if path else str(index))
    else:
        yield path, values
