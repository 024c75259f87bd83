"""KVCache: the tensor whose blocks the block manager hands out."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from nanopd.errors import ConfigError
from nanopd.kv.fingerprint import LayoutFingerprint

__all__ = ["KVCache", "KVShape", "LayoutFingerprint", "block_bytes", "num_blocks_for"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class KVShape(Protocol):
    """The part of a model's config that decides how much KV a token takes (`nanopd.model.ModelConfig` has it)."""

    @property
    def name(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def block_bytes(config: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def num_blocks_for(num_bytes: int, config: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """How many whole blocks fit into ``num_bytes`` bytes. Raises ConfigError if not even one does."""
    per_block = block_bytes(config, block_size, dtype)
    if num_bytes < per_block:
        raise ConfigError(
            f"{num_bytes:,} bytes for KV do not hold one block: {config.name} takes {per_block:,} bytes per block of"
            f" {block_size} tokens in {_name(dtype)}"
        )
    return num_bytes // per_block


class KVCache:
    """KV of all layers in one tensor ``[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]``.

    Index 0 of the second dimension holds keys, 1 values. Slot ``s`` of the block manager is
    ``[:, :, s // block_size, s % block_size]``. One tensor, so that moving a block is a strided copy with
    ``2 * num_layers`` pieces, each contiguous.
    """

    def __init__(self, tensor: torch.Tensor, model: str) -> None:
        """Wrap ``tensor`` of the shape above; ``model`` is the name that goes into the fingerprint."""
        if tensor.dim() != 6 or tensor.shape[1] != 2 or not tensor.is_contiguous():
            raise ConfigError(
                "a KV cache is a contiguous tensor [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim],"
                f" got shape {list(tensor.shape)}"
            )
        self.tensor = tensor
        self.model = model

    @classmethod
    def allocate(
        cls,
        config: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        """Allocate a pool of zeros.

        Zeros, and not whatever the memory held: a kernel may multiply a masked slot by 0, and 0 * NaN is NaN.

        Raises ConfigError for a size below 1, a dtype that is no float, or a device without enough free memory.
        """
        device = torch.device(device)
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        if min(shape) < 1:
            raise ConfigError(f"every dimension of a KV cache must be at least 1, got {list(shape)}")
        if dtype not in DTYPES:
            raise ConfigError(f"KV dtype must be one of {', '.join(map(_name, DTYPES))}, got {_name(dtype)}")
        needed = num_blocks * block_bytes(config, block_size, dtype)
        free = free_memory(device)
        if free is not None and needed > free:
            raise ConfigError(_too_large(config, num_blocks, block_size, dtype, device, free))
        try:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError on the CPU
            if "memory" not in str(error):
                raise
            raise ConfigError(_too_large(config, num_blocks, block_size, dtype, device, free)) from error
        return cls(tensor, config.name)

    @property
    def num_layers(self) -> int:
        return self.tensor.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.tensor.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def bytes_per_block(self) -> int:
        """Over all layers, keys and values."""
        return self.tensor.numel() // self.num_blocks * self.tensor.element_size()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_cache, v_cache) of one layer, views ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
        return self._layers[index]

    @cached_property
    def _layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Made once: every step asks for the views of all layers, and each takes microseconds to make."""
        return [(layer[0], layer[1]) for layer in self.tensor]

    def fingerprint(self) -> LayoutFingerprint:
        num_layers, _, _, block_size, num_kv_heads, head_dim = self.tensor.shape
        return LayoutFingerprint(self.model, _name(self.dtype), block_size, num_layers, num_kv_heads, head_dim)


def free_memory(device: torch.device) -> int | None:
    """Bytes free on ``device``, memory that PyTorch caches for reuse included; None if the system does not tell."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    meminfo = Path("/proc/meminfo")
    if device.type == "cpu" and meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _too_large(
    config: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, free: int | None
) -> str:
    per_block = block_bytes(config, block_size, dtype)
    fits = "" if free is None else f"; {free / 1e9:.2f} GB are free, room for {free // per_block} blocks"
    return (
        f"a KV cache of {num_blocks} blocks of {block_size} tokens for {config.name} in {_name(dtype)} takes"
        f" {num_blocks * per_block / 1e9:.2f} GB on {device}{fits}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
