"""Choosing a link by trying it: random bytes there and back, compared, and timed.

A flag that says "P2P is available" is a claim. On some machines such copies arrive corrupted, so a path is used only
after bytes went over it both ways and came out equal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from nanopd.errors import ConfigError, LinkStalledError, NanoPDError, TransferError
from nanopd.kv.cache import KVCache
from nanopd.ops.interface import Ops
from nanopd.transfer.cache_link import CacheLink
from nanopd.transfer.handoff import Handoff
from nanopd.transfer.link import Link, refuse_differences
from nanopd.transfer.peer import PeerLink
from nanopd.transfer.pinned_relay import PinnedRelayLink
from nanopd.transfer.report import LinkReport
from nanopd.transfer.same_device import SameDeviceLink
from nanopd.transfer.shared_pool import SharedPoolLink

Timed = tuple[int, float, float]  # bytes; seconds, see _send
Builder = Callable[..., CacheLink]  # (source, destination, source_ops, destination_ops, **options)

SHARED = SharedPoolLink.path
BACKGROUND = 0xA5  # what the scratch destination holds where nothing arrives
# Best first. A mapping that cannot be changed; tests pass their own.
BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {link.path: link for link in (SameDeviceLink, PeerLink, PinnedRelayLink)}
)


class Topology(Protocol):
    """What a machine says of itself."""

    def same_device(self, source: torch.device, destination: torch.device) -> bool: ...

    def peer_access(self, source: torch.device, destination: torch.device) -> bool:
        """Whether the driver reports P2P."""
        ...


class TorchTopology:
    """This machine, as torch reports it."""

    def same_device(self, source: torch.device, destination: torch.device) -> bool:
        return source == destination

    def peer_access(self, source: torch.device, destination: torch.device) -> bool:
        on_gpus = source.type == destination.type == "cuda"
        return on_gpus and torch.cuda.can_device_access_peer(source, destination)


def connect(
    source: KVCache,
    destination: KVCache,
    source_ops: Ops,
    destination_ops: Ops,
    *,
    path: str | None = None,
    topology: Topology | None = None,
    builders: Mapping[str, Builder] = BUILDERS,
    **options: Any,
) -> Link:
    """The best link from one pool to another that works; ``link.report`` says what was found.

    Args:
        source_ops, destination_ops: kernels of the pools' devices.
        path: take this one or none, such as "pinned relay".
        topology, builders: of this machine; tests pass others.
        options: for the link, see ``CacheLink``; a shared pool takes ``source_stream`` only and ignores the others.

    Raises LayoutMismatchError if the pools differ in layout, ConfigError for an unknown path, TransferError if no
    path works.
    """
    report = probe_link(
        source, destination, source_ops, destination_ops, path=path, topology=topology, builders=builders
    )
    link: Link
    if report.path == SHARED:
        link = SharedPoolLink(source, source_stream=options.get("source_stream"))
    else:
        link = builders[report.path](source, destination, source_ops, destination_ops, **options)
    link.report = report
    return link


def probe_link(
    source: KVCache,
    destination: KVCache,
    source_ops: Ops,
    destination_ops: Ops,
    *,
    path: str | None = None,
    topology: Topology | None = None,
    builders: Mapping[str, Builder] = BUILDERS,
    scratch_bytes: int | None = None,
    timeout: float = 20.0,
) -> LinkReport:
    """Find the best path that works. The pools are not touched: bytes move between scratch pools of their layout.

    Args:
        path, topology, builders: as for ``connect``.
        scratch_bytes: about how large each of the two scratch pools is; None: 64 MB on a GPU, 8 MB on the CPU.
        timeout: seconds after which a transfer counts as stalled.

    Raises as ``connect`` does.
    """
    refuse_differences(source.fingerprint(), destination.fingerprint(), "no link between these pools")
    known = (SHARED, *builders)
    if path is not None and path not in known:
        raise ConfigError(f"no path is named {path!r}; there are {', '.join(known)}")
    topology = topology or TorchTopology()
    if scratch_bytes is None:
        scratch_bytes = (64 if source.device.type == "cuda" else 8) << 20
    tried: list[tuple[str, str]] = []
    for name in known if path is None else (path,):
        why_not = _rule_out(name, source, destination, topology)
        if why_not is None and name == SHARED:
            return LinkReport(SHARED, None, None, 0.0, True, tried=tuple(tried))
        if why_not is None:
            try:
                there, back = _try_both_ways(
                    builders[name], source, destination, source_ops, destination_ops, scratch_bytes, timeout
                )
            except (NanoPDError, RuntimeError) as error:  # torch says of a device what is wrong in the latter
                why_not = f"{type(error).__name__}: {error}"
            else:
                points = [(size, moving) for size, moving, _ in there]
                gb_s, back_gb_s = fit(points)[0], fit([(size, moving) for size, moving, _ in back])[0]
                latency = max(0.0, min(wall - size / gb_s / 1e9 for size, _, wall in there))
                return LinkReport(name, gb_s, back_gb_s, latency, True, tuple(points), tuple(tried))
        tried.append((name, why_not or ""))
    reasons = "; ".join(f"{name}: {why}" for name, why in tried)
    raise TransferError(f"no link from {source.device} to {destination.device} works ({reasons})")


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(GB/s, latency in s) of the line seconds = latency + bytes / rate through measured (bytes, seconds).

    Least squares. Where noise makes that absurd, the largest transfer gives the rate and the shortest one the latency.
    """
    mean_bytes = math.fsum(b for b, _ in points) / len(points)
    mean_seconds = math.fsum(s for _, s in points) / len(points)
    spread = math.fsum((b - mean_bytes) ** 2 for b, _ in points)
    slope = math.fsum((b - mean_bytes) * (s - mean_seconds) for b, s in points) / spread if spread else 0.0
    latency = mean_seconds - slope * mean_bytes
    if slope > 0 and latency >= 0:
        return 1e-9 / slope, latency
    largest, seconds = max(points)
    return largest / seconds / 1e9, min(s for _, s in points)


# --- inside --------------------------------------------------------------------------------------------------------


def _rule_out(path: str, source: KVCache, destination: KVCache, topology: Topology) -> str | None:
    """Why a path is not worth trying, if it is not."""
    same_device = topology.same_device(source.device, destination.device)
    if path == SHARED:
        return None if source.tensor.data_ptr() == destination.tensor.data_ptr() else "the pools are two"
    if path == SameDeviceLink.path:
        return None if same_device else f"the pools lie on {source.device} and {destination.device}"
    if path == PeerLink.path and same_device:
        return "the pools lie on one device"
    if path == PeerLink.path and not topology.peer_access(source.device, destination.device):
        return f"the driver reports no P2P between {source.device} and {destination.device}"
    return None


def _try_both_ways(
    build: Builder,
    source: KVCache,
    destination: KVCache,
    source_ops: Ops,
    destination_ops: Ops,
    scratch_bytes: int,
    timeout: float,
) -> tuple[list[Timed], list[Timed]]:
    """There and back. Raises TransferError if bytes change, LinkStalledError if they do not arrive."""
    num_blocks = min(max(scratch_bytes // source.bytes_per_block, 4), 256)
    near, far = (_scratch(cache, num_blocks) for cache in (source, destination))
    there = _try(build(near, far, source_ops, destination_ops), near, far, timeout)
    back = _try(build(far, near, destination_ops, source_ops), far, near, timeout)
    return there, back


def _try(link: CacheLink, source: KVCache, destination: KVCache, timeout: float) -> list[Timed]:
    """Move several sizes over ``link``, check every byte of both pools, and close it."""
    points, sent = [], _fill(source)
    with link:
        for handoff in _handoffs(source):
            destination.tensor.view(torch.uint8).fill_(BACKGROUND)
            moving, wall = map(min, zip(*(_send(link, handoff, timeout) for _ in range(3))))
            points.append((handoff.num_blocks * source.bytes_per_block, moving, wall))
            _verify(link.path, handoff, source, destination, sent)
    return points


def _scratch(cache: KVCache, num_blocks: int) -> KVCache:
    shape = list(cache.tensor.shape)
    shape[2] = num_blocks
    return KVCache(torch.zeros(shape, dtype=cache.dtype, device=cache.device), cache.model)


def _handoffs(scratch: KVCache) -> Iterator[Handoff]:
    """Small to large, each to blocks in another order and at most half of the pool, so that some stay as they are."""
    generator = torch.Generator().manual_seed(0)
    most = scratch.num_blocks // 2
    for number, size in enumerate(sorted({1, -(-most // 4), most})):
        blocks, targets = (torch.randperm(scratch.num_blocks, generator=generator)[:size].tolist() for _ in range(2))
        tokens = size * scratch.block_size
        yield Handoff(
            number, "probe", "one", "other", tuple(blocks), tuple(targets), tokens, True, scratch.fingerprint()
        )


def _fill(cache: KVCache) -> torch.Tensor:
    """Random bytes in every block. Returns the same ones, on the host."""
    words = torch.empty(-(-cache.tensor.nbytes // 8), dtype=torch.int64)  # eight times as fast as byte by byte
    words.random_(-(2**63), None, generator=torch.Generator().manual_seed(1))
    content = words.view(torch.uint8)[: cache.tensor.nbytes].view(cache.dtype).view(cache.tensor.shape)
    cache.tensor.copy_(content)
    return content


def _send(link: CacheLink, handoff: Handoff, timeout: float) -> tuple[float, float]:
    """Seconds by the link's clock from first byte to last, and from the call of ``send`` until the host knows.

    The rate is read off the first: within a device the bytes take microseconds, the host takes hundreds of them.
    """
    begin = time.perf_counter()
    transfer = link.send(handoff)
    if not transfer.wait(timeout):
        transfer.cancel()
        raise LinkStalledError(f"{transfer.bytes:,} bytes over {link.path} did not arrive within {timeout:g} s")
    wall = time.perf_counter() - begin
    assert transfer.seconds is not None
    return transfer.seconds, wall


def _verify(path: str, handoff: Handoff, source: KVCache, destination: KVCache, sent: torch.Tensor) -> None:
    """Compare on the host: a copy between the devices is what is in question."""
    expected = torch.empty_like(sent)
    expected.view(torch.uint8).fill_(BACKGROUND)
    expected[:, :, list(handoff.destination_blocks)] = sent[:, :, list(handoff.source_blocks)]
    for side, cache, content in (("destination", destination, expected), ("source", source, sent)):
        wrong = cache.tensor.cpu().view(torch.uint8) != content.view(torch.uint8)
        if count := int(wrong.sum()):
            raise TransferError(f"{path} corrupts: {count:,} of {wrong.numel():,} bytes in the {side} differ")
