"""Queues: where each unfinished request is, in order of arrival."""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter

from nanopd.engine.request import Request, RequestState
from nanopd.errors import DuplicateRequestError, UnknownRequestError

_by_arrival = attrgetter("arrival_order")


class Queues:
    """The scheduler's books. ``prefilling`` and ``running`` are sorted by arrival, and so is ``waiting``."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.transferring: dict[str, Request] = {}  # prefilled, blocks held until somebody fetches them
        self._requests: dict[str, Request] = {}  # every unfinished sequence
        self._groups: dict[str, list[Request]] = {}  # the same, by parent id
        self._num_arrivals = 0
        # Of those who wait or prefill; counted, as summing the queues for every arrival would be n².
        self._uncomputed_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_seated(self) -> int:
        """Requests that hold a seat (and blocks): prefilling or running."""
        return len(self.prefilling) + len(self.running)

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens to compute before all who wait or prefill can decode (a cached prefix of those who wait included)."""
        return self._uncomputed_tokens

    def check_new(self, request_id: str) -> None:
        """Raise DuplicateRequestError if a sequence, or a user's request, of this name is unfinished."""
        if request_id in self._requests or request_id in self._groups:
            raise DuplicateRequestError(f"request {request_id!r} is still in flight")

    def group(self, request_id: str) -> list[Request]:
        """The unfinished sequences of a user's request, the parent first. Raises UnknownRequestError."""
        if request_id not in self._groups:
            raise UnknownRequestError(f"no request {request_id!r} is in flight")
        return list(self._groups[request_id])

    def register(self, sequences: list[Request]) -> None:
        """Enter the sequences of one arrival into the books and give them their place in the order."""
        for request in sequences:
            request.arrival_order = (self._num_arrivals, request.sample_index)
            self._requests[request.request_id] = request
            self._groups.setdefault(request.parent_id, []).append(request)
        self._num_arrivals += 1

    def unregister(self, request: Request) -> None:
        del self._requests[request.request_id]
        group = self._groups[request.parent_id]
        group.remove(request)
        if not group:
            del self._groups[request.parent_id]

    def enter(self, request: Request) -> None:
        """Into the queue of its state, at its place."""
        if request.state is RequestState.RUNNING:
            insort(self.running, request, key=_by_arrival)
        elif request.state is RequestState.PREFILLING:
            insort(self.prefilling, request, key=_by_arrival)
            self._uncomputed_tokens += request.remaining_prefill
        elif request.state is RequestState.TRANSFERRING:
            self.transferring[request.request_id] = request
        elif request.state is RequestState.WAITING:
            self._enter_waiting(request)

    def _enter_waiting(self, request: Request) -> None:
        self._uncomputed_tokens += request.num_tokens
        if not self.waiting or self.waiting[-1].arrival_order < request.arrival_order:
            self.waiting.append(request)
            return
        index = 0  # preempted: nearly everybody in there arrived later, so this looks at few
        while self.waiting[index].arrival_order < request.arrival_order:
            index += 1
        self.waiting.insert(index, request)

    def prefilled(self, request: Request, num_computed: int) -> None:
        """The first ``num_computed`` tokens of a request in ``prefilling`` have their KV now."""
        self._uncomputed_tokens -= num_computed - request.num_computed_tokens
        request.num_computed_tokens = num_computed

    def leave(self, request: Request) -> None:
        """Out of the queue of its state. Raises UnknownRequestError if it is in none."""
        if request.request_id not in self._requests:
            raise UnknownRequestError(f"request {request.request_id!r} is not in flight")
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.PREFILLING:
            self.prefilling.remove(request)
            self._uncomputed_tokens -= request.remaining_prefill
        elif request.state is RequestState.TRANSFERRING:
            del self.transferring[request.request_id]
        elif self.waiting and self.waiting[0] is request:
            self.waiting.popleft()
            self._uncomputed_tokens -= request.num_tokens
        elif request in self.waiting:
            self.waiting.remove(request)
            self._uncomputed_tokens -= request.num_tokens
        else:  # a sibling that was to be forked from its parent
            for parent in self._groups[request.parent_id]:
                if request in parent.pending_siblings:
                    parent.pending_siblings.remove(request)

    def drop_finished_running(self) -> None:
        """``leave`` for many at once: a step may end all of its requests."""
        self.running = [request for request in self.running if request.state is RequestState.RUNNING]

    def latest(self) -> Request | None:
        """Of those with a seat, the one that arrived last."""
        if not self.prefilling or not self.running:
            seated = self.prefilling or self.running
            return seated[-1] if seated else None
        return max(self.prefilling[-1], self.running[-1], key=_by_arrival)
