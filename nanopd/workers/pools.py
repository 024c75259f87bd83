"""Which workers there are, which of them share a KV pool, and how a device's memory is divided. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from nanopd.errors import ConfigError
from nanopd.workers.spec import DeviceSpec
from nanopd.workers.worker import Role

# A request's KV lies in a prefill worker's pool only until it is handed over, in the others' for all of its decoding.
MEMORY_PARTS: Mapping[Role, int] = MappingProxyType({Role.COLLOCATED: 3, Role.DECODE: 3, Role.PREFILL: 1})


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker to be: what it does, and where."""

    name: str
    role: Role
    spec: DeviceSpec


@dataclass(frozen=True, slots=True)
class Pool:
    """A KV pool to be: whose, and its share of what the device has for KV."""

    device: str
    members: tuple[Placement, ...]
    share: float


def placements(
    collocated: Sequence[str | DeviceSpec], prefill: Sequence[str | DeviceSpec], decode: Sequence[str | DeviceSpec]
) -> list[Placement]:
    """The workers, named by role and number: "prefill0", "prefill1", …

    Raises ConfigError without any worker, with prefill but no decode workers, or the other way round.
    """
    found = [
        Placement(f"{role}{i}", role, DeviceSpec.parse(spec))
        for role, specs in ((Role.COLLOCATED, collocated), (Role.PREFILL, prefill), (Role.DECODE, decode))
        for i, spec in enumerate(_listed(role, specs))
    ]
    if not found:
        raise ConfigError("a cluster has at least one worker: collocated=['cuda:0'], or prefill=[…] and decode=[…]")
    roles = {placement.role for placement in found}
    for one, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if one in roles and other not in roles:
            raise ConfigError(f"{one} workers need at least one {other} worker, and there is none")
    return found


def plan_pools(workers: Sequence[Placement], shared_pool: bool | None) -> list[Pool]:
    """One pool per device if ``shared_pool``, else one per worker; in the order of the workers.

    A pool's share of its device's memory goes by ``MEMORY_PARTS`` of its members. ``shared_pool`` None: shared if
    there are prefill and decode workers and all of them sit on one device.

    Raises ConfigError if ``shared_pool`` is neither a bool nor None.
    """
    if shared_pool is not None and not isinstance(shared_pool, bool):
        raise ConfigError(f"shared_pool must be True, False or None, got {shared_pool!r}")
    if shared_pool is None:
        shared_pool = len({w.spec.device for w in workers if w.role is not Role.COLLOCATED}) == 1
    groups: dict[str, list[Placement]] = {}
    for worker in workers:
        groups.setdefault(worker.spec.device if shared_pool else worker.name, []).append(worker)
    parts = {
        device: sum(MEMORY_PARTS[w.role] for w in workers if w.spec.device == device) for device in devices(workers)
    }
    return [
        Pool(device, tuple(members), sum(MEMORY_PARTS[w.role] for w in members) / parts[device])
        for members in groups.values()
        for device in (members[0].spec.device,)
    ]


def devices(workers: Sequence[Placement]) -> list[str]:
    """Each device once, in the order of the workers."""
    return list(dict.fromkeys(worker.spec.device for worker in workers))


def _listed(role: Role, specs: Sequence[str | DeviceSpec]) -> Sequence[str | DeviceSpec]:
    """A lone text would otherwise be taken apart into characters."""
    if isinstance(specs, (str, DeviceSpec)):
        raise ConfigError(f"{role} is a list of devices, got {specs!r}: write [{str(specs)!r}], or use parse_devices")
    if not isinstance(specs, Iterable):
        raise ConfigError(f"{role} is a list of devices, got {specs!r}")
    return specs
