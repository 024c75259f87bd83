"""Layouts: how many devices of a simulated cluster do what. A cluster with its counts still open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanopd.costmodel.checks import check_count, shown
from nanopd.costmodel.hardware_profile import HardwareProfile
from nanopd.errors import ConfigError
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.devices import NUM_SMS

MOST_DEVICES = 1024  # of one role: the links between them grow with the square


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices by what they do. ``split``: each prefill device is one with ``decode``, cut into (decode, prefill) SMs.

    Raises ConfigError if nobody serves, or one side of a disaggregated pair is missing.
    """

    collocated: int = 0
    prefill: int = 0
    decode: int = 0
    split: tuple[int, int] | None = None
    beside: bool = False  # collocated workers use the same cards as the partitions, and take turns with them

    def __post_init__(self) -> None:
        counts = (self.collocated, self.prefill, self.decode)
        for name, count in zip(("collocated", "prefill", "decode"), counts, strict=True):
            check_count(f"{name} devices of a layout", count, most=MOST_DEVICES)
        if not any(counts) or bool(self.prefill) != bool(self.decode):
            raise ConfigError(
                f"a layout needs collocated workers, or prefill and decode workers; got {self.collocated} collocated, "
                f"{self.prefill} prefill, {self.decode} decode"
            )
        if self.split is not None:
            if not isinstance(self.split, tuple) or len(self.split) != 2:
                raise ConfigError(f"a split is a pair of SM counts, (decode, prefill), got {shown(self.split)}")
            for sms in self.split:
                check_count("SMs of a split", sms, least=1)
        if self.split is not None and self.prefill != self.decode:
            raise ConfigError(
                f"a split card has one prefill and one decode worker, got {self.prefill} and {self.decode}"
            )
        if self.beside and (self.split is None or self.collocated != self.prefill):
            raise ConfigError("collocated workers beside partitions need a split, and one of them on each card")

    @property
    def num_devices(self) -> int:
        if self.split is None:
            return self.collocated + self.prefill + self.decode
        return self.prefill if self.beside else self.collocated + self.prefill

    def __str__(self) -> str:
        parts = [f"{self.collocated} collocated"] if self.collocated else []
        if self.split is not None:
            parts.append(f"{self.prefill} x SMs {self.split[0]} decode/{self.split[1]} prefill")
        elif self.prefill:
            parts.append(f"{self.prefill} prefill : {self.decode} decode")
        return " + ".join(parts)

    def on(self, cluster: SimulatedCluster) -> SimulatedCluster:
        """``cluster`` with these workers, on devices numbered from 0."""
        first = 0 if self.beside else self.collocated
        collocated = [f"cuda:{i}" for i in range(self.collocated)]
        if self.split is None:
            prefill = [f"cuda:{first + i}" for i in range(self.prefill)]
            decode = [f"cuda:{first + self.prefill + i}" for i in range(self.decode)]
        else:
            prefill = [f"cuda:{first + i}/sm={self.split[1]}" for i in range(self.prefill)]
            decode = [f"cuda:{first + i}/sm={self.split[0]}" for i in range(self.decode)]
        return replace(cluster, collocated=collocated, prefill=prefill, decode=decode)


def ratios(num_devices: int) -> Iterator[Layout]:
    """Collocated on all devices, then every prefill : decode ratio. Raises ConfigError below one device."""
    check_count("devices to search layouts of", num_devices, least=1, most=MOST_DEVICES)
    yield Layout(collocated=num_devices)
    for prefill in range(1, num_devices):
        yield Layout(prefill=prefill, decode=num_devices - prefill)


def splits(profile: HardwareProfile, num_devices: int = 1, num_sms: int | None = None) -> Iterator[Layout]:
    """Every pair of partitions that the profile measured and that use as much of a card as it allows.

    Raises ConfigError if the card's number of SMs is not known.
    """
    sizes = sorted(int(place[3:]) for place in profile.step_time if place[:3] == "sm=" and place[3:].isdecimal())
    total = NUM_SMS.get(profile.device) if num_sms is None else num_sms
    if sizes and total is None:
        raise ConfigError(f"the number of SMs of {profile.device!r} is not known: give num_sms")
    for decode in sizes:
        fitting = [size for size in sizes if total is not None and decode + size <= total]
        if fitting:
            yield Layout(prefill=num_devices, decode=num_devices, split=(decode, fitting[-1]))
