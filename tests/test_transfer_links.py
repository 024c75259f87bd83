"""Links on CPU pools: every bit arrives, nothing else is written, in every order of sending; faults stay in bounds."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_cases import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    COPYING,
    LAYERS,
    FaultyPeer,
    FaultyRelay,
    bits,
    expected,
    handoff,
    link_of,
    pool,
    random_handoff,
)

from nanopd.errors import ConfigError, LayoutMismatchError, TransferError
from nanopd.transfer.cache_link import CacheLink
from nanopd.transfer.pieces import cut
from nanopd.transfer.pinned_relay import PinnedRelayLink
from nanopd.transfer.same_device import SameDeviceLink
from nanopd.transfer.shared_pool import SharedPoolLink

PIECES = [1, 3 * BLOCK_BYTES, 1 << 20]  # a block at a time; some blocks; several layers


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("link: ")] == []


@pytest.mark.parametrize("layered", [False, True], ids=["whole", "layered"])
@pytest.mark.parametrize("piece_bytes", PIECES)
@pytest.mark.parametrize("size", [1, 7, 20])
@pytest.mark.parametrize("kind", COPYING, ids=lambda kind: kind.path)
def test_every_bit_arrives(kind: type[CacheLink], size: int, piece_bytes: int, layered: bool) -> None:
    source, destination = pool(23, 1), pool(31, 2)
    sent, before = bits(source), bits(destination)
    h = random_handoff(source, destination, size, seed=size)
    with link_of(kind, source, destination, piece_bytes=piece_bytes, depth=2) as link:
        if layered:
            transfer = link.open(h)
            assert not transfer.done() and transfer.seconds is None
            for layer in range(LAYERS):
                transfer.send_layer(layer)
        else:
            transfer = link.send(h)
        assert transfer.wait(20) and transfer.done() and transfer.error is None
        assert transfer.handoff is h and transfer.path == kind.path
        assert transfer.bytes == size * LAYERS * BLOCK_BYTES
        assert transfer.seconds is not None and transfer.seconds > 0
    assert torch.equal(bits(destination), expected(before, sent, h))
    assert torch.equal(bits(source), sent)


@pytest.mark.parametrize("kind", COPYING, ids=lambda kind: kind.path)
def test_a_layer_leaves_before_the_next_is_computed(kind: type[CacheLink]) -> None:
    """Each layer is written just before it is sent: whatever the link read too early would be the old bits."""
    source, destination = pool(8, 1), pool(8, 2)
    computed, before = pool(8, 3), bits(destination)
    h = random_handoff(source, destination, 5, seed=3)
    with link_of(kind, source, destination) as link:
        transfer = link.open(h)
        for layer in range(LAYERS):
            source.tensor[layer] = computed.tensor[layer]
            transfer.send_layer(layer)
        assert transfer.wait(20)
    assert torch.equal(bits(destination), expected(before, bits(computed), h))


@pytest.mark.parametrize("kind", COPYING, ids=lambda kind: kind.path)
def test_handoffs_in_flight_at_once(kind: type[CacheLink]) -> None:
    """Twelve at once, half of them sent layer by layer in turns; destinations overlap, so order shows."""
    source, destination = pool(40, 1), pool(16, 2)
    sent, before = bits(source), bits(destination)
    handoffs = [random_handoff(source, destination, 1 + i % 7, seed=i) for i in range(12)]
    with link_of(kind, source, destination, piece_bytes=4 * BLOCK_BYTES, depth=2) as link:
        transfers = [link.send(h) for h in handoffs[:6]] + [link.open(h) for h in handoffs[6:]]
        for layer in range(LAYERS):
            for transfer in transfers[6:]:
                transfer.send_layer(layer)
        assert all(transfer.wait(20) for transfer in transfers)
    assert torch.equal(bits(destination), expected(before, sent, *handoffs))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), kind=st.sampled_from(COPYING))
def test_any_handoffs_in_any_pieces(data: st.DataObject, kind: type[CacheLink]) -> None:
    source, destination = pool(data.draw(st.integers(1, 12)), 1), pool(data.draw(st.integers(1, 12)), 2)
    sent, before = bits(source), bits(destination)
    handoffs = []
    for number in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.integers(0, min(source.num_blocks, destination.num_blocks)))
        blocks = data.draw(st.lists(st.integers(0, source.num_blocks - 1), min_size=size, max_size=size))
        targets = data.draw(st.permutations(range(destination.num_blocks)))[:size]
        handoffs.append(handoff(source, blocks, targets, number=number))
    piece_bytes = data.draw(st.integers(1, 30)) * BLOCK_BYTES // 2
    with link_of(kind, source, destination, piece_bytes=piece_bytes, depth=data.draw(st.integers(1, 3))) as link:
        transfers = []
        for h in handoffs:
            transfers.append(link.open(h))
            for layer in range(data.draw(st.integers(0, LAYERS))):
                transfers[-1].send_layer(layer)
            transfers[-1].send_rest()
        assert all(transfer.wait(20) for transfer in transfers)
    assert torch.equal(bits(destination), expected(before, sent, *handoffs))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 9), st.integers(1, 50), st.integers(1, 2000))
def test_pieces_cover_everything_once(first: int, count: int, blocks: int, block_bytes: int, most: int) -> None:
    pieces = list(cut(range(first, first + count), blocks, block_bytes, most))
    covered = [(layer, block) for piece in pieces for layer in piece.layers for block in piece.blocks]
    assert covered == [(layer, block) for layer in range(first, first + count) for block in range(blocks)]
    for piece in pieces:
        size = len(piece.layers) * len(piece.blocks) * block_bytes
        assert size <= most or (len(piece.layers), len(piece.blocks)) == (1, 1)


@pytest.mark.parametrize(
    ("least", "jobs"),
    [
        (1, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        (2, [(0, 2), (2, 4), (4, 5)]),
        (3, [(0, 3), (3, 5)]),
        (9, [(0, 5)]),
    ],
    ids=str,
)
def test_small_layers_leave_together(least: int, jobs: list[tuple[int, int]]) -> None:
    source, destination = pool(8, 1), pool(8, 2)
    sent, before = bits(source), bits(destination)
    h = random_handoff(source, destination, 4, seed=1)
    with link_of(SameDeviceLink, source, destination, least_bytes=least * 4 * BLOCK_BYTES) as link:
        transfer = link.open(h)
        for layer in range(LAYERS):
            transfer.send_layer(layer)
        assert transfer.wait(20)
        assert [(moved.piece.layers.start, moved.piece.layers.stop) for moved in transfer.moved] == jobs
        rest = link.open(h)
        rest.send_layer(0)
        rest.send_rest()
        assert rest.wait(20)
    assert torch.equal(bits(destination), expected(before, sent, h))


@pytest.mark.parametrize("piece_bytes", [1 << 20, 16 << 20])
def test_on_the_cpu_layers_leave_once_they_are_2_mb_whatever_the_pieces(piece_bytes: int) -> None:
    source, destination = pool(140, 1), pool(140, 2)
    with link_of(SameDeviceLink, source, destination, least_bytes=None, piece_bytes=piece_bytes) as link:
        transfer = link.open(random_handoff(source, destination, 130, seed=1))  # layers of 0.53 MB
        left = []
        for layer in range(LAYERS):
            transfer.send_layer(layer)
            left.append(transfer.layers_queued)
        assert transfer.wait(20)
    assert 3 * 130 * BLOCK_BYTES < 2 << 20 < 4 * 130 * BLOCK_BYTES and left == [0, 0, 0, 4, 5]


def test_copies_run_in_the_links_thread() -> None:
    source, destination = pool(4, 1), pool(4, 2)
    seen = []

    class Watched(SameDeviceLink):
        def _copy(self, load, slot):
            seen.append(threading.current_thread())
            return super()._copy(load, slot)

    with link_of(Watched, source, destination) as link:
        assert link.send(random_handoff(source, destination, 4, 0)).wait(20)
    assert seen and threading.current_thread() not in seen and len(set(seen)) == 1


# --- shared pool ---------------------------------------------------------------------------------------------------


def test_a_shared_pool_moves_nothing() -> None:
    shared = pool(9, 1)
    before = bits(shared)
    with SharedPoolLink(shared) as link:
        transfer = link.open(handoff(shared, [3, 5], [3, 5], 11))
        for layer in range(LAYERS):
            assert not transfer.done()
            transfer.send_layer(layer)
        assert transfer.wait(20) and transfer.done()
        assert (transfer.bytes, transfer.seconds, transfer.path) == (0, 0.0, "shared pool")
        with pytest.raises(TransferError, match="stay where they are"):
            link.open(handoff(shared, [3, 5], [5, 3]))
    assert torch.equal(bits(shared), before)


# --- refused -------------------------------------------------------------------------------------------------------


def test_layouts_that_differ_are_refused_before_a_byte_moves() -> None:
    source, destination = pool(4, 1), pool(4, 2)
    before = bits(destination)
    with pytest.raises(LayoutMismatchError, match="model: test and other"):
        link_of(SameDeviceLink, source, pool(4, 2, model="other"))
    with pytest.raises(LayoutMismatchError, match="dtype: bfloat16 and float16"):
        link_of(PinnedRelayLink, source, pool(4, 2, dtype=torch.float16))
    with link_of(PinnedRelayLink, source, destination) as link:
        stranger = handoff(pool(4, 1, model="other"), [0], [1])
        for attempt in (link.open, link.send):
            with pytest.raises(LayoutMismatchError, match="model: other and test"):
                attempt(stranger)
    assert torch.equal(bits(destination), before)


@pytest.mark.parametrize(
    ("blocks", "targets", "message"),
    [
        ([4], [0], "block 4 is not in the source pool of 4 blocks"),
        ([0, -1], [0, 1], "block -1 is not in the source pool"),
        ([0], [6], "block 6 is not in the destination pool of 6 blocks"),
        ([0, 1], [2], "2 blocks are to move into 1"),
        ([0, 1], [2, 2], "named twice"),
    ],
    ids=["beyond source", "negative", "beyond destination", "lengths", "twice"],
)
def test_bad_block_lists_are_refused(blocks: list[int], targets: list[int], message: str) -> None:
    source, destination = pool(4, 1), pool(6, 2)
    with link_of(PinnedRelayLink, source, destination) as link, pytest.raises(TransferError, match=message):
        link.open(handoff(source, blocks, targets, 0))


def test_tokens_must_fit_their_blocks() -> None:
    source = pool(4, 1)
    with pytest.raises(TransferError, match="9 tokens do not fit 1 blocks with 8 slots"):
        handoff(source, [0], [0], BLOCK_SIZE + 1)


def test_layers_come_in_order() -> None:
    source, destination = pool(4, 1), pool(4, 2)
    with link_of(SameDeviceLink, source, destination) as link:
        transfer = link.open(handoff(source, [0], [0]))
        with pytest.raises(TransferError, match="layer 1 was sent, layer 0 is next"):
            transfer.send_layer(1)
        transfer.send_layer(0)
        with pytest.raises(TransferError, match="layer 0 was sent, layer 1 is next"):
            transfer.send_layer(0)
        transfer.send_rest()
        assert transfer.wait(20)


@pytest.mark.parametrize("options", [{"piece_bytes": 0}, {"depth": 0}, {"depth": 1.5}, {"least_bytes": "2"}], ids=str)
def test_sizes_must_make_sense(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        link_of(PinnedRelayLink, pool(2, 1), pool(2, 2), **options)


# --- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FaultyRelay, FaultyPeer], ids=lambda kind: kind.path)
def test_a_failure_in_the_middle_fails_that_transfer_alone(kind: type) -> None:
    source, destination = pool(8, 1), pool(8, 2)
    sent = bits(source)
    with link_of(kind, source, destination, piece_bytes=BLOCK_BYTES, depth=2) as link:
        link.raise_at = (7,)
        failing = link.send(handoff(source, [0, 1], [0, 1], number=1))
        after = link.send(handoff(source, [2, 3], [2, 3], number=2))
        with pytest.raises(TransferError, match=r"handoff 1 .*RuntimeError: injected fault"):
            failing.wait(20)
        assert failing.done() and failing.seconds is None and isinstance(failing.error.__cause__, RuntimeError)
        failing.send_layer(3)  # what a forward pass that goes on would do
        assert after.wait(20)
        assert link.send(handoff(source, [4], [5])).wait(20)
    assert torch.equal(bits(destination)[:, :, [2, 3, 5]], sent[:, :, [2, 3, 4]])


def test_an_op_that_raises_fails_the_transfer() -> None:
    source, destination = pool(8, 1), pool(8, 2)
    with link_of(PinnedRelayLink, source, destination) as link:
        gather = link.source_ops.gather_blocks
        link.source_ops.gather_blocks = lambda *_: 1 / 0
        with pytest.raises(TransferError, match="ZeroDivisionError"):
            link.send(handoff(source, [0], [0])).wait(20)
        link.source_ops.gather_blocks = gather
        assert link.send(handoff(source, [0], [0])).wait(20)


def test_a_stalled_link_times_out_and_can_be_cancelled() -> None:
    source, destination = pool(8, 1), pool(8, 2)
    before = bits(destination)
    with link_of(FaultyRelay, source, destination, piece_bytes=BLOCK_BYTES) as link:
        link.stall_at = (3,)
        transfer, queued = link.send(handoff(source, [0, 1], [0, 1])), link.send(handoff(source, [2], [2]))
        assert not transfer.wait(0.05) and not transfer.done()
        assert not queued.wait(0.0)
        queued.cancel()
        assert queued.done(), "it had not begun"
        with pytest.raises(TransferError, match="cancelled"):
            queued.wait()
        transfer.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            transfer.wait(20)
        assert transfer.done()
        assert link.send(handoff(source, [4], [4])).wait(20), "the link works on"
    assert torch.equal(bits(destination)[-1, :, :4], before[-1, :, :4]), "no later layer moved"


def test_a_released_stall_arrives() -> None:
    source, destination = pool(8, 1), pool(8, 2)
    sent, before = bits(source), bits(destination)
    h = random_handoff(source, destination, 6, 0)
    with link_of(FaultyRelay, source, destination, piece_bytes=BLOCK_BYTES) as link:
        link.stall_at = (4,)
        transfer = link.send(h)
        assert not transfer.wait(0.05)
        link.release()
        assert transfer.wait(20)
    assert torch.equal(bits(destination), expected(before, sent, h))


def test_blocks_are_not_given_up_while_a_piece_is_under_way() -> None:
    """done() stays false between cancel() and the end of the piece that the thread is at."""
    source, destination = pool(4, 1), pool(4, 2)
    entered, go_on = threading.Event(), threading.Event()

    class Slow(SameDeviceLink):
        def _copy(self, load, slot):
            entered.set()
            assert go_on.wait(20)
            return super()._copy(load, slot)

    with link_of(Slow, source, destination) as link:
        transfer = link.send(handoff(source, [0], [0]))
        assert entered.wait(20)
        transfer.cancel()
        assert transfer.error is not None and not transfer.done()
        assert not transfer.wait(0.02)
        go_on.set()
        with pytest.raises(TransferError, match="cancelled"):
            transfer.wait(20)
        assert transfer.done()


def test_cancel_after_arrival_changes_nothing() -> None:
    source, destination = pool(4, 1), pool(4, 2)
    with link_of(SameDeviceLink, source, destination) as link:
        transfer = link.send(handoff(source, [0], [0]))
        assert transfer.wait(20)
        transfer.cancel()
        assert transfer.wait(20) and transfer.error is None


def test_close_lets_arrive_what_was_sent_and_fails_the_rest() -> None:
    source, destination = pool(8, 1), pool(8, 2)
    sent = bits(source)
    link = link_of(PinnedRelayLink, source, destination, piece_bytes=BLOCK_BYTES)
    whole, half = link.send(handoff(source, [0, 1], [6, 7])), link.open(handoff(source, [2], [3]))
    half.send_layer(0)
    link.close()
    link.close()
    assert whole.wait(0) and torch.equal(bits(destination)[:, :, [6, 7]], sent[:, :, [0, 1]])
    assert half.done()
    with pytest.raises(TransferError, match="closed under way"):
        half.wait()
    half.send_layer(1)
    for attempt in (link.open, link.send):
        with pytest.raises(TransferError, match="is closed"):
            attempt(handoff(source, [0], [0]))


def test_an_empty_handoff_arrives() -> None:
    source, destination = pool(4, 1), pool(4, 2)
    with link_of(PinnedRelayLink, source, destination) as link:
        transfer = link.send(handoff(source, [], [], 0))
        assert transfer.wait(20) and transfer.bytes == 0 and transfer.seconds == 0.0
