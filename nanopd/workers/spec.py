"""DeviceSpec: where a worker runs, as a user writes it. No torch, and nothing here asks the machine.

``cuda:0/sm=84``  84 multiprocessors of the first GPU      ``cpu``             the CPU, wherever the system puts it
``cuda:1``        all of the second GPU                    ``cpu/cores=0-3+6`` cores 0, 1, 2, 3 and 6
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nanopd.errors import ConfigError

_FORMS = "use cpu, cpu/cores=0-3+6, cuda:1 or cuda:0/sm=84"
_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?")
_MOST_CORES = 4096  # of one spec: "0-999999999" is a slip of the pen


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device, or a share of one.

    Attributes:
        device: "cpu" or "cuda:N".
        num_sms: multiprocessors of the GPU that are the worker's alone; None means all, shared with whoever is there.
        cores: CPU cores that the worker's thread is bound to, ascending; None binds it to none.

    Raises ConfigError, which names the value and what is allowed.
    """

    device: str
    num_sms: int | None = None
    cores: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        match = _DEVICE.fullmatch(self.device) if isinstance(self.device, str) else None
        if match is None:
            raise ConfigError(f"device {self.device!r} is none: {_FORMS}")
        if self.is_cuda:
            object.__setattr__(self, "device", f"cuda:{int(match[1] or 0)}")
        if self.num_sms is not None:
            if not self.is_cuda:
                raise ConfigError(f"sm={self.num_sms} on {self.device}: only a GPU has SMs; a CPU takes cores=0-3+6")
            if isinstance(self.num_sms, bool) or not isinstance(self.num_sms, int) or self.num_sms < 1:
                raise ConfigError(f"sm must be an int of at least 1, got {self.num_sms!r}")
        if self.cores is not None:
            object.__setattr__(self, "cores", _checked_cores(self.cores))

    @classmethod
    def parse(cls, text: str | DeviceSpec) -> DeviceSpec:
        """Read ``device[/key=value]…``, keys ``sm`` and ``cores``. ``str`` writes it again."""
        if isinstance(text, DeviceSpec):
            return text
        if not isinstance(text, str):
            raise ConfigError(f"a device is written as a str, got {text!r}: {_FORMS}")
        device, *options = text.strip().split("/")
        values: dict[str, str] = {}
        for option in options:
            key, equals, value = option.partition("=")
            if key not in ("sm", "cores") or not equals:
                raise ConfigError(f"device {text!r}: {option!r} is none of sm=COUNT and cores=LIST; {_FORMS}")
            if key in values:
                raise ConfigError(f"device {text!r} gives {key} twice")
            values[key] = value
        num_sms = _int(values["sm"], text, "sm") if "sm" in values else None
        cores = _parse_cores(values["cores"], text) if "cores" in values else None
        return cls(device, num_sms, cores)

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def place(self) -> str:
        """In words: "cuda:0, 84 SMs"."""
        parts = [self.device]
        if self.num_sms is not None:
            parts.append(f"{self.num_sms} SMs")
        if self.cores is not None:
            parts.append(f"core{'s' if len(self.cores) > 1 else ''} {_write_cores(self.cores)}")
        return ", ".join(parts)

    def __str__(self) -> str:
        text = self.device
        if self.num_sms is not None:
            text += f"/sm={self.num_sms}"
        if self.cores is not None:
            text += f"/cores={_write_cores(self.cores)}"
        return text


def parse_devices(text: str) -> list[DeviceSpec]:
    """Several specs, separated by commas: ``cuda:1,cuda:3``. An empty text is an empty list.

    Raises ConfigError as ``DeviceSpec.parse``, or for a comma with nothing before or behind it.
    """
    if not isinstance(text, str):
        raise ConfigError(f"devices are written as a str, got {text!r}: {_FORMS}")
    if not text.strip():
        return []
    parts = text.split(",")
    if not all(part.strip() for part in parts):
        raise ConfigError(f"devices {text!r}: a comma separates two of them; {_FORMS}")
    return [DeviceSpec.parse(part) for part in parts]


def check_specs(
    specs: Sequence[DeviceSpec], *, num_sms: Mapping[str, int], cores: Collection[int] | None = None
) -> None:
    """Whether workers with these specs can live side by side.

    SMs are given away once: those of one GPU must add up to no more than it has. So are cores. A worker without
    ``sm`` runs on the whole GPU, beside partitions if there are any.

    Args:
        num_sms: device name -> SMs, for every GPU there is.
        cores: those that this process may use; None: unknown, so any.

    Raises ConfigError.
    """
    for device in dict.fromkeys(spec.device for spec in specs if spec.is_cuda):
        if device not in num_sms:
            there = ", ".join(num_sms) or "none"
            raise ConfigError(f"device {device!r} was asked for; GPUs that this process sees: {there}")
        counts = [spec.num_sms for spec in specs if spec.device == device and spec.num_sms is not None]
        if sum(counts) > num_sms[device]:
            terms = " + ".join(map(str, counts))
            raise ConfigError(f"{terms} SMs were asked for on {device}, which has {num_sms[device]}")
    taken: dict[int, DeviceSpec] = {}
    for spec in specs:
        for core in spec.cores or ():
            if core in taken:
                raise ConfigError(f"core {core} is given to two workers, {taken[core]} and {spec}: each takes its own")
            if cores is not None and core not in cores:
                raise ConfigError(f"core {core} of {spec} is not among those of this process: {_write_cores(cores)}")
            taken[core] = spec


def _checked_cores(cores: Collection[int]) -> tuple[int, ...]:
    if not isinstance(cores, Collection):
        raise ConfigError(f"cores is a list of ints, got {cores!r}")
    for core in cores:
        if isinstance(core, bool) or not isinstance(core, int) or core < 0:
            raise ConfigError(f"a core is an int of at least 0, got {core!r}")
    if not cores:
        raise ConfigError("cores is an empty list: leave it out to bind the worker to none")
    twice = sorted({core for core in cores if list(cores).count(core) > 1}) if len(set(cores)) < len(cores) else []
    if twice:
        raise ConfigError(f"cores {_write_cores(set(twice))} are listed twice")
    return tuple(sorted(cores))


def _parse_cores(text: str, spec: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in text.split("+"):
        first, dash, last = part.partition("-")
        low = _int(first, spec, "cores")
        high = _int(last, spec, "cores") if dash else low
        if high < low or high - low >= _MOST_CORES:
            raise ConfigError(f"device {spec!r}: {part!r} is no range of cores, of {_MOST_CORES} at most; {_FORMS}")
        cores += range(low, high + 1)
    return tuple(cores)


def _write_cores(cores: Collection[int]) -> str:
    """``(0, 1, 2, 5)`` as "0-2+5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return "+".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _int(text: str, spec: str, key: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigError(f"device {spec!r}: {key} holds {text!r} where a number must stand; {_FORMS}")
    return int(text)
