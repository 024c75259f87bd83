"""Hardware of a strategy, and the check that strategies are compared on equal amounts of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nanopd.errors import ConfigError, UnequalHardwareError


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a strategy runs on: devices, and multiprocessors if they are known."""

    devices: tuple[str, ...]
    sms: int | None = None  # over all devices; None: unknown, or no GPU
    description: str = ""

    @property
    def num_gpus(self) -> int:
        """Devices; a CPU counts as one."""
        return len(self.devices)

    @classmethod
    def of_specs(cls, specs: Iterable[str], sms_per_device: int | None = None) -> Hardware:
        """From worker places such as "cuda:0/sm=84": workers on one device share it.

        ``sms_per_device`` is what a worker without ``sm=`` has. Two workers without it share the whole device, and
        partitions beside a whole device are parts of it.

        Raises ConfigError without specs, or for an ``sm=`` that is no number.
        """
        specs = list(specs)
        if not specs:
            raise ConfigError("a strategy needs at least one worker")
        partitions: dict[str, int] = {}
        whole: set[str] = set()
        for spec in specs:
            device, _, rest = str(spec).partition("/")
            options = dict(item.partition("=")[::2] for item in rest.split("/") if item)
            partitions.setdefault(device, 0)
            if "sm" not in options:
                whole.add(device)
            elif not options["sm"].isdigit():
                raise ConfigError(f"sm= of {spec!r} must be a number of multiprocessors")
            else:
                partitions[device] += int(options["sm"])
        known = all(device not in whole or sms_per_device is not None for device in partitions)
        sms = sum((sms_per_device or 0) if device in whole else partitions[device] for device in partitions)
        on_gpu = all(device.startswith("cuda") for device in partitions)
        return cls(tuple(sorted(partitions)), sms if known and on_gpu else None, ", ".join(specs))


def check_equal(hardware: Mapping[str, Hardware], allow_unequal: bool = False) -> str:
    """How strategies may be compared: "equal hardware", or with ``allow_unequal`` a label that says "per GPU".

    Raises UnequalHardwareError if GPU counts, or SM totals that are known, differ and that was not allowed.
    """
    gpus = {name: h.num_gpus for name, h in hardware.items()}
    sms = {name: h.sms for name, h in hardware.items() if h.sms is not None}
    differs = [f"{what}: {counts}" for what, counts in (("GPUs", gpus), ("SMs", sms)) if len(set(counts.values())) > 1]
    if not differs:
        return "equal hardware"
    if not allow_unequal:
        raise UnequalHardwareError(
            f"the strategies run on unequal hardware ({'; '.join(differs)}); give each the same, or allow it and"
            " compare per GPU"
        )
    return f"UNEQUAL hardware, compared per GPU ({'; '.join(differs)})"
