"""OutputDesk: which user requests are open, and whose output goes where."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from nanopd.engine.jobs import Job, OutputCallback
from nanopd.engine.outputs import RequestOutput
from nanopd.engine.request import FinishReason, Request


class OutputDesk:
    """Jobs in flight and outputs that are due. Its owner guards it with the lock that guards the schedulers.

    Only `run_callbacks` takes a lock, its own, and must be called without the owner's: a callback may call the owner.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self._watched: dict[str, Job] = {}  # those of which each token must be looked at
        self._ready: list[RequestOutput] = []
        self._callbacks: deque[tuple[OutputCallback, RequestOutput]] = deque()
        self._callback_lock = threading.RLock()  # callbacks in the order of their outputs

    @property
    def has_callbacks(self) -> bool:
        return bool(self._callbacks)

    def open(self, job: Job) -> None:
        self.jobs[job.request_id] = job
        if job.watched or job.stream:
            self._watched[job.request_id] = job

    def look_at(self, requests: Iterable[Request]) -> tuple[list[Job], list[tuple[Request, FinishReason]]]:
        """Decode the new tokens of ``requests`` where somebody looks at them.

        Returns the jobs that got on, and the requests that their text ends: by a stop string, or because the tokenizer
        raised (FAILED, with the job's ``error``). A request that a token limit has ended already keeps its state; its
        reason becomes the stop string that its last token completed.
        """
        progressed: dict[Job, None] = {}
        ended: list[tuple[Request, FinishReason]] = []
        if not self._watched:
            return [], ended
        for request in requests:
            job = self._watched.get(request.parent_id)
            if job is None or request not in job.sequences:
                continue
            progressed[job] = None
            reason = job.advance(request)
            if reason is not None and not request.is_finished:
                ended.append((request, reason))
            elif reason is not None and request.finish_reason is FinishReason.LENGTH:
                request.finish_reason = reason
        return list(progressed), ended

    def close(self, finished: Sequence[Request]) -> None:
        """Count finished sequences off; a job whose last sequence this was gets its final output."""
        for request in finished:
            job = self.jobs[request.parent_id]
            job.close_one()
            if job.done:
                del self.jobs[job.request_id]
                self._watched.pop(job.request_id, None)
                self._emit(job)

    def show_progress(self, jobs: Iterable[Job]) -> None:
        """A snapshot for each job that streams and is not done."""
        for job in jobs:
            if job.stream and not job.done:
                self._emit(job)

    def _emit(self, job: Job) -> None:
        output = job.output()
        if job.on_output is None:
            self._ready.append(output)
        else:
            self._callbacks.append((job.on_output, output))

    def poll(self) -> list[RequestOutput]:
        """Outputs of jobs without a callback, each once."""
        ready, self._ready = self._ready, []
        return ready

    def run_callbacks(self) -> None:
        """Hand outputs to their owners, in order. Raises the first error of a callback, when all have been called."""
        errors = []
        with self._callback_lock:
            while self._callbacks:
                callback, output = self._callbacks.popleft()
                try:
                    callback(output)
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]
