"""Profile places that are less than a device: the SM partitions of a split, each alone and beside a busy neighbour.

Two partitions share no SM, but they share the memory. So a decode step takes longer while the other partition computes
a prompt, and that time, not the one of a quiet card, is what a router needs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from nanopd.costmodel.features import StepPoint
from nanopd.costmodel.hardware_profile import BUSY
from nanopd.costmodel.profiler import measure_place
from nanopd.costmodel.step_timer import StepTimer
from nanopd.costmodel.sweep import CPU_QUICK, GPU_QUICK, Setup, Sizes
from nanopd.errors import ConfigError
from nanopd.workers.affinity import usable_cores
from nanopd.workers.build import gpu_sms
from nanopd.workers.spec import DeviceSpec, check_specs
from nanopd.workers.worker import Role, Worker

if TYPE_CHECKING:
    import torch

    from nanopd.engine.llm import LLM
    from nanopd.transfer.report import LinkReport
    from nanopd.workers.cluster import Cluster

_PHASES = {Role.PREFILL: ("prefill",), Role.DECODE: ("decode",), Role.COLLOCATED: ("prefill", "decode")}


def measure_cluster(
    cluster: Cluster,
    *,
    busy: bool = True,
    sizes: Sizes | None = None,
    seed: int = 0,
    use_tqdm: bool = True,
) -> list[StepPoint]:
    """Measure every worker alone, and with ``busy`` each beside the other: a prefill and a decode worker are a pair.

    The places are called "sm=84" (a worker's profile key, else its name), and "sm=84 beside a busy neighbour".

    Args:
        cluster: idle, its pools empty. Its prefix caches are empty afterwards.
        sizes: what to measure in each place; default some 50 points.

    Raises ConfigError if blocks are in use.
    """
    vocab_size = cluster.config.vocab_size
    points: list[StepPoint] = []
    for worker in cluster.workers:
        others = [other for other in cluster.workers if {other.role, worker.role} == {Role.PREFILL, Role.DECODE}]
        chosen = sizes or _default_sizes(worker)
        for neighbour in (None, *others[:1]) if busy else (None,):
            place = (worker.profile or worker.name) + (BUSY if neighbour else "")
            beside = keep_busy(neighbour, vocab_size) if neighbour else nullcontext()
            with worker.enter(), beside:
                points += measure_place(
                    worker.runner,
                    worker.scheduler.config,
                    worker.block_manager,
                    vocab_size=vocab_size,
                    place=place,
                    phases=_PHASES[worker.role],
                    sizes=chosen,
                    seed=seed,
                    use_tqdm=use_tqdm,
                )
    return points


@contextmanager
def keep_busy(worker: Worker, vocab_size: int) -> Iterator[None]:
    """Run ``worker``'s steps in a thread, one after the other: whole prompts, or a batch of decodes, by its role.

    The KV that they write is noise on noise, whoever has the blocks. Raises at the end what a step raised.
    """
    blocks, config = worker.block_manager, worker.scheduler.config
    on_gpu = worker.runner.device.type == "cuda"
    timer = StepTimer(
        worker.runner,
        config,
        blocks.num_blocks,
        blocks.block_size,
        vocab_size,
        replace(_default_sizes(worker), steps=8),
    )
    most, num_decodes = (2048, 32) if on_gpu else (64, 2)
    length = min(most, config.max_model_len - 2 * timer.sizes.rounds)
    if worker.role is Role.PREFILL:
        setup = Setup("busy", min(length, config.max_num_batched_tokens))
    else:
        room = blocks.num_blocks // (-(-length // blocks.block_size) + 2)  # in a small pool fewer must do
        setup = Setup("busy", num_decodes=max(1, min(num_decodes, config.max_num_seqs, room)), kv_len=length)
    stop, started = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with worker.enter():
                while not stop.is_set():
                    timer.series(setup)
                    started.set()
        except BaseException as error:
            failed.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name=f"busy {worker.name}", daemon=True)
    thread.start()
    try:
        started.wait()
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def measure_link(llm: LLM, destination: str | torch.device, *, path: str | None = None) -> LinkReport:
    """Probe the link that KV takes from ``llm``'s device to ``destination``, both ways, with the bytes compared.

    Raises ConfigError, or TransferError if no path works.
    """
    from nanopd.kv.cache import KVCache
    from nanopd.model.loader import resolve_device
    from nanopd.ops import get_ops
    from nanopd.transfer.probe import probe_link

    pool = llm.kv_cache
    there = KVCache.allocate(llm.config, 8, pool.block_size, pool.tensor.dtype, resolve_device(str(destination)))
    return probe_link(pool, there, llm.model.ops, get_ops(there.device), path=path)


def split_specs(device: torch.device, splits: Sequence[str]) -> list[tuple[DeviceSpec, DeviceSpec]]:
    """("cuda:0/sm=48", "cuda:0/sm=84") for the split "48/84": decode first.

    Raises ConfigError for other texts, for a device without SMs, and for more SMs than it has.
    """
    cuts = []
    for split in splits:
        parts = split.split("/")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ConfigError(f"a split is SMS_FOR_DECODE/SMS_FOR_PREFILL, such as 48/84, got {split!r}")
        name = f"cuda:{device.index or 0}" if device.type == "cuda" else str(device)
        decode, prefill = (DeviceSpec.parse(f"{name}/sm={part}") for part in parts)
        check_specs([decode, prefill], num_sms=gpu_sms(), cores=usable_cores())
        cuts.append((decode, prefill))
    return cuts


def _default_sizes(worker: Worker) -> Sizes:
    sizes = GPU_QUICK if worker.runner.device.type == "cuda" else CPU_QUICK
    return replace(sizes, random=16, held_out=24 if sizes is GPU_QUICK else 12)
