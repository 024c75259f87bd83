"""KV cache tensors: shape, sizes, layout fingerprint, refusals; and that the rest of the layer needs no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from nanopd.errors import ConfigError
from nanopd.kv import KVCache, block_bytes, num_blocks_for
from nanopd.kv.fingerprint import LayoutFingerprint


@dataclass(frozen=True)
class Shape:
    name: str = "test"
    num_layers: int = 3
    num_kv_heads: int = 2
    head_dim: int = 8


def test_shape_layers_and_bytes() -> None:
    cache = KVCache.allocate(Shape(), 5, 16, torch.float32, "cpu")
    assert list(cache.tensor.shape) == [3, 2, 5, 16, 2, 8]
    assert not cache.tensor.any()
    k, v = cache.layer(1)
    assert k.shape == v.shape == (5, 16, 2, 8)
    k.fill_(1.0)
    v.fill_(2.0)
    assert cache.tensor[1, 0].eq(1).all() and cache.tensor[1, 1].eq(2).all()
    assert not cache.tensor[[0, 2]].any(), "a layer's views reach into another layer"
    assert cache.bytes_per_block * cache.num_blocks == cache.tensor.nbytes
    assert (cache.num_layers, cache.num_blocks, cache.block_size) == (3, 5, 16)


def test_block_bytes_of_qwen3_8b() -> None:
    """DESIGN: 147,456 KV bytes per token in bf16."""
    qwen3_8b = Shape("qwen3-8b", num_layers=36, num_kv_heads=8, head_dim=128)
    assert block_bytes(qwen3_8b, 16, torch.bfloat16) == 16 * 147_456


def test_num_blocks_for_a_number_of_bytes() -> None:
    per_block = block_bytes(Shape(), 16, torch.float16)
    assert num_blocks_for(per_block * 7 + per_block - 1, Shape(), 16, torch.float16) == 7
    assert num_blocks_for(per_block, Shape(), 16, torch.float16) == 1
    with pytest.raises(ConfigError, match="do not hold one block"):
        num_blocks_for(per_block - 1, Shape(), 16, torch.float16)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 16)])
def test_sizes_below_one_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KVCache.allocate(Shape(), num_blocks, block_size, torch.float32, "cpu")


def test_a_dtype_that_is_no_float_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        KVCache.allocate(Shape(), 4, 16, torch.int8, "cpu")


def test_a_pool_that_does_not_fit_is_refused_with_what_would_fit() -> None:
    with pytest.raises(ConfigError, match=r"10000000000 blocks of 16 tokens for test in float32 takes .* GB"):
        KVCache.allocate(Shape(), 10**10, 16, torch.float32, "cpu")


def test_a_pool_that_the_allocator_refuses_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not tell how much is free, the allocation itself fails."""
    monkeypatch.setattr("nanopd.kv.cache.free_memory", lambda device: None)
    with pytest.raises(ConfigError, match=r"GB on cpu$"):
        KVCache.allocate(Shape(), 10**10, 16, torch.float32, "cpu")


def test_a_tensor_of_another_layout_is_refused() -> None:
    good = KVCache.allocate(Shape(), 4, 16, torch.float32, "cpu").tensor
    for bad in (good[0], good.transpose(2, 3), good[:, :1]):
        with pytest.raises(ConfigError, match="contiguous tensor"):
            KVCache(bad, "test")


def test_equal_layouts_have_equal_fingerprints_and_different_ones_say_where() -> None:
    one = KVCache.allocate(Shape(), 4, 16, torch.float32, "cpu").fingerprint()
    two = KVCache.allocate(Shape(), 9, 16, torch.float32, "cpu").fingerprint()
    assert one == two and one.differences(two) == []
    other = KVCache.allocate(Shape(), 4, 32, torch.float16, "cpu").fingerprint()
    assert one != other
    assert one.differences(other) == ["dtype: float32 and float16", "block_size: 16 and 32"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "b"),
        ("dtype", "float16"),
        ("block_size", 8),
        ("num_layers", 1),
        ("num_kv_heads", 1),
        ("head_dim", 4),
        ("order", "layer,key/value,head,block,slot,dim"),
    ],
)
def test_every_field_of_the_fingerprint_counts(field: str, value: object) -> None:
    one = LayoutFingerprint("a", "float32", 16, 3, 2, 8)
    assert len(one.differences(replace(one, **{field: value}))) == 1  # type: ignore[arg-type]


def test_all_but_the_tensors_works_without_torch() -> None:
    code = (
        "import sys\n"
        "from nanopd.kv import BlockManager, BlockTable, BlockLease, PrefixCache, LayoutFingerprint, PoolSnapshot\n"
        "import nanopd.kv.block_manager, nanopd.kv.fingerprint, nanopd.kv.integrity\n"
        "m = BlockManager(4, 4); t = BlockTable(); m.append_slots(t, 5); m.check_integrity([t])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
