"""Links on CUDA: every bit, on every path that one GPU has, and over P2P where there are two; order by events alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transfer_cases import (
    BLOCK_BYTES,
    COPYING,
    LAYERS,
    FaultyRelay,
    bits,
    expected,
    handoff,
    link_of,
    pool,
    random_handoff,
)

from nanopd.errors import TransferError
from nanopd.transfer import connect
from nanopd.transfer.cache_link import CacheLink
from nanopd.transfer.overlap import measure_overlap
from nanopd.transfer.peer import PeerLink
from nanopd.transfer.pinned_relay import PinnedRelayLink
from nanopd.transfer.same_device import SameDeviceLink
from nanopd.transfer.shared_pool import SharedPoolLink
from nanopd.transfer.throttled import ThrottledLink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SLOW_CYCLES = 100_000_000  # about 50 ms: what the host enqueues meanwhile runs long before the producer is through
TWO_GPUS = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"
)
WAYS = [
    *(pytest.param(kind, "cuda:0", id=f"{kind.path} on one GPU") for kind in COPYING),
    *(
        pytest.param(kind, "cuda:1", marks=TWO_GPUS, id=f"{kind.path} between two")
        for kind in (PeerLink, PinnedRelayLink)
    ),
]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("link: ")] == []


def slow_write(cache: Any, content: torch.Tensor, layer: int, cycles: int) -> None:
    """On the current stream: a producer that takes its time, then one layer's KV."""
    torch.cuda._sleep(cycles)
    cache.tensor[layer].copy_(content[layer], non_blocking=True)


@pytest.mark.parametrize("layered", [False, True], ids=["whole", "layered"])
@pytest.mark.parametrize("piece_bytes", [1, 3 * BLOCK_BYTES, 1 << 20])
@pytest.mark.parametrize("size", [1, 7, 200])
@pytest.mark.parametrize(("kind", "to"), WAYS)
def test_every_bit_arrives(kind: type[CacheLink], to: str, size: int, piece_bytes: int, layered: bool) -> None:
    if size == 200 and piece_bytes == 1:
        size = 30
    source, destination = pool(230, 1, "cuda:0"), pool(310, 2, to)
    sent, before = bits(source), bits(destination)
    h = random_handoff(source, destination, size, seed=size)
    with link_of(kind, source, destination, piece_bytes=piece_bytes, depth=2) as link:
        transfer = link.open(h)
        if layered:
            for layer in range(LAYERS):
                transfer.send_layer(layer)
        else:
            transfer.send_rest()
        assert transfer.wait(60) and transfer.done()
        assert transfer.bytes == size * LAYERS * BLOCK_BYTES
        assert transfer.seconds is not None and transfer.seconds > 0
        assert torch.equal(bits(destination), expected(before, sent, h))
    assert torch.equal(bits(source), sent)


def test_on_a_gpu_layers_wait_until_they_fill_a_piece() -> None:
    """Unless one says otherwise: each piece costs the host time that all workers' threads wait for."""
    source, destination = pool(8, 1, "cuda:0"), pool(8, 2, "cuda:0")
    h = random_handoff(source, destination, 4, seed=1)
    with link_of(SameDeviceLink, source, destination, piece_bytes=2 * 4 * BLOCK_BYTES, least_bytes=None) as link:
        transfer = link.open(h)
        for layer in range(LAYERS):
            transfer.send_layer(layer)
        assert transfer.wait(60)
        ends = [moved.piece.layers.stop for moved in transfer.moved]
    assert ends == [*range(2, LAYERS, 2), LAYERS]


@pytest.mark.parametrize(("kind", "to"), WAYS)
def test_a_layer_is_read_only_after_its_producer(kind: type[CacheLink], to: str) -> None:
    """A slow producer on a stream of its own, each layer sent right after it was enqueued. The host is far ahead."""
    source, destination = pool(64, 1, "cuda:0"), pool(64, 2, to)
    computed, before = pool(64, 3, "cuda:0"), bits(destination)
    stream = torch.cuda.Stream("cuda:0")
    h = random_handoff(source, destination, 40, seed=3)
    with link_of(kind, source, destination) as link:  # source_stream: the one that is current where a layer is sent
        link.send(random_handoff(source, destination, 1, seed=4)).wait(60)  # compiles
        before = bits(destination)
        torch.cuda.synchronize()
        transfer = link.open(h)
        with torch.cuda.stream(stream):
            for layer in range(LAYERS):
                slow_write(source, computed.tensor, layer, SLOW_CYCLES // 4)
                transfer.send_layer(layer)
        assert not transfer.done(), "the host waited for the device"
        assert transfer.wait(60)
        # What the host launches now sees the data: read on yet another stream that waits for nothing.
        with torch.cuda.stream(torch.cuda.Stream(to)):
            assert torch.equal(bits(destination), expected(before, bits(computed), h))


@pytest.mark.parametrize(("kind", "to"), WAYS)
def test_without_the_event_the_bytes_are_wrong(kind: type[CacheLink], to: str) -> None:
    """The control of the test above: a link that is told of another stream than the producer's reads too early."""
    source, destination = pool(64, 1, "cuda:0"), pool(64, 2, to)
    old, computed = bits(source), pool(64, 3, "cuda:0")
    producing, idle = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:0")
    h = random_handoff(source, destination, 40, seed=3)
    for told, right in ((idle, False), (producing, True)):
        with link_of(kind, source, destination, source_stream=told) as link:
            link.send(random_handoff(source, destination, 1, seed=4)).wait(60)  # compiles
            before = bits(destination)
            source.tensor.view(torch.uint8).copy_(old)
            torch.cuda.synchronize()
            with torch.cuda.stream(producing):
                torch.cuda._sleep(4 * SLOW_CYCLES)
                source.tensor.copy_(computed.tensor, non_blocking=True)
            assert link.send(h).wait(60)
            arrived = bits(destination)
            torch.cuda.synchronize()
            assert torch.equal(arrived, expected(before, bits(computed) if right else old, h))


@pytest.mark.parametrize(("kind", "to"), WAYS)
def test_handoffs_in_flight_at_once(kind: type[CacheLink], to: str) -> None:
    source, destination = pool(40, 1, "cuda:0"), pool(16, 2, to)
    sent, before = bits(source), bits(destination)
    handoffs = [random_handoff(source, destination, 1 + i % 7, seed=i) for i in range(24)]
    with link_of(kind, source, destination, piece_bytes=4 * BLOCK_BYTES, depth=2) as link:
        transfers = [link.send(h) for h in handoffs[:12]] + [link.open(h) for h in handoffs[12:]]
        for layer in range(LAYERS):
            for transfer in transfers[12:]:
                transfer.send_layer(layer)
        assert all(transfer.wait(60) for transfer in transfers)
    assert torch.equal(bits(destination), expected(before, sent, *handoffs))


def test_staging_is_not_overwritten_under_a_slow_consumer() -> None:
    """Two slots, and a last stage that is far slower than the first: pieces must wait for their slot."""

    class SlowScatter(PinnedRelayLink):
        def _scatter(self, load: Any, slot: int) -> Any:
            torch.cuda._sleep(SLOW_CYCLES // 50)
            return super()._scatter(load, slot)

    source, destination = pool(64, 1, "cuda:0"), pool(64, 2, "cuda:0")
    sent, before = bits(source), bits(destination)
    h = random_handoff(source, destination, 40, seed=5)
    with link_of(SlowScatter, source, destination, piece_bytes=10 * BLOCK_BYTES, depth=2) as link:
        assert link.send(h).wait(60)
    assert torch.equal(bits(destination), expected(before, sent, h))


def test_a_shared_pool_waits_for_the_producer() -> None:
    shared = pool(9, 1, "cuda:0")
    with SharedPoolLink(shared) as link:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLOW_CYCLES)
            transfer = link.send(handoff(shared, [3], [3]))
        assert not transfer.wait(0.001) and not transfer.done()
        assert transfer.wait(60) and stream.query() and transfer.bytes == 0


def test_a_throttled_link_takes_its_time() -> None:
    source, destination = pool(64, 1, "cuda:0"), pool(64, 2, "cuda:0")
    sent, before = bits(source), bits(destination)
    h = random_handoff(source, destination, 50, seed=6)
    gb_s = 50 * source.bytes_per_block / 0.05 / 1e9
    with ThrottledLink(link_of(SameDeviceLink, source, destination), gb_s) as link:
        transfer = link.send(h)
        assert transfer.wait(60) and transfer.seconds is not None and transfer.seconds >= 0.05
    assert torch.equal(bits(destination), expected(before, sent, h))


def test_faults_stay_with_their_transfer() -> None:
    source, destination = pool(8, 1, "cuda:0"), pool(8, 2, "cuda:0")
    sent = bits(source)
    with link_of(FaultyRelay, source, destination, piece_bytes=BLOCK_BYTES, depth=2) as link:
        link.raise_at, link.stall_at = (7,), (12,)
        failing = link.send(handoff(source, [0, 1], [0, 1], number=1))  # pieces 0-7
        with pytest.raises(TransferError, match="injected fault"):
            failing.wait(60)
        stalled = link.send(handoff(source, [2], [2], number=2))  # pieces 8-12
        assert not stalled.wait(0.05)
        stalled.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            stalled.wait(60)
        assert link.send(handoff(source, [4, 5], [4, 5], number=3)).wait(60)
    assert torch.equal(bits(destination)[:, :, [4, 5]], sent[:, :, [4, 5]])


def test_float32_is_refused_with_the_reason() -> None:
    source, destination = pool(4, 1, "cuda:0", dtype=torch.float32), pool(4, 2, "cuda:0", dtype=torch.float32)
    with link_of(SameDeviceLink, source, destination) as link, pytest.raises(TransferError, match="UnsupportedShape"):
        link.send(handoff(source, [0], [0])).wait(60)


def test_connect_on_one_gpu() -> None:
    source, destination = pool(32, 1, "cuda:0"), pool(32, 2, "cuda:0")
    sent, before = bits(source), bits(destination)
    h = random_handoff(source, destination, 20, seed=7)
    for path in (None, "pinned relay"):
        with link_ops(source, destination, path) as link:
            assert link.report is not None and link.report.verified and link.report.gb_s
            assert link.path == (path or "same-device copy")
            assert link.send(h).wait(60)
        assert torch.equal(bits(destination), expected(before, sent, h))


@TWO_GPUS
def test_connect_between_two_gpus() -> None:
    source, destination = pool(32, 1, "cuda:0"), pool(32, 2, "cuda:1")
    sent, before = bits(source), bits(destination)
    h = random_handoff(source, destination, 20, seed=7)
    with link_ops(source, destination, None) as link:
        assert link.report is not None and link.report.verified and link.path in ("peer copy", "pinned relay")
        print(link.report)
        assert link.send(h).wait(60)
    assert torch.equal(bits(destination), expected(before, sent, h))


def link_ops(source: Any, destination: Any, path: str | None) -> Any:
    from nanopd.ops import get_ops

    return connect(source, destination, get_ops(source.device), get_ops(destination.device), path=path)


@pytest.mark.parametrize("path", ["same-device copy", "pinned relay"])
def test_a_streamed_prefill_arrives_whole(path: str) -> None:
    """The model's own KV, layer by layer while later layers compute, for a prompt that ends inside a block."""
    result = measure_overlap("dummy:tiny", "cuda:0", path=path, num_tokens=201, repeats=2, verify=True)
    assert result["verified"] is True
    assert result["streamed_ms"] > 0
