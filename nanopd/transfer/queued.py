"""QueuedLink: a link with a queue and one thread that works it off. What a piece's move means is up to the subclass.

The caller's thread, which computes or launches the model, only marks how far its stream has come and appends to the
queue. Copies on the CPU, or the launches that make up a copy on a GPU, are the link's own thread's work.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from nanopd.errors import LinkStalledError, TransferError
from nanopd.kv.fingerprint import LayoutFingerprint
from nanopd.transfer.handoff import Handoff
from nanopd.transfer.link import Link, Transfer
from nanopd.transfer.marks import HostMark, Mark
from nanopd.transfer.pieces import Piece


@dataclass(frozen=True, slots=True)
class Moved:
    """A piece that was moved, or whose move is enqueued."""

    piece: Piece
    begin: Mark
    end: Mark


@dataclass(frozen=True, slots=True)
class Job:
    """Layers of a transfer that may move once ``ready`` is done."""

    transfer: QueuedTransfer
    layers: range
    ready: Mark


class QueuedTransfer(Transfer):
    """See ``Transfer``. Its fields change under the lock of its link; they are the link's to change."""

    def __init__(self, link: QueuedLink, handoff: Handoff, num_bytes: int) -> None:
        self.handoff, self.path, self.bytes = handoff, link.path, num_bytes
        self.moved: list[Moved] = []  # in order
        self.state: Any = None  # what the link keeps for it between its pieces
        self.layers_sent = 0  # by the caller
        self.layers_queued = 0
        self.layers_moved = 0
        self.busy = False  # the link's thread is at it
        self.last: Mark | None = None  # done once all that was enqueued for it is
        self._link = link
        self._error: TransferError | None = None

    def send_layer(self, layer: int) -> None:
        if self.stopped:
            return
        if layer != self.layers_sent:
            raise TransferError(f"{self.handoff}: layer {layer} was sent, layer {self.layers_sent} is next")
        self.layers_sent += 1
        num_layers, waiting = self._link.layout.num_layers, self.layers_sent - self.layers_queued
        enough = waiting * self.bytes >= max(1, self._link.least_bytes) * num_layers
        if enough or self.layers_sent == num_layers:
            self._link.submit(self, range(self.layers_queued, self.layers_sent))

    def send_rest(self) -> None:
        self.send_layers(range(self.layers_queued, self._link.layout.num_layers))

    def send_layers(self, layers: range, ready: Mark | None = None) -> None:
        """The next layers, which may move once ``ready`` is done (None: what the source stream was given so far)."""
        self._link.submit(self, layers, ready)

    def done(self) -> bool:
        if not self._handled():
            return False
        try:
            return self.last is None or self.last.done()
        except Exception as error:  # a device that failed says so here
            self._link.stop(self, failure(self.handoff, error))
            return True

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.perf_counter() + timeout
        with self._link.changed:
            if not self._link.changed.wait_for(self._handled, timeout):
                return False
        if self.last is not None:
            rest = None if deadline is None else max(0.0, deadline - time.perf_counter())
            try:
                if not self.last.wait(rest):
                    return False
            except Exception as error:  # as in done()
                self._link.stop(self, failure(self.handoff, error))
        if self._error is not None:
            raise self._error
        return True

    def cancel(self) -> None:
        if not self.done():
            self._link.stop(self, TransferError(f"{self.handoff} was cancelled"))

    @property
    def error(self) -> TransferError | None:
        return self._error

    @property
    def seconds(self) -> float | None:
        if self._error is not None or not self.done():
            return None
        return self.moved[-1].end.seconds_since(self.moved[0].begin) if self.moved else 0.0

    @property
    def stopped(self) -> bool:
        return self._error is not None

    def fail(self, error: TransferError) -> None:
        """Keep the first reason; the link calls this under its lock."""
        self._error = self._error or error

    def _handled(self) -> bool:
        """The link's thread is through with it."""
        return not self.busy and (self.stopped or self.layers_moved == self._link.layout.num_layers)


class QueuedLink(Link):
    """Base of all links that exist. Subclasses say into which pieces layers are cut and what moving one means.

    A piece that raises fails its transfer, with the reason; the link goes on with the next one.
    """

    least_bytes = 0  # layers sent one by one are queued once there are so many bytes of them
    CLOSE_SECONDS = 30.0  # a link that has not stopped by then is reported rather than waited for

    def __init__(
        self, layout: LayoutFingerprint, bytes_per_block: int, source_blocks: int, destination_blocks: int
    ) -> None:
        super().__init__(layout, bytes_per_block, source_blocks, destination_blocks)
        self.changed = threading.Condition()
        self.closed = False
        self._queue: deque[Job] = deque()
        self._open: weakref.WeakSet[QueuedTransfer] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name=f"link: {self.path}", daemon=True)
        self._thread.start()

    # --- for subclasses ----------------------------------------------------------------------------------------

    @abstractmethod
    def pieces(self, handoff: Handoff, layers: range) -> Iterator[Piece]:
        """What is moved at a time."""

    @abstractmethod
    def move(self, transfer: QueuedTransfer, piece: Piece, ready: Mark) -> Moved:
        """Move one piece, or enqueue its move, after ``ready``. Runs in the link's thread."""

    def bytes_of(self, handoff: Handoff) -> int:
        """How many bytes its transfer moves: all of its KV."""
        return handoff.num_blocks * self.bytes_per_block

    def ready(self) -> Mark:
        """A mark after all that the source stream has been given so far. Runs in the caller's thread."""
        return HostMark()

    def on_stop(self, transfer: QueuedTransfer) -> None:
        """A transfer was cancelled or has failed: stop what is under way. Called without the lock."""

    def inside(self) -> AbstractContextManager[object]:
        """What the link's thread runs in."""
        return nullcontext()

    # --- the link ----------------------------------------------------------------------------------------------

    def open(self, handoff: Handoff) -> QueuedTransfer:
        self.check(handoff)
        transfer = QueuedTransfer(self, handoff, self.bytes_of(handoff))
        with self.changed:
            self._refuse_if_closed(handoff)
            self._open.add(transfer)
        return transfer

    def send(self, handoff: Handoff) -> QueuedTransfer:
        transfer = self.open(handoff)
        transfer.send_rest()
        return transfer

    def submit(self, transfer: QueuedTransfer, layers: range, ready: Mark | None = None) -> None:
        """Queue the next layers of a transfer. Layers of one that has stopped are ignored."""
        if not layers or transfer.stopped:
            return
        if ready is None:
            ready = self.ready()
        with self.changed:
            if not transfer.stopped:
                self._queue.append(Job(transfer, layers, ready))
                transfer.layers_sent = transfer.layers_queued = layers.stop
                self.changed.notify_all()

    def stop(self, transfer: QueuedTransfer, error: TransferError) -> None:
        """End a transfer with ``error``: none of its pieces moves any more, but for those under way."""
        with self.changed:
            transfer.fail(error)
            self.changed.notify_all()
        self.on_stop(transfer)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            unsent = [t for t in self._open if t.layers_queued < self.layout.num_layers and not t.stopped]
        for transfer in unsent:
            self.stop(transfer, TransferError(f"{transfer.handoff}: the link ({self.path}) was closed under way"))
        self._thread.join(self.CLOSE_SECONDS)
        if self._thread.is_alive():
            raise LinkStalledError(f"link ({self.path}) has not stopped after {self.CLOSE_SECONDS:g} s")

    # --- its thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self.inside():
            while (job := self._take()) is not None:
                try:
                    self._carry_out(job)
                except Exception as error:
                    self.stop(job.transfer, failure(job.transfer.handoff, error))
                with self.changed:
                    job.transfer.busy = False
                    self.changed.notify_all()
                del job  # or the thread would keep the last transfer alive

    def _take(self) -> Job | None:
        """The next job, once there is one; None when the link was closed and nothing is left."""
        with self.changed:
            while True:
                self.changed.wait_for(lambda: self._queue or self.closed)
                if not self._queue:
                    return None
                job = self._queue.popleft()
                if not job.transfer.stopped:  # or it would be busy once more after it was done
                    job.transfer.busy = True
                    return job

    def _carry_out(self, job: Job) -> None:
        transfer = job.transfer
        for piece in self.pieces(transfer.handoff, job.layers):
            if transfer.stopped:
                return
            moved = self.move(transfer, piece, job.ready)
            transfer.last = moved.end
            transfer.moved.append(moved)
        if transfer.stopped:
            return
        if not transfer.moved:
            transfer.last = job.ready  # nothing to move: it has arrived once the source has computed it
        transfer.layers_moved = job.layers.stop
        if transfer.layers_moved == self.layout.num_layers:
            transfer.state = None

    def _refuse_if_closed(self, handoff: Handoff) -> None:
        if self.closed:
            raise TransferError(f"{handoff}: the link ({self.path}) is closed")


def failure(handoff: Handoff, error: Exception) -> TransferError:
    """What a transfer ends with when ``error`` was raised under way."""
    if isinstance(error, TransferError):
        return error
    result = TransferError(f"{handoff} failed: {type(error).__name__}: {error}")
    result.__cause__ = error
    return result
