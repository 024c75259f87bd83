"""Moving weights and KV to memory that another process can open."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from nanopd.errors import ConfigError
from nanopd.model.weights import LayerWeights, Weights


def share(weights: Weights, pool: torch.Tensor) -> None:
    """Move what lies on the CPU to shared memory, in place: views of it stay views of it.

    Nothing happens to what is there already, or on a GPU, whose memory torch shares as it is. There is no file to
    clean up: on Linux torch removes its name at once, and the memory goes with the last process that has it open.

    Raises ConfigError if shared memory is too small.
    """
    for tensor in (pool, *_tensors(weights)):
        try:
            tensor.share_memory_()
        except RuntimeError as error:
            raise ConfigError(
                f"{tensor.nbytes / 1e6:.1f} MB of weights or KV do not fit into shared memory: {error}; enlarge it"
                " (/dev/shm; docker run --shm-size), use fewer blocks, or leave processes out"
            ) from error


def _tensors(weights: Weights) -> Iterator[torch.Tensor]:
    parts: list[Weights | LayerWeights] = [weights, *weights.layers]
    for part in parts:
        for item in dataclasses.fields(part):
            value = getattr(part, item.name)
            if isinstance(value, torch.Tensor):
                yield value
