"""Helpers of the server's tests: servers on fake workers and links, and what must hold when one is closed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nanopd.router.decision import Decision, Path
from nanopd.router.server import Server
from nanopd.workers.worker import DecodeWorker, Worker
from tests.fake_cluster import all_links
from tests.fake_link import FakeLink
from tests.fake_runner import VOCAB

MAX_LEN = 64


class Always:
    def __init__(self, path: Path) -> None:
        self.name, self.path = f"always {path}", path

    def decide(self, request: object, snapshot: object, predicted_output: float | None = None) -> Decision:
        return Decision(self.path, "always")


DISAGGREGATED, COLLOCATED = Always(Path.DISAGGREGATED), Always(Path.COLLOCATED)


def serve(workers: Sequence[Worker], policy: object = DISAGGREGATED, *, link: dict | None = None, **options) -> Server:
    by_name = {worker.name: worker for worker in workers}
    pairs = all_links(workers)
    links = {(p, d): FakeLink(by_name[p], by_name[d], seed=i, **(link or {})) for i, (p, d) in enumerate(pairs)}
    options.setdefault("vocab_size", VOCAB)
    return Server(workers, policy, links=links, eos_token_ids=(0,), seed=1, poll_s=0.005, **options)


def check_idle(server: Server) -> None:
    """Closed, every block free, no thread left."""
    server.close()
    central = server.central
    assert not central._entries and not central.desk.jobs and not len(central._moves)
    for worker in central.workers.values():
        blocks = worker.block_manager
        assert blocks.num_free_blocks == blocks.num_blocks, worker
        blocks.check_integrity([], [])
        assert not (isinstance(worker, DecodeWorker) and worker.reserved)
    own = (*server._workers, *server._pumps, server._speaker)
    assert [thread.name for thread in own if thread.is_alive()] == []


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Threads that a test before left behind are that test's failure, not this one's."""
    before = set(threading.enumerate())
    yield
    new = set(threading.enumerate()) - before
    assert [thread.name for thread in new if thread.name.startswith("nanopd")] == []


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 40))] for _ in range(count)]
