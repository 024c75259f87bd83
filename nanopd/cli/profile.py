"""``nanopd profile``: measure this device with this model, show the fits, write the profile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanopd.costmodel.files import check_writable

if TYPE_CHECKING:
    import torch

    from nanopd.costmodel.hardware_profile import HardwareProfile
    from nanopd.workers.spec import DeviceSpec


def run_profile(
    *,
    model: str,
    device: str | None,
    dtype: str | None,
    out: Path,
    quick: bool,
    link_to: str | None = None,
    splits: Sequence[str] = (),
) -> None:
    """Measure and write. Raises NanoPDError, before the measurement if ``out`` cannot be written."""
    from nanopd.costmodel.places import split_specs
    from nanopd.model.loader import resolve_device

    place = resolve_device(device)
    cuts = split_specs(place, splits)
    check_writable("--out", out)
    profile = measure(model, place, dtype, quick=quick, link_to=link_to, cuts=cuts)
    profile.save(out)
    show(profile)
    print(f"written: {out}")


def measure(
    model: str,
    device: torch.device,
    dtype: str | None,
    *,
    quick: bool,
    link_to: str | None,
    cuts: Sequence[tuple[DeviceSpec, DeviceSpec]],
) -> HardwareProfile:
    """The whole device, then the partitions of each cut (decode, prefill)."""
    from nanopd.costmodel.places import measure_cluster, measure_link
    from nanopd.costmodel.profiler import add_points, profile_device
    from nanopd.engine.llm import LLM
    from nanopd.model.loader import load_model
    from nanopd.workers.cluster import Cluster

    loaded = load_model(model, device=device, dtype=dtype)
    on_gpu = device.type == "cuda"
    # On a CPU a step of 2,048 tokens takes seconds, and nobody serves 256 sequences.
    max_num_seqs, max_num_batched_tokens = (256, 2048) if on_gpu else (32, 512)
    command = f"nanopd profile --model {model}"
    with LLM(loaded, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens) as llm:
        link = measure_link(llm, link_to) if link_to else None
        profile = profile_device(
            llm, quick=quick, link_gb_s=link.gb_s if link else None, link=link.path if link else None, command=command
        )
    for decode, prefill in cuts:
        with Cluster.build(
            loaded,
            decode=[decode],
            prefill=[prefill],
            num_blocks=profile.num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ) as cluster:
            profile = add_points(profile, measure_cluster(cluster))
    return profile


def show(profile: HardwareProfile, console: Console | None = None) -> None:
    """The numbers as tables; warnings go to standard error, so that they are seen when the output is kept."""
    console = console or Console()
    console.print(seed_table(profile))
    for place in profile.step_time:
        console.print(step_time_table(profile, place))
    for warning in profile.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def seed_table(profile: HardwareProfile) -> Table:
    """α, β, γ and the bandwidth, with how good each fit is."""
    table = Table(
        title=escape(f"{profile.model} ({profile.dtype}) on {profile.device}"),
        box=None,
        title_justify="left",
        pad_edge=False,
    )
    for name in ("analytical model", "value", "unit", "R²", "median error"):
        table.add_column(name, justify="left" if name in ("analytical model", "unit") else "right")
    rows = (
        ("alpha: prefill", profile.alpha_ms_per_token, "ms/token", "alpha"),
        ("beta: decode step", profile.beta_ms, "ms", "beta"),
        ("batch_thresh", profile.batch_thresh, "sequences", "beta"),
        ("gamma: interference", profile.gamma_ms_per_token, "ms/token", "gamma"),
    )
    for name, value, unit, key in rows:
        quality = profile.quality.get(key)
        r2 = "" if quality is None or quality.r2 is None else f"{quality.r2:.3f}"
        table.add_row(name, f"{value:.5g}", unit, r2, "" if quality is None else f"{quality.median_error:.1%}")
    bandwidth, link = profile.bandwidth_gb_s, escape(profile.link or "")
    table.add_row("bandwidth", "none" if bandwidth is None else f"{bandwidth:.4g}", "GB/s", "", link)
    table.add_row("KV", f"{profile.kv_bytes_per_token:,}", "bytes/token", "", "")
    return table


def step_time_table(profile: HardwareProfile, place: str) -> Table:
    """Coefficients of one place's step-time model, and its errors."""
    table = Table(title=escape(f"step time on {place}"), box=None, title_justify="left", pad_edge=False)
    table.add_column("coefficient")
    table.add_column("value", justify="right")
    for name, value in profile.step_time[place].as_dict().items():
        table.add_row(name, f"{value:.4g}")
    quality = profile.quality.get(place)
    if quality is not None:
        table.add_row("median error", f"{quality.median_error:.1%}")
        table.add_row("p90 error", f"{quality.p90_error:.1%}")
        table.add_row("held-out points", str(quality.num_held_out))
    return table
