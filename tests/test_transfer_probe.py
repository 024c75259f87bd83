"""Choosing a link: by trying, never by a flag alone; throttling; what a report says."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_cases import (
    COPYING,
    LAYERS,
    CorruptPeer,
    FaultyPeer,
    FaultyRelay,
    bits,
    expected,
    handoff,
    link_of,
    pool,
    random_handoff,
)

from nanopd.errors import ConfigError, LayoutMismatchError, LinkStalledError, TransferError
from nanopd.ops import get_ops
from nanopd.transfer import connect, probe_link
from nanopd.transfer.peer import PeerLink
from nanopd.transfer.pinned_relay import PinnedRelayLink
from nanopd.transfer.probe import BUILDERS, fit
from nanopd.transfer.same_device import SameDeviceLink
from nanopd.transfer.shared_pool import SharedPoolLink
from nanopd.transfer.throttled import ThrottledLink

OPS = get_ops("cpu")


class TwoDevices:
    """A machine with two devices, with P2P between them or without."""

    def __init__(self, peer: bool) -> None:
        self.peer = peer

    def same_device(self, source, destination):
        return False

    def peer_access(self, source, destination):
        return self.peer


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("link: ")] == []


def connected(source, destination, **options):
    return connect(source, destination, OPS, OPS, **options)


def test_one_pool_is_shared() -> None:
    shared = pool(4, 1)
    with connected(shared, shared) as link:
        assert isinstance(link, SharedPoolLink)
        assert link.report is not None and link.report.gb_s is None and link.report.verified
        assert link.send(handoff(shared, [1], [1])).wait(20)


def test_two_pools_on_one_device_are_copied() -> None:
    source, destination = pool(4, 1), pool(4, 2)
    before = bits(source), bits(destination)
    with connected(source, destination) as link:
        assert isinstance(link, SameDeviceLink)
        report = link.report
        assert report is not None and report.verified and report.path == "same-device copy"
        assert report.gb_s > 0 and report.backward_gb_s > 0 and report.latency_s >= 0
        assert len(report.points) == 3 and report.points[0][0] == source.bytes_per_block
        assert report.tried == (("shared pool", "the pools are two"),)
        assert "GB/s" in str(report)
    assert torch.equal(bits(source), before[0]) and torch.equal(bits(destination), before[1]), "probing used the pools"


def test_the_rate_is_by_the_clock_of_the_link_and_not_by_how_long_the_host_takes() -> None:
    class FiveGBs(SameDeviceLink):
        def open(self, handoff):
            transfer = super().open(handoff)
            transfer.__class__ = type("Timed", (type(transfer),), {"seconds": property(lambda t: 1e-5 + t.bytes / 5e9)})
            return transfer

    builders = {**BUILDERS, "same-device copy": FiveGBs}
    report = probe_link(pool(64, 1), pool(64, 2), OPS, OPS, builders=builders)
    assert report.gb_s == pytest.approx(5.0) and report.backward_gb_s == pytest.approx(5.0)
    assert report.points == tuple((size, pytest.approx(1e-5 + size / 5e9)) for size, _ in report.points)


def test_between_two_devices_p2p_is_used_if_it_works() -> None:
    with connected(pool(4, 1), pool(4, 2), topology=TwoDevices(peer=True)) as link:
        assert isinstance(link, PeerLink)
    with connected(pool(4, 1), pool(4, 2), topology=TwoDevices(peer=False)) as link:
        assert isinstance(link, PinnedRelayLink) and link.report is not None
        assert ("peer copy", "the driver reports no P2P between cpu and cpu") in link.report.tried


def test_p2p_that_is_reported_but_corrupts_is_not_used() -> None:
    source, destination = pool(9, 1), pool(9, 2)
    sent, before = bits(source), bits(destination)
    builders = {**BUILDERS, "peer copy": CorruptPeer}
    h = random_handoff(source, destination, 6, 1)
    with connected(source, destination, topology=TwoDevices(peer=True), builders=builders) as link:
        assert isinstance(link, PinnedRelayLink) and link.report is not None and link.report.verified
        (why,) = [why for path, why in link.report.tried if path == "peer copy"]
        assert "peer copy corrupts: " in why and "bytes in the destination differ" in why
        assert link.send(h).wait(20)
    assert torch.equal(bits(destination), expected(before, sent, h))


def test_p2p_that_corrupts_one_way_only_is_not_used() -> None:
    source, destination = pool(4, 1), pool(6, 2)

    def one_way(near, far, *ops, **options):
        one_way.calls += 1
        return (PeerLink if one_way.calls == 1 else CorruptPeer)(near, far, *ops, **options)

    one_way.calls = 0
    report = probe_link(
        source, destination, OPS, OPS, topology=TwoDevices(True), builders={**BUILDERS, "peer copy": one_way}
    )
    assert one_way.calls == 2 and report.path == "pinned relay"


def test_a_path_that_stalls_is_not_used() -> None:
    class Stalling(FaultyPeer):
        stall_at = (0,)

    builders = {**BUILDERS, "peer copy": Stalling}
    report = probe_link(pool(4, 1), pool(4, 2), OPS, OPS, topology=TwoDevices(True), builders=builders, timeout=1.0)
    assert report.path == "pinned relay"
    assert any("LinkStalledError" in why and "did not arrive within 1 s" in why for _, why in report.tried)


def test_a_path_that_cannot_even_be_set_up_is_not_used() -> None:
    def out_of_memory(*pools, **options):
        raise RuntimeError("CUDA error: out of memory")

    source, destination = pool(16, 1), pool(16, 2)
    builders = {**BUILDERS, PeerLink.path: out_of_memory}
    with connected(source, destination, topology=TwoDevices(peer=True), builders=builders) as link:
        assert isinstance(link, PinnedRelayLink) and link.report is not None
        assert "out of memory" in dict(link.report.tried)[PeerLink.path]


def test_nothing_works() -> None:
    builders = {"peer copy": CorruptPeer}
    with pytest.raises(TransferError, match=r"no link from cpu to cpu works .*peer copy corrupts"):
        probe_link(pool(4, 1), pool(4, 2), OPS, OPS, topology=TwoDevices(True), builders=builders)


def test_a_named_path_is_taken_or_refused() -> None:
    source, destination = pool(4, 1), pool(4, 2)
    with connected(source, destination, path="pinned relay", piece_bytes=12345, depth=2) as link:
        assert isinstance(link, PinnedRelayLink) and link.piece_bytes == 12345 and link.report.tried == ()
    with pytest.raises(TransferError, match="the pools are two"):
        connected(source, destination, path="shared pool")
    with pytest.raises(ConfigError, match="no path is named 'telepathy'; there are shared pool, same-device copy"):
        connected(source, destination, path="telepathy")


def test_layouts_that_differ_are_not_probed() -> None:
    with pytest.raises(LayoutMismatchError, match="model"):
        connected(pool(4, 1), pool(4, 2, model="other"))


@given(rate=st.floats(0.01, 1e4), latency=st.floats(0, 1), sizes=st.sets(st.integers(1, 10**9), min_size=2, max_size=5))
def test_the_fit_recovers_a_line(rate: float, latency: float, sizes: set[int]) -> None:
    points = [(size, latency + size / rate / 1e9) for size in sizes]
    found, rest = fit(points)
    for size, seconds in points:
        assert rest + size / found / 1e9 == pytest.approx(seconds, rel=1e-3) or found == pytest.approx(
            max(points)[0] / max(points)[1] / 1e9
        )


def test_the_fit_survives_noise() -> None:
    assert fit([(100, 2.0), (200, 1.0)]) == (200 / 1e9, 1.0)
    assert fit([(100, 2.0)]) == (50 / 1e9, 2.0)


# --- throttled -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gb_s", [0, -1.0, float("nan"), float("inf"), pytest.param(10**400, id="huge"), True, "1"])
def test_a_bandwidth_must_be_above_zero(gb_s) -> None:
    with link_of(SameDeviceLink, pool(2, 1), pool(2, 2)) as inner:
        with pytest.raises(ConfigError, match="above 0 GB/s"):
            ThrottledLink(inner, gb_s)
        with pytest.raises(ConfigError, match="latency"):
            ThrottledLink(inner, 1.0, -0.1)


@pytest.mark.parametrize("layered", [False, True], ids=["whole", "layered"])
@pytest.mark.parametrize("kind", [*COPYING, SharedPoolLink], ids=lambda kind: kind.path)
def test_a_throttled_link_takes_its_time(kind: type, layered: bool) -> None:
    source = pool(12, 1)
    shared = kind is SharedPoolLink
    destination = source if shared else pool(12, 2)
    sent, before = bits(source), bits(destination)
    one, two = (
        (handoff(source, [1, 2], [1, 2]), handoff(source, [3], [3]))
        if shared
        else (random_handoff(source, destination, size, size) for size in (8, 4))
    )
    inner = SharedPoolLink(source) if shared else link_of(kind, source, destination)
    num_bytes = (one.num_blocks + two.num_blocks) * source.bytes_per_block
    gb_s, latency = num_bytes / 0.06 / 1e9, 0.02
    with ThrottledLink(inner, gb_s, latency) as link:
        begin = time.perf_counter()
        transfers = [link.open(one), link.open(two)]
        for transfer in transfers:
            if layered:
                for layer in range(LAYERS):
                    transfer.send_layer(layer)
            else:
                transfer.send_rest()
        assert transfers[1].wait(20) and transfers[0].done()
        assert time.perf_counter() - begin >= 0.08, "sooner than the bytes over the rate"
        assert all(t.seconds >= t.handoff.num_blocks * source.bytes_per_block / gb_s / 1e9 for t in transfers)
        assert link.path == f"throttled({kind.path}, {gb_s:g} GB/s)"
        assert transfers[0].bytes == one.num_blocks * source.bytes_per_block
    assert torch.equal(bits(destination), expected(before, sent, one, two))


def test_a_throttled_transfer_can_be_cancelled() -> None:
    source, destination = pool(8, 1), pool(8, 2)
    with ThrottledLink(link_of(SameDeviceLink, source, destination), 1e-6) as link:  # hours
        transfer = link.send(handoff(source, [0], [0]))
        assert not transfer.wait(0.05)
        transfer.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            transfer.wait(20)
        assert transfer.done()


def test_what_fails_below_fails_above() -> None:
    source, destination = pool(8, 1), pool(8, 2)
    inner = link_of(FaultyRelay, source, destination)
    inner.raise_at = (1,)
    with ThrottledLink(inner, 10.0) as link:
        with pytest.raises(TransferError, match="injected fault"):
            link.send(handoff(source, [0], [0])).wait(20)
        assert link.send(handoff(source, [1], [1])).wait(20)


def test_a_link_that_does_not_stop_says_so() -> None:
    go_on = threading.Event()

    class Stuck(SameDeviceLink):
        CLOSE_SECONDS = 0.05

        def _copy(self, load, slot):
            assert go_on.wait(20)
            return super()._copy(load, slot)

    link = link_of(Stuck, pool(2, 1), pool(2, 2))
    link.send(handoff(link.source, [0], [0]))
    with pytest.raises(LinkStalledError, match=r"has not stopped after 0\.05 s"):
        link.close()
    go_on.set()
    link._thread.join(20)
