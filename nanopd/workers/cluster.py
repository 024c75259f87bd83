"""Cluster: the workers of one host, built. Weights, pools, streams, partitions, graphs, and links between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, get_args

import torch

from nanopd.engine.heap import settle_heap, thaw_heap
from nanopd.engine.options import check_options, is_int, model_len
from nanopd.engine.plan import SchedulerConfig
from nanopd.errors import ConfigError
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.cache import KVCache
from nanopd.model.config import ModelConfig
from nanopd.model.loader import LoadedModel, load_model
from nanopd.model.tokenizer import Tokenizer
from nanopd.workers import affinity, build
from nanopd.workers.elastic import Occupancy
from nanopd.workers.partition import BlasHint
from nanopd.workers.pools import devices, placements, plan_pools
from nanopd.workers.process import check_processes
from nanopd.workers.spec import DeviceSpec, check_specs
from nanopd.workers.worker import Role, Worker

if TYPE_CHECKING:
    from nanopd.transfer.link import Link


class Cluster:
    """Workers of every role on the devices of this machine, and a link from each prefill to each decode worker.

    Attributes:
        workers: in the order collocated, prefill, decode. Each has a runner on a stream of its own.
        links: (source name, destination name) -> Link.
        config, tokenizer: of the model; the tokenizer is None for random weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        workers: list[Worker],
        links: dict[tuple[str, str], Link],
        resources: ExitStack,
    ) -> None:
        """``resources``: what ``close`` closes, see ``build``."""
        self.config = config
        self.tokenizer = tokenizer
        self.workers = workers
        self.links = links
        self._resources = resources
        self.closed = False

    @classmethod
    def build(
        cls,
        model: str | LoadedModel,
        *,
        collocated: Sequence[str | DeviceSpec] = (),
        prefill: Sequence[str | DeviceSpec] = (),
        decode: Sequence[str | DeviceSpec] = (),
        shared_pool: bool | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        prefill_chunk: int | None = None,
        collocated_chunk: int | None = None,
        elastic: bool = False,
        processes: bool = False,
        blas_hint: BlasHint = "always",
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        graph_sizes: Sequence[int] | None = None,
        gpu_memory_utilization: float = 0.9,
        dtype: torch.dtype | str | None = None,
        use_tqdm: bool = True,
    ) -> Cluster:
        """Load the weights once per device, cut partitions, allocate pools, capture graphs, connect the workers.

        Args:
            model: a name for ``load_model``, or a loaded model: its weights serve the workers on its device, and are
                copied to others.
            collocated, prefill, decode: where the workers run, such as ``["cuda:0/sm=84"]``.
            shared_pool: one KV pool, and one ``BlockManager``, for all workers of a device, so that a handoff copies
                nothing. False: each worker has its own. None: shared if all prefill and decode workers sit on one
                device.
            num_blocks: of every pool. None: by memory, all pools of a device together as ``kv_bytes`` says, divided
                in parts of 1 for each prefill worker and 3 for each other one, and no more than its workers can use.
            prefill_chunk, collocated_chunk: prompt tokens per step of workers that decode nothing, and of those that
                mix both; None leaves it to ``max_num_batched_tokens``.
            elastic: workers with an SM partition have the whole card while nobody else of it computes, and decode
                workers also take prompts (requests that are routed to be collocated), chunks beside their decodes.
            processes: a process of its own prepares and runs each worker's steps, while all books stay here. Weights
                and pools are shared with it, for which those on the CPU, a loaded model's included, are moved to
                shared memory. No SM partitions, not elastic, no streaming of layers. A process imports torch when it
                starts, and the script that calls this, which must do so under ``if __name__ == "__main__":``.
            blas_hint: which partitions' sizes cuBLAS is told: "always", "groups" (multiples of 8 SMs) or "never".
            graph_sizes, gpu_memory_utilization, others: as for ``LLM``.

        Raises:
            ConfigError, ModelLoadError, CudaUnavailableError: see the message. Nothing stays allocated then.
            WorkerFailedError: a process did not start.
        """
        check_options(
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
            elastic=elastic,
            processes=processes,
            use_tqdm=use_tqdm,
        )
        _check_numbers(graph_sizes, gpu_memory_utilization, max_num_seqs)
        if blas_hint not in get_args(BlasHint):
            raise ConfigError(f"blas_hint must be one of {', '.join(get_args(BlasHint))}, got {blas_hint!r}")
        where = placements(collocated, prefill, decode)
        if processes:
            check_processes([w.spec for w in where], elastic)
        pools = plan_pools(where, shared_pool)
        check_specs([w.spec for w in where], num_sms=build.gpu_sms(), cores=affinity.usable_cores())
        loaded = load_model(model, device=devices(where)[0], dtype=dtype) if isinstance(model, str) else model
        if not isinstance(loaded, LoadedModel):
            raise ConfigError(f"a model is a name or a LoadedModel, got {model!r:.80}")
        steps = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=model_len(loaded.config, max_model_len),
        )
        limits = build.Limits(steps, prefill_chunk, collocated_chunk, enforce_eager, graph_sizes, elastic, processes)
        for role in Role:
            limits.of(role)  # what no worker needs must make sense too
        with ExitStack() as stack:
            models = {device: build.model_on(torch.device(device), loaded) for device in devices(where)}
            on_gpu = any(w.spec.is_cuda for w in where)
            if on_gpu:
                thaw_heap()
            places = build.make_places(where, stack, blas_hint)
            sizes = (
                [num_blocks] * len(pools)
                if num_blocks
                else build.pool_sizes(pools, models, limits.steps, block_size, gpu_memory_utilization)
            )
            occupancies = {device: Occupancy() for device in devices(where)}
            built: dict[str, Worker] = {}
            for pool, size in zip(pools, sizes, strict=True):
                base = models[pool.device]
                cache = KVCache.allocate(base.config, size, block_size, base.dtype, base.device)
                manager = BlockManager(size, block_size, enable_prefix_caching=enable_prefix_caching)
                build.synchronize(pool.device)  # the workers' streams do not wait for the one that wrote these
                for member in pool.members:
                    place = places[member.name]
                    built[member.name] = build.make_worker(
                        member, place, base, cache, manager, limits, occupancies[pool.device], stack
                    )
            workers = [built[w.name] for w in where]
            for worker in workers:
                with worker.enter():
                    worker.runner.capture_graphs(use_tqdm=use_tqdm)
            links = build.connect_workers(workers, stack)
            for device in devices(where):
                stack.callback(build.synchronize, device)  # the first to be called: nothing may be in use then
            if on_gpu:
                settle_heap()
            return cls(loaded.config, loaded.tokenizer, workers, links, stack.pop_all())

    def worker(self, name: str) -> Worker:
        """By name. Raises ConfigError if there is none."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise ConfigError(f"no worker {name!r}; there are {', '.join(w.name for w in self.workers)}")

    def describe(self) -> str:
        """A table: each worker with its place, its pool, and its links with their path and measured GB/s."""
        pools = list(dict.fromkeys(id(w.block_manager) for w in self.workers))
        rows = [("worker", "place", "pool", "blocks", "tokens", "links")]
        for worker in self.workers:
            blocks = worker.block_manager
            links = [
                f"{_described(link)} to {to}" for (source, to), link in self.links.items() if source == worker.name
            ]
            pool = pools.index(id(blocks))
            tokens = f"{blocks.num_blocks * blocks.block_size:,}"
            rows.append((worker.name, worker.place, str(pool), f"{blocks.num_blocks:,}", tokens, "; ".join(links)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)

    def close(self) -> None:
        """Close links, runners and partitions and let go of weights and pools. No step may run any more. Idempotent."""
        self.closed = True
        self._resources.close()
        self.links.clear()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _check_numbers(graph_sizes: Any, gpu_memory_utilization: Any, max_num_seqs: Any) -> None:
    """Raises ConfigError for what a device without CUDA graphs, or a pool of a given size, would never look at."""
    share = gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {share!r:.60}")
    if graph_sizes is None:
        return
    if isinstance(graph_sizes, str) or not isinstance(graph_sizes, Sequence) or not graph_sizes:
        raise ConfigError(f"graph_sizes must be a list of batch sizes or None, got {graph_sizes!r:.60}")
    for size in graph_sizes:
        if not is_int(size) or size < 1 or (is_int(max_num_seqs) and size > max_num_seqs):
            raise ConfigError(f"graph_sizes must be ints in [1, max_num_seqs = {max_num_seqs}], got {size!r:.60}")


def _described(link: Link) -> str:
    report = link.report
    return link.path if report is None or not report.gb_s else f"{link.path} at {report.gb_s:.0f} GB/s"
