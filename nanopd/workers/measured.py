"""What a frontier is measured on: decode states, chunks and splits, and clusters over pools of random KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nanopd.model.loader import LoadedModel
from nanopd.workers.affinity import usable_cores
from nanopd.workers.build import gpu_sms
from nanopd.workers.cluster import Cluster
from nanopd.workers.loads import default_window
from nanopd.workers.spec import DeviceSpec

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """What to measure.

    Attributes:
        states: (decodes, tokens of context of each).
        chunks: prompt tokens per step.
        splits: device specs of (decode worker, prefill worker).
        whole: device spec of a worker that has all of the device.
        prompt: tokens per prompt.
        seconds: of measuring per point; twice that for the points of a split, whose 99th percentile counts.
        warmup: steps before measuring.
        settle: seconds under load before a point with decodes and prefill is measured. A card that reaches its power
            limit lowers its clock too far, and then swings with less and less; a split's point says what that cost.
    """

    states: tuple[tuple[int, int], ...]
    chunks: tuple[int, ...]
    splits: tuple[tuple[str, str], ...]
    whole: str
    prompt: int
    seconds: float
    warmup: int = 3
    settle: float = 0.0

    @property
    def max_batch(self) -> int:
        return max(batch for batch, _ in self.states)

    @property
    def max_context(self) -> int:
        """The most that a decode reaches."""
        return max(context + default_window(context) // 2 + 2 for _, context in self.states)

    @property
    def num_blocks(self) -> int:
        """A pool for the largest state and some prompts, and 2 % for the scheduler's watermark."""
        decodes = max(
            batch * (-(-(context + default_window(context) // 2 + 2) // BLOCK_SIZE) + 1)
            for batch, context in self.states
        )
        return int(1.02 * (decodes + 4 * -(-self.prompt // BLOCK_SIZE))) + 16


def gpu_sizes(device: str = "cuda:0") -> Sizes:
    """Light and heavy KV; decode on about 5/8, a half, 3/8 and 5/16 of the SMs, prefill on the others."""
    total = gpu_sms()[device]
    counts = sorted({max(8, round(total * share / 8) * 8) for share in (0.606, 0.485, 0.364, 0.303)}, reverse=True)
    splits = tuple((f"{device}/sm={count}", f"{device}/sm={total - count}") for count in counts)
    return Sizes(
        states=((16, 1024), (64, 8192), (32, 24576)),
        chunks=(128, 256, 384, 512, 1024),
        splits=splits,
        whole=device,
        prompt=2048,
        seconds=1.4,
        settle=2.0,
    )


def cpu_sizes() -> Sizes:
    """A small model's worth: one state, two chunks, and the cores in two halves if there are two."""
    cores = sorted(usable_cores() or range(2))
    halves = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    specs = [str(DeviceSpec("cpu", cores=tuple(half))) for half in halves if half]
    return Sizes(
        states=((4, 128),),
        chunks=(16, 64),
        splits=((specs[0], specs[1]),) if len(specs) == 2 else (),
        whole=str(DeviceSpec("cpu", cores=tuple(cores))),
        prompt=64,
        seconds=1.5,
        warmup=1,
    )


@contextmanager
def measured_cluster(loaded: LoadedModel, sizes: Sizes, **roles: Any) -> Iterator[Cluster]:
    """Workers over one pool of random KV. The memory is given back at the end: the next pool needs it."""
    cluster = Cluster.build(
        loaded,
        **roles,
        shared_pool=True,
        num_blocks=sizes.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=sizes.max_batch + 4,
        max_num_batched_tokens=max(*sizes.chunks, sizes.prompt) + sizes.max_batch + 4,
        prefill_chunk=sizes.prompt,
        max_model_len=min(loaded.config.max_position_embeddings, max(sizes.max_context, sizes.prompt) + BLOCK_SIZE),
        enable_prefix_caching=False,
        graph_sizes=sorted({batch for batch, _ in sizes.states}),
        use_tqdm=False,
    )
    with cluster:
        cache = cluster.workers[0].runner.kv_cache.tensor
        for layer in range(cache.shape[0]):  # one at a time: a generator works in float32 internally
            cache[layer].normal_()
        if cache.is_cuda:
            torch.cuda.synchronize(cache.device)
        del cache
        yield cluster
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
