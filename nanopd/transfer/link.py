"""Link and Transfer: what the rest of the system knows about moving KV. No torch, no thread, no device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nanopd.errors import LayoutMismatchError, TransferError
from nanopd.kv.fingerprint import LayoutFingerprint
from nanopd.transfer.handoff import Handoff

if TYPE_CHECKING:
    from nanopd.transfer.report import LinkReport


class Transfer(ABC):
    """One handoff on its way. Its methods may be called from any thread; none but ``wait`` blocks.

    Until ``done()`` is true the link may read the source blocks and write the destination blocks, however the transfer
    ends: neither may be freed before.
    """

    handoff: Handoff
    path: str  # the link's
    bytes: int  # that move; 0 on a shared pool

    @abstractmethod
    def send_layer(self, layer: int) -> None:
        """Move one layer, ordered after what the source stream has been given so far.

        To be called for 0, 1, ..., L-1, each once that layer's KV is enqueued on the source stream
        (``ModelRunner.launch(plan, after_layer=transfer.send_layer)``). Returns at once.

        Raises TransferError for any other order. A transfer that was cancelled or has failed ignores the call: the
        forward pass that makes it must not be disturbed.
        """

    @abstractmethod
    def send_rest(self) -> None:
        """``send_layer`` for every layer that was not sent yet, in as few pieces as the link can."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended: no byte moves any more. If it arrived, whatever the host launches on the destination
        from now on sees the data; whether it did is what ``wait`` says."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Block until ``done()``, at most ``timeout`` seconds (None: as long as it takes).

        Returns: True if the KV arrived, False if the time ran out first. Raises TransferError if it failed or was
        cancelled.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Stop as soon as possible; ``wait`` then raises TransferError. Nothing happens to one that has arrived."""

    @property
    @abstractmethod
    def error(self) -> TransferError | None:
        """Why it will not arrive, as soon as that is known."""

    @property
    @abstractmethod
    def seconds(self) -> float | None:
        """First byte to last byte; None before it has arrived."""


class Link(ABC):
    """A way from one pool to another, in one direction. Many transfers may be under way; they move in order.

    Args:
        layout: of both pools.
        bytes_per_block: over all layers, keys and values.
        source_blocks, destination_blocks: how many blocks the pools have.
    """

    path: str
    report: LinkReport | None = None  # what probing found, if this link was chosen by it

    def __init__(
        self, layout: LayoutFingerprint, bytes_per_block: int, source_blocks: int, destination_blocks: int
    ) -> None:
        self.layout, self.bytes_per_block = layout, bytes_per_block
        self.source_blocks, self.destination_blocks = source_blocks, destination_blocks

    @abstractmethod
    def open(self, handoff: Handoff) -> Transfer:
        """Check ``handoff`` and make room for it; nothing moves yet.

        Raises LayoutMismatchError (its fingerprint is not this link's) or TransferError (a block that does not exist,
        a closed link).
        """

    def send(self, handoff: Handoff) -> Transfer:
        """``open``, and send every layer, ordered after what the source stream has been given so far."""
        transfer = self.open(handoff)
        transfer.send_rest()
        return transfer

    @abstractmethod
    def close(self) -> None:
        """Fail what was not sent in full, let the rest arrive, end the link's thread. Twice does no harm."""

    def check(self, handoff: Handoff) -> None:
        """Raise what ``open`` raises about the handoff itself."""
        refuse_differences(handoff.fingerprint, self.layout, f"{handoff} over {self.path}")
        for blocks, limit, side in (
            (handoff.source_blocks, self.source_blocks, "source"),
            (handoff.destination_blocks, self.destination_blocks, "destination"),
        ):
            if blocks and not 0 <= min(blocks) <= max(blocks) < limit:
                wrong = next(block for block in blocks if not 0 <= block < limit)
                raise TransferError(f"{handoff}: block {wrong} is not in the {side} pool of {limit} blocks")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def refuse_differences(one: LayoutFingerprint, other: LayoutFingerprint, where: str) -> None:
    """Raises LayoutMismatchError, naming every field in which the layouts differ."""
    if differences := one.differences(other):
        raise LayoutMismatchError(f"{where}: the KV layouts differ in {'; '.join(differences)}")
