"""Clients of the server that wait for their outputs: run a list of prompts to the end, or watch one grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from nanopd.engine.outputs import RequestOutput
from nanopd.engine.prompts import Prompt, params_list, prompt_list
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import UnknownRequestError

if TYPE_CHECKING:
    from nanopd.router.server import Server


class ServerStream(Iterator[RequestOutput]):
    """The outputs of one request, growing: each holds everything so far, the last one is ``finished``.

    A context manager; ``close`` aborts the request if it has not finished. So does leaving it to the garbage collector.
    One thread reads it.
    """

    def __init__(self, server: Server, prompt: Prompt, params: SamplingParams | None) -> None:
        self._server = server
        self._outputs: SimpleQueue[RequestOutput] = SimpleQueue()
        self._done = True  # nothing to close yet, should the next line raise
        self.request_id = server.add_request(prompt, params, stream=True, on_output=self._outputs.put)
        self._done = False

    def __next__(self) -> RequestOutput:
        if self._done:
            raise StopIteration
        self._server.refuse_own_thread("reading a stream")
        try:
            output = self._outputs.get()
        except BaseException:  # Ctrl-C: nobody will come for the rest
            self.close()
            raise
        self._done = output.finished
        if output.error is not None:
            raise output.error
        return output

    def close(self) -> None:
        """Abort the request unless it has finished; the iteration ends."""
        if not self._done:
            self._done = True
            abort_if_there(self._server, self.request_id)

    def __enter__(self) -> ServerStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._done:
            self._server.abandon(self.request_id)


def generate_all(
    server: Server,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    use_tqdm: bool,
) -> list[RequestOutput]:
    """See ``Server.generate``."""
    from tqdm.auto import tqdm  # here, so that a simulator need not load it

    server.refuse_own_thread("generate")
    items = prompt_list(prompts)
    params = params_list(sampling_params, len(items))
    finished: SimpleQueue[RequestOutput] = SimpleQueue()
    ids: list[str] = []
    results: dict[str, RequestOutput] = {}
    with server.interrupt_guard as guard:
        try:
            for prompt, one in zip(items, params, strict=True):
                with guard.uninterrupted():  # or nobody would know what is to be aborted
                    ids.append(server.add_request(prompt, one, on_output=finished.put))
            with tqdm(total=len(ids), desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
                while len(results) < len(ids):
                    output = finished.get()
                    if output.error is not None:
                        raise output.error
                    results[output.request_id] = output
                    bar.update()
        except BaseException:  # Ctrl-C included
            with guard.uninterrupted():
                for name in ids:
                    abort_if_there(server, name)
            raise
    return [results[name] for name in ids]


def abort_if_there(server: Server, request_id: str) -> None:
    with suppress(UnknownRequestError):  # it has finished
        server.abort(request_id)
