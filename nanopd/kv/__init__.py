"""KV blocks: who holds which block of the pool (no torch), and the tensors that the blocks index (torch)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.kv.block_manager import BlockManager
    from nanopd.kv.block_table import BlockInfo, BlockLease, BlockTable, PoolSnapshot
    from nanopd.kv.cache import KVCache, block_bytes, num_blocks_for
    from nanopd.kv.fingerprint import LayoutFingerprint
    from nanopd.kv.prefix_cache import PrefixCache

_HOME = {
    "BlockInfo": "block_table",
    "BlockLease": "block_table",
    "BlockManager": "block_manager",
    "BlockTable": "block_table",
    "KVCache": "cache",
    "LayoutFingerprint": "fingerprint",
    "PoolSnapshot": "block_table",
    "PrefixCache": "prefix_cache",
    "block_bytes": "cache",
    "num_blocks_for": "cache",
}

__all__ = [
    "BlockInfo",
    "BlockLease",
    "BlockManager",
    "BlockTable",
    "KVCache",
    "LayoutFingerprint",
    "PoolSnapshot",
    "PrefixCache",
    "block_bytes",
    "num_blocks_for",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562), so that the block manager can be used without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
