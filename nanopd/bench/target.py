"""Target: what load is put on. An engine that somebody steps, a server of workers, or a stand-in in a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from nanopd.engine.outputs import RequestOutput
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import EngineClosedError

if TYPE_CHECKING:
    from nanopd.engine.engine import Engine


class Target(Protocol):
    """Accepts requests from any thread without waiting for them; `nanopd.router.Server` and `EngineThread` do.

    ``clock``: seconds, the clock of the metrics. ``add_request`` raises a NanoPDError if it refuses the request, and
    else calls ``on_output`` from any thread: with the last output, and with ``stream`` also after each token.
    ``abort`` ends a request early, and its last output comes all the same.
    """

    @property
    def clock(self) -> Callable[[], float]: ...

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        arrival_time: float,
        stream: bool,
        on_output: Callable[[RequestOutput], None],
    ) -> str: ...

    def abort(self, request_id: str) -> None: ...


class EngineThread:
    """An engine with a thread that steps it while there is work, and sleeps while there is none.

    A context manager. ``close`` ends the thread after the step it is in and leaves the engine open.
    ``enter``: the context in which the thread runs, such as a CUDA stream.
    """

    def __init__(self, engine: Engine, enter: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.engine = engine
        self.error: Exception | None = None  # the first that a step or a callback raised
        self._enter = enter
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def clock(self) -> Callable[[], float]:
        return self.engine.clock

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        stream: bool = False,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> str:
        """As ``Engine.add_request``."""
        name = self.engine.add_request(
            prompt, params, request_id=request_id, arrival_time=arrival_time, stream=stream, on_output=on_output
        )
        self._wake.set()
        return name

    def abort(self, request_id: str) -> None:
        """As ``Engine.abort``."""
        self.engine.abort(request_id)
        self._wake.set()  # its blocks may be what another request waits for

    def close(self) -> None:
        """Raises the first error of the thread, if there was one."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        with self._enter():
            while not self._closed:
                self._wake.clear()  # before looking for work: what comes meanwhile sets it again
                try:
                    if not self.engine.advance():
                        self._wake.wait()
                except EngineClosedError:
                    return
                except Exception as error:
                    self.error = self.error or error
