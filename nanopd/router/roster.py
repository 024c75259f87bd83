"""Roster: the workers there are, and which of them can serve what."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from nanopd.engine.request import Request
from nanopd.errors import ConfigError, InvalidRequestError, NoWorkerError
from nanopd.router.decision import Path
from nanopd.workers.worker import DecodeWorker, PrefillWorker, Role, Worker


class Roster:
    """Workers by name, and the pairs of them between which KV can move.

    Raises ConfigError: no worker, a name twice, or layouts of two linked workers that differ.
    """

    def __init__(self, workers: Sequence[Worker], links: Collection[tuple[str, str]]) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.links = frozenset(links)
        if not workers:
            raise ConfigError("at least one worker is needed, got none")
        if len(self.workers) != len(workers):
            raise ConfigError(f"worker names must be unique, got {sorted(worker.name for worker in workers)}")
        for source, destination in links:
            for name in (source, destination):
                if name not in self.workers:
                    raise ConfigError(f"a link names worker {name!r}; there are {sorted(self.workers)}")
            mine, theirs = self.workers[source].fingerprint, self.workers[destination].fingerprint
            if mine.differences(theirs):
                raise ConfigError(f"{source} and {destination} differ in layout: {'; '.join(mine.differences(theirs))}")

        self._pools = {one.name: [other for other in workers if other.shares_pool_with(one)] for one in workers}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())

    def alive(self, role: Role) -> list[Worker]:
        """Workers to which requests that need this role can go now."""
        return [worker for worker in self if worker.alive and worker.serves(role)]

    def takers(self, request: Request) -> list[Worker]:
        """Collocated workers that can take the request: pools may differ in size."""
        return [worker for worker in self.alive(Role.COLLOCATED) if _takes(worker, request)]

    def pool_of(self, worker: Worker) -> list[Worker]:
        """Workers that take blocks from the same pool, the worker itself included."""
        return self._pools[worker.name]

    def pairs(self) -> list[tuple[PrefillWorker, DecodeWorker]]:
        """Prefill and decode workers, alive, between which KV can move or need not."""
        return [
            (prefill, decode)
            for prefill in self.alive(Role.PREFILL)
            for decode in self.alive(Role.DECODE)
            if isinstance(prefill, PrefillWorker)
            and isinstance(decode, DecodeWorker)
            and (prefill.shares_pool_with(decode) or (prefill.name, decode.name) in self.links)
        ]

    def possible_path(self, request: Request, wanted: Path) -> Path:
        """``wanted``, or the other path if no worker of that one can ever take the request.

        Raises what the workers of the wanted path raise, or NoWorkerError.
        """
        problem: InvalidRequestError | None = None
        for path in (wanted, *(path for path in Path if path is not wanted)):
            try:
                self._check(request, path)
                return path
            except InvalidRequestError as error:
                problem = error if problem is None or isinstance(problem, NoWorkerError) else problem
        assert problem is not None
        raise problem

    def _check(self, request: Request, path: Path) -> None:
        """Raise an InvalidRequestError if nobody on this path can ever take the request."""
        problem: InvalidRequestError | None = None
        alone = [(worker,) for worker in self.alive(Role.COLLOCATED)]
        for workers in alone if path is Path.COLLOCATED else self.pairs():
            try:
                for worker in workers:
                    worker.check(request)
                return
            except InvalidRequestError as error:
                problem = error
        raise problem or NoWorkerError(f"no {path.value} worker is alive for request {request.request_id!r}")


def load_of(worker: Worker) -> tuple[int, int, int]:
    """Least loaded first: tokens to compute, requests, then the fuller pool."""
    scheduler = worker.scheduler
    num_requests = scheduler.config.max_num_seqs - scheduler.num_free_seats + len(scheduler.waiting)
    return scheduler.uncomputed_tokens, num_requests, -worker.block_manager.num_free_blocks


def _takes(worker: Worker, request: Request) -> bool:
    try:
        worker.check(request)
    except InvalidRequestError:
        return False
    return True
