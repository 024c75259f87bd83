"""Clients of the engine in the caller's own thread: run a list of prompts to the end, or watch one grow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nanopd.engine.outputs import RequestOutput
from nanopd.engine.prompts import Prompt, encode_prompt, params_list
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import EngineClosedError, OutOfBlocksError, UnknownRequestError

if TYPE_CHECKING:
    from nanopd.engine.engine import Engine


def generate_all(
    engine: Engine,
    prompts: list[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    use_tqdm: bool,
) -> list[RequestOutput]:
    """See ``Engine.generate``."""
    finished: deque[RequestOutput] = deque()
    params = params_list(sampling_params, len(prompts))
    tokenized = [encode_prompt(prompt, engine.tokenizer, engine.vocab_size) for prompt in prompts]
    ids: list[str] = []
    results: dict[str, RequestOutput] = {}
    with engine.interrupt_guard as guard:
        try:
            with guard.uninterrupted():  # or nobody would know what is to be aborted
                ids += engine.add_requests(tokenized, params, finished.append)
            with _progress(engine, len(ids), use_tqdm) as show:
                while True:
                    while finished:
                        output = finished.popleft()
                        _raise_failure(output)
                        results[output.request_id] = output
                    show(len(results))
                    if len(results) == len(ids):
                        break
                    if not engine.advance() and not finished:
                        _raise_if_stuck(engine, next(name for name in ids if name not in results))
        except BaseException:  # Ctrl-C included: nobody will come for the rest
            with guard.uninterrupted():
                for request_id in ids:
                    _abort_if_there(engine, request_id)
            raise
    return [results[request_id] for request_id in ids]


@contextmanager
def _progress(engine: Engine, total: int, use_tqdm: bool) -> Iterator[Callable[[int], None]]:
    """A bar of finished prompts and the engine's tokens per second; call the result with the number of the former."""
    if not use_tqdm:
        yield lambda num_finished: None
        return
    from tqdm.auto import tqdm  # here, so that a simulator need not load it

    first_token, start = engine.num_generated_tokens, time.perf_counter()
    shown = start

    with tqdm(total=total, desc="Generating", unit="prompt") as bar:

        def show(num_finished: int) -> None:
            nonlocal shown
            now = time.perf_counter()
            if now - shown < 0.1 and num_finished < total:
                return  # drawing takes as long as a step
            shown = now
            speed = (engine.num_generated_tokens - first_token) / max(now - start, 1e-9)
            bar.set_postfix_str(f"{speed:.1f} tok/s", refresh=False)
            bar.n = num_finished
            bar.refresh()

        yield show


class OutputStream(Iterator[RequestOutput]):
    """The outputs of one request, growing: each holds everything so far, the last one is ``finished``.

    A context manager; ``close`` aborts the request if it has not finished. So does leaving it to the garbage collector.
    Several threads may read it; each output goes to one of them.
    """

    def __init__(
        self, engine: Engine, prompt: Prompt, params: SamplingParams | None, request_id: str | None = None
    ) -> None:
        self._engine = engine
        self._outputs: deque[RequestOutput] = deque()
        self._done = True  # nothing to close yet, should the next line raise
        self.request_id = engine.add_request(
            prompt, params, request_id=request_id, stream=True, on_output=self._outputs.append
        )
        self._done = False

    def __next__(self) -> RequestOutput:
        while not self._done:
            output = None
            with suppress(IndexError):  # none there yet, or another thread was quicker
                output = self._outputs.popleft()
            if output is not None:
                self._done = self._done or output.finished
                _raise_failure(output)
                return output
            if not self._engine.advance() and not self._outputs and not self._done:
                _raise_if_stuck(self._engine, self.request_id)
        raise StopIteration

    def close(self) -> None:
        """Abort the request unless it has finished; the iteration ends."""
        if not self._done:
            self._done = True
            _abort_if_there(self._engine, self.request_id)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._done:
            self._done = True
            self._engine.abandon(self.request_id)


def _raise_if_stuck(engine: Engine, request_id: str) -> None:
    """Abort a request that no step can advance. (Alone it would fit, so nobody inside of the engine is to blame.)"""
    if not engine.is_unfinished(request_id) or engine.advance():
        return  # another thread ended it, or brought work, meanwhile
    blocks = engine.scheduler.block_manager
    free = blocks.num_free_blocks
    _abort_if_there(engine, request_id)
    raise OutOfBlocksError(
        f"request {request_id!r} cannot go on: {free} of {blocks.num_blocks} blocks are free, and tables or leases "
        f"outside of this engine hold the others"
    )


def _raise_failure(output: RequestOutput) -> None:
    if output.error is not None:
        raise output.error


def _abort_if_there(engine: Engine, request_id: str) -> None:
    with suppress(UnknownRequestError, EngineClosedError):  # it has finished
        engine.abort(request_id)
