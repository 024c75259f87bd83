"""Hardware of a strategy, and the check that strategies are compared on equal amounts of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nanopd.costmodel.checks import shown
from nanopd.errors import ConfigError, UnequalHardwareError
from nanopd.workers.affinity import usable_cores
from nanopd.workers.spec import DeviceSpec


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a strategy runs on: devices, and the multiprocessors and CPU cores if they are known."""

    devices: tuple[str, ...]
    sms: int | None = None  # over all devices; None: unknown, or no GPU
    description: str = ""
    cores: int | None = None  # of the CPU, that its workers use in all; None: unknown, or no CPU

    @property
    def num_gpus(self) -> int:
        """Devices; a CPU counts as one."""
        return len(self.devices)

    @classmethod
    def of_specs(
        cls, specs: Iterable[str | DeviceSpec], sms_per_device: int | None = None, all_cores: int | None = None
    ) -> Hardware:
        """From worker places such as "cuda:0/sm=84": workers on one device share it.

        ``sms_per_device`` is what a worker without ``sm=`` has. Two workers without it share the whole device, and
        partitions beside a whole device are parts of it. ``all_cores`` is what a worker on the CPU without ``cores=``
        has; None: as many as this process may use.

        Raises ConfigError without specs, or for one that is none.
        """
        if isinstance(specs, str) or not isinstance(specs, Iterable):
            raise ConfigError(f"the places of a strategy are a list, got {shown(specs)}")
        places = [DeviceSpec.parse(spec) for spec in specs]
        if not places:
            raise ConfigError("a strategy needs at least one worker")
        sms: dict[str, int | None] = {}  # by device; None: unknown
        for device in dict.fromkeys(place.device for place in places):
            shares = [place.num_sms for place in places if place.device == device]
            sms[device] = sms_per_device if None in shares else sum(share for share in shares if share is not None)
        known = all(place.is_cuda for place in places) and None not in sms.values()
        total = sum(count or 0 for count in sms.values())
        cores = _cores([place for place in places if not place.is_cuda], all_cores)
        return cls(tuple(sorted(sms)), total if known else None, ", ".join(map(str, places)), cores)


def _cores(places: list[DeviceSpec], all_cores: int | None) -> int | None:
    """How many cores workers at these places of the CPU use together; None without places."""
    if not places:
        return None
    if any(place.cores is None for place in places):
        return all_cores or len(usable_cores() or ()) or os.cpu_count()
    return len({core for place in places for core in place.cores or ()})


def device_word(hardware: Iterable[Hardware]) -> str:
    """What rates are divided by: "GPU", or "device" if a CPU is among them."""
    return "GPU" if all(device.startswith("cuda") for h in hardware for device in h.devices) else "device"


def check_equal(hardware: Mapping[str, Hardware], allow_unequal: bool = False) -> str:
    """How strategies may be compared: "equal hardware", or with ``allow_unequal`` a label that says per what.

    Raises UnequalHardwareError if device counts, or totals of SMs or CPU cores that are known, differ and that was not
    allowed.
    """
    word = device_word(hardware.values())
    totals = {
        f"{word}s": {name: h.num_gpus for name, h in hardware.items()},
        "SMs": {name: h.sms for name, h in hardware.items() if h.sms is not None},
        "CPU cores": {name: h.cores for name, h in hardware.items() if h.cores is not None},
    }
    differs = [f"{what}: {counts}" for what, counts in totals.items() if len(set(counts.values())) > 1]
    if not differs:
        return "equal hardware"
    if not allow_unequal:
        raise UnequalHardwareError(
            f"the strategies run on unequal hardware ({'; '.join(differs)}); give each the same, or allow it and"
            f" compare per {word}"
        )
    return f"UNEQUAL hardware, compared per {word} ({'; '.join(differs)})"
