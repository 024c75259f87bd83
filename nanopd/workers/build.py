"""What ``Cluster.build`` is made of: places, models, pools, workers and links, each built by one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nanopd.engine.kv_budget import kv_bytes, useful_blocks
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.runner import ModelRunner
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import ConfigError
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.cache import KVCache, block_bytes
from nanopd.model.loader import LoadedModel
from nanopd.model.transformer import Transformer
from nanopd.model.weights import Weights, allocate, checkpoint_slots
from nanopd.ops import get_ops
from nanopd.ops.interface import Ops
from nanopd.workers import affinity
from nanopd.workers.elastic import ElasticRunner, Occupancy
from nanopd.workers.partition import BlasHint, SmPartition, partition_device
from nanopd.workers.pools import Placement, Pool, devices
from nanopd.workers.process import ProcessRunner
from nanopd.workers.spec import DeviceSpec
from nanopd.workers.worker import CollocatedWorker, DecodeWorker, PrefillWorker, Role, Worker

if TYPE_CHECKING:
    from nanopd.transfer.link import Link

_CLASSES: Mapping[Role, type[Worker]] = {
    Role.COLLOCATED: CollocatedWorker,
    Role.PREFILL: PrefillWorker,
    Role.DECODE: DecodeWorker,
}


@dataclass(frozen=True)
class Limits:
    """What ``Cluster.build`` was told about steps, for the runners and schedulers it makes."""

    steps: SchedulerConfig
    prefill_chunk: int | None
    collocated_chunk: int | None
    enforce_eager: bool
    graph_sizes: Sequence[int] | None
    elastic: bool = False
    processes: bool = False

    def of(self, role: Role) -> SchedulerConfig:
        mixes = role is Role.COLLOCATED or (role is Role.DECODE and self.elastic)
        chunk = self.collocated_chunk if mixes else self.prefill_chunk
        return replace(self.steps, chunk_size=chunk)


@dataclass(frozen=True)
class Place:
    """What a worker gets of its device."""

    spec: DeviceSpec
    stream: torch.cuda.Stream | None  # None on the CPU
    partition: SmPartition | None

    @contextmanager
    def enter(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(affinity.apply(self.spec))
            if self.partition is not None:
                stack.enter_context(self.partition.enter())
            elif self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            yield


def make_places(where: Sequence[Placement], stack: ExitStack, blas_hint: BlasHint = "always") -> dict[str, Place]:
    """Partitions of one device come from one call, which is what makes them disjoint."""
    partitions: dict[str, SmPartition] = {}
    for device in devices(where):
        cut = [w for w in where if w.spec.device == device and w.spec.num_sms is not None]
        if cut:
            made = partition_device(
                device, [w.spec.num_sms for w in cut if w.spec.num_sms is not None], blas_hint=blas_hint
            )
            for worker, one in zip(cut, made, strict=True):
                stack.callback(one.close)
                partitions[worker.name] = one
    result = {}
    for worker in where:
        partition = partitions.get(worker.name)
        stream = torch.cuda.Stream(worker.spec.device) if worker.spec.is_cuda and partition is None else None
        result[worker.name] = Place(worker.spec, partition.stream if partition else stream, partition)
    return result


def make_worker(
    placement: Placement,
    place: Place,
    base: Transformer,
    cache: KVCache,
    manager: BlockManager,
    limits: Limits,
    occupancy: Occupancy,
    stack: ExitStack,
) -> Worker:
    """A worker over ``cache``. Elastic ones with a partition get a second runner, on the whole card.

    With ``limits.processes`` its runner is at work once ``capture_graphs`` returns.
    """
    role, partition = placement.role, place.partition
    make = partial(make_runner, base=base, cache=cache, limits=limits, role=role)
    runner: ModelRunner | ElasticRunner | ProcessRunner
    enter: Callable[[], AbstractContextManager[object]] = place.enter
    if limits.processes:
        limited = runner_options(base, cache, limits, role)
        runner = ProcessRunner(placement.name, placement.spec, base, cache, get_ops(base.device), limited)
    else:
        runner = make(place.stream, placement.spec.num_sms)
    if limits.elastic and partition is not None:
        alone = make(torch.cuda.Stream(base.device), None)
        runner = ElasticRunner(placement.name, alone, runner, occupancy, partition.enter)
        enter = partial(affinity.apply, place.spec)
    stack.callback(runner.close)
    options = {"takes_prompts": True} if limits.elastic and role is Role.DECODE else {}
    return _CLASSES[role](
        placement.name,
        Scheduler(limits.of(role), manager),
        runner,
        cache.fingerprint(),
        place=placement.spec.place,
        profile=None if placement.spec.num_sms is None else f"sm={placement.spec.num_sms}",
        enter=enter,
        **options,
    )


def make_runner(
    stream: torch.cuda.Stream | None,
    num_sms: int | None,
    *,
    base: Transformer,
    cache: KVCache,
    limits: Limits,
    role: Role,
) -> ModelRunner:
    """Ops of its own, since kernels keep scratch counters between launches; weights and pool may be shared."""
    ops = _ops(base.device, num_sms)
    model = Transformer(base.config, base.weights, ops)
    return ModelRunner(model, cache, ops, **runner_options(base, cache, limits, role), stream=stream)


def runner_options(base: Transformer, cache: KVCache, limits: Limits, role: Role) -> dict[str, Any]:
    """What a ``ModelRunner`` is told about its steps."""
    config = limits.of(role)
    return {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": min(config.max_num_batched_tokens, cache.num_blocks * cache.block_size),
        "max_model_len": config.max_model_len,
        "vocab_size": base.config.vocab_size,
        "enforce_eager": limits.enforce_eager or role is Role.PREFILL,  # it never takes a step of decodes alone
        "graph_sizes": limits.graph_sizes,
    }


def model_on(device: torch.device, loaded: LoadedModel) -> Transformer:
    """The loaded model, or a copy of it on another device."""
    model = loaded.model
    if device == model.device:
        return model
    weights: Weights = allocate(model.config, device, model.dtype)
    sources = checkpoint_slots(model.config, model.weights)
    for name, slot in checkpoint_slots(model.config, weights).items():
        slot.copy_(sources[name].cpu())  # by way of the host: a peer copy that is said to work can corrupt
    return Transformer(model.config, weights, get_ops(device))


def pool_sizes(
    pools: Sequence[Pool],
    models: Mapping[str, Transformer],
    limits: SchedulerConfig,
    block_size: int,
    gpu_memory_utilization: float,
) -> list[int]:
    """Blocks of each pool. Raises ConfigError if one would be empty."""
    num_workers = {device: sum(len(pool.members) for pool in pools if pool.device == device) for device in models}
    budgets = {
        device: kv_bytes(
            model, block_size, limits, gpu_memory_utilization=gpu_memory_utilization, num_workers=num_workers[device]
        )
        for device, model in models.items()
    }
    sizes = []
    for pool in pools:
        model = models[pool.device]
        per_block = block_bytes(model.config, block_size, model.dtype)
        fitting = int(budgets[pool.device] * pool.share) // per_block
        if fitting < 1:
            names = ", ".join(member.name for member in pool.members)
            raise ConfigError(
                f"{budgets[pool.device] / 1e9:.3f} GB for KV on {pool.device} leave {names} no block of"
                f" {per_block / 1e6:.2f} MB; use fewer workers or shared_pool=True"
            )
        sizes.append(min(fitting, useful_blocks(limits, block_size) * len(pool.members)))
    return sizes


def connect_workers(workers: Sequence[Worker], stack: ExitStack) -> dict[tuple[str, str], Link]:
    """A link from every prefill to every decode worker."""
    from nanopd.transfer import connect

    links = {}
    for source in workers:
        for destination in workers:
            if source.role is Role.PREFILL and destination.role is Role.DECODE:
                ends: list[Any] = [source.runner, destination.runner]
                caches, ops = [runner.kv_cache for runner in ends], [runner.ops for runner in ends]
                link = connect(*caches, *ops, source_stream=source.runner.stream)
                stack.callback(link.close)
                links[source.name, destination.name] = link
    return links


def _ops(device: torch.device, num_sms: int | None) -> Ops:
    if num_sms is None:
        return get_ops(device)
    from nanopd.ops.cuda import CudaOps

    return CudaOps(device, num_sms=num_sms)


def gpu_sms() -> dict[str, int]:
    """Device name -> SMs, for every GPU that torch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {f"cuda:{i}": torch.cuda.get_device_properties(i).multi_processor_count for i in range(count)}


def synchronize(device: str) -> None:
    """Wait for all work on a GPU; nothing to do on the CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
