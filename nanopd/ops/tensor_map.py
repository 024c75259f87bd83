"""Tensor maps: what Hopper's copy engine must know of a KV cache to bring parts of it to shared memory.

A map is 128 bytes that the driver encodes from an address, sizes and strides, and that a kernel takes as a parameter by
value. Encoding one takes a tenth of a millisecond, so maps are kept. They depend on where a cache lies and on its shape
alone, never on what is in it, and they keep no memory alive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanopd.ops.launch import ensure_context

_MOST_MAPS = 4096  # more than any model has layers; reached only where caches come and go


class _Address:
    """As much of a tensor as a map describes."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        layout = {"shape": shape, "typestr": "<u2", "strides": None, "version": 3}
        self.__cuda_array_interface__ = {**layout, "data": (address, False), "stream": None}


class CacheMaps:
    """Maps of KV caches [num_blocks, block_size, Hkv, D] of 16-bit values on the CUDA device ``index``.

    They cut a cache into boxes of neighbouring tokens, one head, 64 dimensions. In shared memory a token's 128 bytes
    are permuted in the way wgmma reads them; tokens and dimensions outside of the cache are zeros.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._maps: dict[tuple[object, ...], tuple[Any, Any]] = {}

    def get(self, k_cache: Tensor, v_cache: Tensor, box_tokens: int) -> tuple[Any, Any]:
        """The maps of both caches, which have one shape; parameters for a kernel that runs in the current context,
        or in the device's primary one if another device is current."""
        if torch.cuda.current_device() != self._index:  # the launch will switch to it, too
            with torch.cuda.device(self._index):
                return self.get(k_cache, v_cache, box_tokens)
        context = self._current_context()
        key = (context, k_cache.data_ptr(), v_cache.data_ptr(), k_cache.shape, box_tokens)
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            found = self._maps[key] = (_encode(k_cache, box_tokens), _encode(v_cache, box_tokens))
        return found

    def _current_context(self) -> int:
        from cuda.bindings import driver

        context = int(driver.cuCtxGetCurrent()[1])
        if context == 0:
            ensure_context(self._index)
            context = int(driver.cuCtxGetCurrent()[1])
        return context


def has_tensor_maps() -> bool:
    """Whether the installed cuda-core knows them."""
    try:
        from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle  # noqa: F401
    except ImportError:
        return False
    return True


def _encode(cache: Tensor, box_tokens: int) -> Any:
    from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    tokens = _Address(cache.data_ptr(), (num_blocks * block_size, num_kv_heads, head_dim))
    return StridedMemoryView.from_any_interface(tokens, stream_ptr=-1).as_tensor_map(
        (box_tokens, 1, 64), swizzle=TensorMapSwizzle.SWIZZLE_128B, l2_promotion=TensorMapL2Promotion.L2_256B
    )
