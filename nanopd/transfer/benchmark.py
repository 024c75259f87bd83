"""What every path reaches: GB/s against size, a long prompt's handoff against the limits of its hardware, the overlap.

    python -m nanopd.transfer.benchmark                      # writes docs/results/<gpu>/kv_transfer.json

The relay is compared with the raw pinned copy: the same bytes from and to pinned memory in two large copies, in both
directions at once, as in the relay. The same-device copy is compared with the device's copy bandwidth, which counts
bytes read and bytes written. All in one run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nanopd.kv.cache import KVCache
from nanopd.kv.fingerprint import LayoutFingerprint
from nanopd.model.loader import LoadedModel, load_model, resolve_device
from nanopd.ops.ceilings import measure_ceilings
from nanopd.ops.measure import write_result
from nanopd.ops.select import get_ops
from nanopd.transfer.cache_link import CacheLink
from nanopd.transfer.handoff import Handoff
from nanopd.transfer.overlap import BLOCK_SIZE, measure_overlap
from nanopd.transfer.peer import PeerLink
from nanopd.transfer.pinned_relay import PinnedRelayLink
from nanopd.transfer.probe import BUILDERS
from nanopd.transfer.same_device import SameDeviceLink

KB, MB = 1 << 10, 1 << 20
GPU_SIZES = tuple(64 * KB * 4**i for i in range(8))  # 64 KB to 1 GB
CPU_SIZES = tuple(64 * KB * 4**i for i in range(5))  # to 16 MB
PIECES = (4 * MB, 8 * MB, 16 * MB, 32 * MB)
TIMEOUT = 120.0


def bench_links(
    device: torch.device | str | None = None,
    *,
    peer: torch.device | str | None = None,
    model: str | LoadedModel | None = None,
    sizes: Sequence[int] | None = None,
    handoff_tokens: int | None = None,
    overlap_tokens: int | None = None,
    repeats: int = 7,
) -> dict[str, Any]:
    """Measure everything. About 40 s on an H200, 10 s on the CPU.

    Args:
        peer: the destination's device; None: the same one.
        model: whose KV layout moves and whose prefill hides it; dummy:qwen3-8b, on the CPU smollm2.
        sizes: bytes, for the curves.
        handoff_tokens, overlap_tokens: prompt lengths of the handoff and of the overlap; 2,048 and 4,096 on a GPU.

    Returns: ``{"ceilings", "curves": {path: [{"bytes", "gb_s", "wall_gb_s"}]}, "handoff": {...}, "pieces",
    "overlap": {...}}``. GB/s are payload, by the device's clock from first byte to last; ``wall_gb_s`` is from
    the call of ``send`` until the host knows; ``queued_gb_s`` is over several handoffs that wait behind each other,
    whose launches the link's thread makes while the one before still moves; ``behind_gb_s`` is of one that is sent
    while its source still computes, as a prompt's is, so that the card never waits for the host's launch.
    """
    place = resolve_device(device)
    target = place if peer is None else torch.device(peer)
    on_gpu = place.type == "cuda"
    if isinstance(model, LoadedModel):
        loaded = model
    else:
        loaded = load_model(model or ("dummy:qwen3-8b" if on_gpu else "smollm2"), device=place)
    handoff_tokens = handoff_tokens or (2048 if on_gpu else 128)
    overlap_tokens = overlap_tokens or (4096 if on_gpu else 256)
    paths: list[type[CacheLink]] = [PeerLink if target != place else SameDeviceLink, PinnedRelayLink]
    ceilings = measure_ceilings(place)
    result: dict[str, Any] = {
        "model": loaded.config.name,
        "from": str(place),
        "to": str(target),
        "ceilings": ceilings.as_dict(),
        "curves": {},
        "handoff": {},
    }
    for kind in paths:
        result["curves"][kind.path] = curve(kind, loaded, place, target, sizes or (GPU_SIZES if on_gpu else CPU_SIZES))
    result["handoff"] = long_handoff(paths, loaded, place, target, handoff_tokens, repeats)
    if SameDeviceLink in paths:  # so fast that the launch counts: by how much shows at four times the length
        longer = long_handoff([SameDeviceLink], loaded, place, target, 4 * handoff_tokens, repeats, relay=False)
        result["longer_handoff"] = longer
        for handoff in (result["handoff"], longer):
            copy = handoff[SameDeviceLink.path]
            copy["of_copy_bandwidth"] = 2 * copy["gb_s"] / ceilings.copy_gb_s
            copy["queued_of_copy_bandwidth"] = 2 * copy["queued_gb_s"] / ceilings.copy_gb_s
            copy["behind_of_copy_bandwidth"] = 2 * copy["behind_gb_s"] / ceilings.copy_gb_s
    if target == place:  # the overlap's pools lie on one device
        result["overlap"] = measure_overlap(
            loaded,
            path=PinnedRelayLink.path,
            num_tokens=overlap_tokens,
            repeats=2 * repeats,
            timelines=True,
            verify=True,
        )
    return result


def curve(
    kind: type[CacheLink], loaded: LoadedModel, source: torch.device, destination: torch.device, sizes: Sequence[int]
) -> list[dict[str, float]]:
    """GB/s of handoffs of ``sizes`` bytes (rounded to blocks) between pools of one layer, whose blocks are smallest."""
    config, dtype = loaded.config, loaded.model.dtype
    block = 2 * BLOCK_SIZE * config.num_kv_heads * config.head_dim * dtype.itemsize
    most = max(1, -(-max(sizes) // block))
    pools = [_pool(loaded, most, device, num_layers=1) for device in (source, destination)]
    points = []
    with BUILDERS[kind.path](*pools, get_ops(source), get_ops(destination)) as link:
        for size in sizes:
            handoff = _random_handoff(pools[0].fingerprint(), most, max(1, size // block))
            points.append(_timed(link, handoff, 5))
    return points


def long_handoff(
    kinds: Sequence[type[CacheLink]],
    loaded: LoadedModel,
    source: torch.device,
    destination: torch.device,
    num_tokens: int,
    repeats: int,
    *,
    relay: bool = True,
) -> dict[str, Any]:
    """One prompt over each path; with ``relay`` the raw pinned copy of as many bytes, and the relay by piece size."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    pools = [_pool(loaded, 2 * num_blocks, device) for device in (source, destination)]
    ops = [get_ops(source), get_ops(destination)]
    handoff = _random_handoff(pools[0].fingerprint(), 2 * num_blocks, num_blocks)
    result: dict[str, Any] = {"tokens": num_tokens, "bytes": num_blocks * pools[0].bytes_per_block}
    for kind in kinds:
        with BUILDERS[kind.path](*pools, *ops) as link:
            behind = _timed(link, handoff, repeats, busy=True)["gb_s"]
            result[kind.path] = {
                **_timed(link, handoff, repeats),
                "queued_gb_s": _queued(link, handoff),
                "behind_gb_s": behind,
            }
    if source.type == "cuda" and relay:
        raw = result["raw_pinned_copy"] = raw_pinned_copy(result["bytes"], source, destination, repeats)
        result["pieces"] = {}
        for piece_bytes in PIECES:
            with PinnedRelayLink(pools[0], pools[1], ops[0], ops[1], piece_bytes=piece_bytes) as link:
                timed = _timed(link, handoff, repeats)
            timed["of_raw"] = timed["gb_s"] / raw["both_gb_s"]
            result["pieces"][f"{piece_bytes // MB} MB"] = timed
        relayed = result[PinnedRelayLink.path]
        relayed["of_raw_pinned_copy"] = relayed["gb_s"] / raw["both_gb_s"]
        relayed["wall_of_raw_pinned_copy"] = relayed["wall_gb_s"] / raw["both_gb_s"]
    return result


def raw_pinned_copy(num_bytes: int, source: torch.device, destination: torch.device, repeats: int) -> dict[str, float]:
    """GB/s of one copy of ``num_bytes`` from a GPU to pinned memory, of one back, and of each while both run."""
    near, far = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for device in (source, destination))
    out, back = (torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    down, up = torch.cuda.Stream(source), torch.cuda.Stream(destination)

    def to_host() -> None:
        with torch.cuda.stream(down):
            out.copy_(near, non_blocking=True)

    def from_host() -> None:
        with torch.cuda.stream(up):
            far.copy_(back, non_blocking=True)

    def both() -> None:
        to_host()
        from_host()

    def seconds(run: Callable[[], None]) -> float:
        times = []
        for _ in range(repeats + 1):
            for device in {source, destination}:
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            run()
            down.synchronize()
            up.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    ways = {"to_host_gb_s": to_host, "from_host_gb_s": from_host, "both_gb_s": both}
    return {name: num_bytes / seconds(run) / 1e9 for name, run in ways.items()}


def table(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    handoff, lines = result["handoff"], []
    for path, points in result["curves"].items():
        rates = ", ".join(f"{_size(p['bytes'])} {p['gb_s']:.3g}" for p in points)
        lines.append(f"{path:18} GB/s: {rates}")
    lines.append(f"handoff of {handoff['tokens']} tokens, {handoff['bytes'] / 1e6:.0f} MB:")
    for path in result["curves"]:
        found = handoff[path]
        shares = [f"{name} {found[name]:.2f}" for name in found if "of_" in name]
        rates = f"{found['gb_s']:.1f} GB/s (wall {found['wall_gb_s']:.1f}, queued {found['queued_gb_s']:.1f})"
        lines.append(f"  {path:16} {rates}  {', '.join(shares)}")
    if longer := result.get("longer_handoff"):
        share = longer[SameDeviceLink.path]["of_copy_bandwidth"]
        lines.append(f"  same-device copy of {longer['tokens']} tokens: {share:.2f} of copy bandwidth")
    if "raw_pinned_copy" in handoff:
        raw = handoff["raw_pinned_copy"]
        lines.append("  raw pinned copy  " + ", ".join(f"{name} {rate:.1f}" for name, rate in raw.items()))
        pieces = (f"{name} {found['of_raw']:.3f}" for name, found in handoff["pieces"].items())
        lines.append("  relay of raw by piece size: " + ", ".join(pieces))
    if found := result.get("overlap"):
        times = ", ".join(f"{name[:-3]} {found[name]:.2f}" for name in found if name.endswith("_ms"))
        lines.append(
            f"overlap, {found['tokens']} tokens, {found['path']}: {times} ms; hidden {found['hidden_share']:.2f},"
            f" bits {'equal' if found['verified'] else 'DIFFER'}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m nanopd.transfer.benchmark", description=bench_links.__doc__)
    parser.add_argument("--device")
    parser.add_argument("--peer", help="destination device, such as cuda:1")
    parser.add_argument("--model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--name", default="kv_transfer", help="of the record")
    parser.add_argument("--out", type=Path, help="folder of records; docs/results by default")
    options = parser.parse_args(arguments)
    result = bench_links(options.device, peer=options.peer, model=options.model, repeats=options.repeats)
    print(table(result))
    device = resolve_device(options.device)
    peer = f" --peer {options.peer}" if options.peer else ""
    command = f"python -m nanopd.transfer.benchmark --device {device}{peer}"
    print("written:", write_result(options.name, result, device=device, command=command, folder=options.out))


# --- inside --------------------------------------------------------------------------------------------------------


def _pool(loaded: LoadedModel, num_blocks: int, device: torch.device, num_layers: int | None = None) -> KVCache:
    config, dtype = loaded.config, loaded.model.dtype
    shape = (num_layers or config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    cache = KVCache(torch.empty(shape, dtype=dtype, device=device), config.name)
    for layer in cache.tensor:  # one at a time: a generator works in float32 internally
        layer.normal_()
    return cache


def _random_handoff(layout: LayoutFingerprint, pool_blocks: int, num_blocks: int) -> Handoff:
    rng = random.Random(num_blocks)
    blocks, targets = (tuple(rng.sample(range(pool_blocks), num_blocks)) for _ in range(2))
    return Handoff(0, "bench", "source", "destination", blocks, targets, num_blocks * layout.block_size, True, layout)


def _timed(link: CacheLink, handoff: Handoff, repeats: int, *, busy: bool = False) -> dict[str, float]:
    """Medians over ``repeats`` transfers, one at a time, after one that compiles. ``busy``: sent while the source's
    stream computes for some 2 ms."""
    seconds, walls = [], []
    place = link.source.device
    work = torch.ones(4096, 4096, dtype=link.source.dtype, device=place) if busy and place.type == "cuda" else None
    for turn in range(repeats + 1):
        for cache in (link.source, link.destination):
            if cache.device.type == "cuda":
                torch.cuda.synchronize(cache.device)
        if work is not None:
            for _ in range(10):
                work @ work
        begin = time.perf_counter()
        transfer = link.send(handoff)
        transfer.wait(TIMEOUT)
        wall = time.perf_counter() - begin
        if turn > 0:
            assert transfer.seconds is not None
            seconds.append(transfer.seconds)
            walls.append(wall)
    num_bytes = transfer.bytes
    return {
        "bytes": num_bytes,
        "ms": statistics.median(seconds) * 1e3,
        "gb_s": num_bytes / statistics.median(seconds) / 1e9,
        "wall_ms": statistics.median(walls) * 1e3,
        "wall_gb_s": num_bytes / statistics.median(walls) / 1e9,
    }


def _queued(link: CacheLink, handoff: Handoff, count: int = 8) -> float:
    """GB/s from the first byte of the first to the last byte of the last of ``count`` handoffs, sent at once."""
    transfers = [link.open(handoff) for _ in range(count)]
    for transfer in transfers:
        transfer.send_rest()
    for transfer in transfers:
        transfer.wait(TIMEOUT)
    seconds = transfers[-1].moved[-1].end.seconds_since(transfers[0].moved[0].begin)
    return count * transfers[0].bytes / seconds / 1e9


def _size(num_bytes: float) -> str:
    return f"{num_bytes / MB:.4g}MB" if num_bytes >= MB else f"{num_bytes / KB:.4g}KB"


if __name__ == "__main__":
    main()
