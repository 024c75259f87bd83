"""Measure steps on the engine's own path, and make a HardwareProfile of them.

A step is timed as it is served: ``Scheduler.schedule``, ``ModelRunner.launch``, the wait for its tokens and
``Scheduler.update``. Only its past is made up: the decodes are handed to the scheduler as if another worker had
computed their prompts, and the steps that lead a prompt to its middle are planned and booked but not run. What the KV
holds does not matter for the time; the pool is filled with noise, since zeros save power and flatter a GPU's clock.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from nanopd.costmodel.analytical_fit import fit_alpha, fit_beta, fit_gamma
from nanopd.costmodel.features import StepPoint
from nanopd.costmodel.hardware_profile import WHOLE, HardwareProfile
from nanopd.costmodel.quality import FitQuality
from nanopd.costmodel.step_fit import fit_step_time
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.costmodel.step_timer import StepTimer
from nanopd.costmodel.sweep import CPU, CPU_QUICK, GPU, GPU_QUICK, PHASES, Limits, Sizes, plan_sweep
from nanopd.engine.llm import LLM
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.runner import ModelRunner
from nanopd.errors import ConfigError
from nanopd.kv.block_manager import BlockManager
from nanopd.ops.measure import environment


def profile_device(
    llm: LLM,
    *,
    quick: bool = False,
    sizes: Sizes | None = None,
    link_gb_s: float | None = None,
    link: str | None = None,
    seed: int = 0,
    use_tqdm: bool = True,
    command: str | None = None,
) -> HardwareProfile:
    """Profile the device that ``llm`` runs on; ``quick`` measures fewer points.

    Args:
        llm: idle; its whole KV pool is used, so that its prefix cache is empty afterwards.
        sizes: what to measure, instead of the default for the device and ``quick``.
        link_gb_s, link: what ``nanopd.transfer`` measured on the path that transfers take; None if nothing moves.
        seed: of the random points.

    Raises:
        ConfigError: the engine has unfinished requests, or its limits leave nothing to measure.
        FitError: too few points for a fit.
    """
    points = measure_place(
        llm.runner,
        llm.scheduler.config,
        llm.block_manager,
        vocab_size=llm.config.vocab_size,
        quick=quick,
        sizes=sizes,
        seed=seed,
        use_tqdm=use_tqdm,
    )
    profile = profile_of(llm, points, command=command)
    return replace(profile, bandwidth_gb_s=link_gb_s, link=link)


def profile_of(llm: LLM, points: Sequence[StepPoint], command: str | None = None) -> HardwareProfile:
    """All fits on points that were measured on the whole device that ``llm`` runs on. See ``profile_device``."""
    alpha, beta, gamma = fit_alpha(points), fit_beta(points), fit_gamma(points)
    models, quality, marked = fit_places(points)
    device, dtype = llm.kv_cache.device, llm.kv_cache.tensor.dtype
    where = environment(device, command)
    return HardwareProfile(
        device=where["gpu"],
        model=llm.config.name,
        dtype=str(dtype).removeprefix("torch."),
        alpha_ms_per_token=alpha.alpha_ms_per_token,
        beta_ms=beta.beta_ms,
        gamma_ms_per_token=gamma.gamma_ms_per_token,
        batch_thresh=beta.batch_thresh,
        kv_bytes_per_token=llm.config.kv_bytes_per_token(dtype.itemsize),
        num_blocks=llm.block_manager.num_blocks,
        block_size=llm.block_manager.block_size,
        step_time=models,
        quality={"alpha": alpha.quality, "beta": beta.quality, "gamma": gamma.quality, **quality},
        points=marked,
        environment=where,
        source="measured by nanopd profile",
    )


def add_points(profile: HardwareProfile, points: Sequence[StepPoint]) -> HardwareProfile:
    """The profile with the points of other places, such as SM partitions, and their step-time models.

    Raises FitError for a place with too few points.
    """
    models, quality, marked = fit_places(points)
    return replace(
        profile,
        step_time={**profile.step_time, **models},
        quality={**profile.quality, **quality},
        points=(*(point for point in profile.points if point.place not in models), *marked),
    )


def fit_places(
    points: Iterable[StepPoint],
) -> tuple[dict[str, StepTimeModel], dict[str, FitQuality], tuple[StepPoint, ...]]:
    """A step-time model for each place among ``points``, its quality, and all points with the held-out ones marked."""
    by_place: dict[str, list[StepPoint]] = {}
    for point in points:
        by_place.setdefault(point.place, []).append(point)
    fits = {place: fit_step_time(group, name=f"step time on {place}") for place, group in by_place.items()}
    models = {place: fit.model for place, fit in fits.items()}
    quality = {place: fit.quality for place, fit in fits.items()}
    return models, quality, tuple(point for fit in fits.values() for point in fit.points)


def measure_place(
    runner: ModelRunner,
    config: SchedulerConfig,
    block_manager: BlockManager,
    *,
    vocab_size: int,
    place: str = WHOLE,
    phases: Sequence[str] = PHASES,
    quick: bool = False,
    sizes: Sizes | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    use_tqdm: bool = True,
) -> list[StepPoint]:
    """Measure the steps of one place: a whole device, or an SM partition with a runner of its own.

    Args:
        runner: runs the steps, on its own stream.
        config: limits of a step.
        block_manager: of the runner's pool; no block may be in use. It gives all of them away for the time of the
            measurement, and has an empty prefix cache afterwards.
        vocab_size: of the model; prompts are random.
        place: name that the points get.
        phases: "prefill", "decode" or both, by what the place is there for.
        sizes: what to measure, instead of the default for the device and ``quick``.
        clock: seconds.

    Raises ConfigError if blocks are in use, or the limits leave nothing to measure.
    """
    from tqdm.auto import tqdm

    on_gpu = runner.device.type == "cuda"
    sizes = sizes or ((GPU_QUICK if quick else GPU) if on_gpu else (CPU_QUICK if quick else CPU))
    pool_tokens = block_manager.num_blocks * block_manager.block_size
    limits = Limits(
        config.max_num_seqs, min(config.max_num_batched_tokens, pool_tokens), config.max_model_len, pool_tokens
    )
    setups = plan_sweep(sizes, limits, phases, seed)
    if not setups:
        raise ConfigError(f"nothing to measure on {place}: {phases} within {limits}")
    points = []
    with _whole_pool(runner, block_manager), _no_collection():
        timer = StepTimer(runner, config, block_manager.num_blocks, block_manager.block_size, vocab_size, sizes, clock)
        timer.measure(setups[0])  # compiles, captures, allocates
        for setup in tqdm(setups, f"Profiling {place}", unit="point", disable=not use_tqdm):
            features, ms = timer.measure(setup)
            points.append(StepPoint(features, ms, setup.kind, place, setup.held_out))
    return points


# --- inside ------------------------------------------------------------------------------------------------------


@contextmanager
def _whole_pool(runner: ModelRunner, manager: BlockManager) -> Iterator[None]:
    """Take every block from its manager, fill the pool with noise, and give the blocks back at the end."""
    if manager.num_free_blocks < manager.num_blocks:
        raise ConfigError(
            f"profiling takes the whole KV pool: {manager.num_blocks - manager.num_free_blocks} of its"
            f" {manager.num_blocks} blocks are in use, 0 may be"
        )
    table = manager.match_prefix(())
    manager.append_slots(table, manager.num_blocks * manager.block_size)  # cached prefixes are given up
    try:
        for layer in runner.kv_cache.tensor:
            # Not in place: a neighbour that is kept busy reads it meanwhile, and what normal_ passes through has NaNs.
            layer.copy_(torch.randn_like(layer))
        yield
    finally:
        manager.free(table)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection in the middle of a timed step."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
