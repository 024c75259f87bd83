"""Workers: where prefill and decode run, together or apart. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.workers.cluster import Cluster
    from nanopd.workers.partition import SmPartition, partition_device
    from nanopd.workers.spec import DeviceSpec, parse_devices
    from nanopd.workers.worker import CollocatedWorker, DecodeWorker, PrefillWorker, Role, Worker

_HOME = {
    "Cluster": "cluster",
    "CollocatedWorker": "worker",
    "DecodeWorker": "worker",
    "DeviceSpec": "spec",
    "PrefillWorker": "worker",
    "Role": "worker",
    "SmPartition": "partition",
    "Worker": "worker",
    "parse_devices": "spec",
    "partition_device": "partition",
}

__all__ = [
    "Cluster",
    "CollocatedWorker",
    "DecodeWorker",
    "DeviceSpec",
    "PrefillWorker",
    "Role",
    "SmPartition",
    "Worker",
    "parse_devices",
    "partition_device",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562), so that the policy can be used without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
