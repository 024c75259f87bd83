"""A link between fake runners that is late, loses its cable, or stalls, as a seed has it."""

from __future__ import annotations

import random
import threading
import time
from queue import SimpleQueue

from nanopd.errors import TransferError
from nanopd.transfer.handoff import Handoff
from nanopd.workers.worker import Worker


class FakeTransfer:
    def __init__(self, link: FakeLink, handoff: Handoff) -> None:
        self.handoff = handoff
        self.link = link
        self.layers = 0
        self.error: TransferError | None = None
        self._ended = threading.Event()

    def send_layer(self, layer: int) -> None:
        assert layer == self.layers
        self.layers += 1
        if self.layers == 2:
            self.link.queue.put(self)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._ended.wait(timeout):
            return False
        if self.error is not None:
            raise self.error
        return True

    def cancel(self) -> None:
        if self.error is None and not self._ended.is_set():
            self.error = TransferError(f"{self.handoff} was cancelled")
            if self.layers < 2:
                self.end()

    def end(self) -> None:
        self._ended.set()


class FakeLink:
    """One thread moves slots between two runners. Even what was cancelled is written, late, as a stalled copy would."""

    def __init__(
        self,
        source: Worker,
        destination: Worker,
        *,
        seed: int = 0,
        faults: float = 0.0,
        stall_s: float = 0.0,
        delay_s: float = 0.0,
    ) -> None:
        self.source, self.destination = source.runner, destination.runner
        self.random = random.Random(seed)
        self.faults, self.stall_s, self.delay_s = faults, stall_s, delay_s
        self.queue: SimpleQueue[FakeTransfer | None] = SimpleQueue()
        self.num_moved = 0
        self._thread = threading.Thread(target=self._run, name="nanopd fake link", daemon=True)
        self._thread.start()
        self._open: list[FakeTransfer] = []

    def open(self, handoff: Handoff) -> FakeTransfer:
        if self.random.random() < self.faults / 2:
            raise TransferError("the socket is taken")
        transfer = FakeTransfer(self, handoff)
        self._open.append(transfer)
        return transfer

    def send(self, handoff: Handoff) -> FakeTransfer:
        transfer = self.open(handoff)
        transfer.send_layer(0)
        transfer.send_layer(1)
        return transfer

    def close(self) -> None:
        if self._thread.is_alive():
            self.queue.put(None)
            self._thread.join()
        for transfer in self._open:
            if not transfer._ended.is_set():
                transfer.error = transfer.error or TransferError("the link was closed")
                transfer.end()

    def _run(self) -> None:
        while (transfer := self.queue.get()) is not None:
            if self.delay_s:
                time.sleep(self.random.random() * self.delay_s)
            if self.random.random() < self.faults:
                time.sleep(self.stall_s)
                if self.random.random() < 0.5:
                    transfer.error = TransferError("the cable came off")
            size = self.source.block_size
            for a, b in zip(transfer.handoff.source_blocks, transfer.handoff.destination_blocks, strict=True):
                self.destination.slots[b * size : (b + 1) * size] = self.source.slots[a * size : (a + 1) * size]
            self.num_moved += 1
            transfer.end()
