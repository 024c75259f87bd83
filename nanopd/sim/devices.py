"""What is known of devices by their name: memory, and so KV blocks, and multiprocessors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanopd.costmodel.checks import is_number, shown
from nanopd.costmodel.hardware_profile import HardwareProfile
from nanopd.errors import ConfigError
from nanopd.model.presets import presets

# By the device name of a profile, from the vendors' data sheets.
MEMORY_GB: Mapping[str, float] = MappingProxyType(  # 1e9 bytes
    {"NVIDIA GeForce RTX 4090": 24.0, "NVIDIA H20": 96.0, "NVIDIA H100": 80.0, "NVIDIA H200": 141.0}
)
NUM_SMS: Mapping[str, int] = MappingProxyType(
    {"NVIDIA GeForce RTX 4090": 128, "NVIDIA H20": 78, "NVIDIA H100": 132, "NVIDIA H200": 132}
)
MOST_BLOCKS = 1 << 24  # of one pool, each an object here: 2^28 tokens at 16 a block, more than a run can fill
MOST_GB = 1e5  # of one device: more is a slip of the pen
UTILIZATION = 0.9  # as of ``Cluster.build``
_DTYPE_BYTES = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})


def device_blocks(profile: HardwareProfile, block_size: int, memory_gb: float | None = None) -> int:
    """Blocks of ``block_size`` tokens that one device of this kind can hold beside the weights.

    The number that the profile measured, if ``memory_gb`` is None and it has one. Raises ConfigError if the memory, or
    the weights of the profile's model, are not known, or if they leave no block.
    """
    if memory_gb is None and profile.num_blocks is not None and profile.block_size is not None:
        return profile.num_blocks * profile.block_size // block_size
    memory = memory_gb if memory_gb is not None else MEMORY_GB.get(profile.device)
    if memory_gb is not None and not (is_number(memory_gb) and 0 < memory_gb <= MOST_GB):
        raise ConfigError(f"memory_gb must be above 0 and at most {MOST_GB:,.0f}, got {shown(memory_gb)}")
    if memory is None:
        raise ConfigError(f"the memory of {profile.device!r} is not known: give num_blocks or memory_gb")
    shape = presets().get(profile.model.removeprefix("dummy:"))
    if shape is None:
        raise ConfigError(f"the weights of {profile.model!r} are not known: give num_blocks")
    weights = shape.weight_bytes(_DTYPE_BYTES.get(profile.dtype, 2))
    room = UTILIZATION * memory * 1e9 - weights
    blocks = int(room // (profile.kv_bytes_per_token * block_size))
    if blocks < 1:
        raise ConfigError(
            f"{memory:g} GB hold {weights / 1e9:.1f} GB of weights and no KV block: give a larger memory_gb"
        )
    return blocks
