"""The other side of a `ProcessRunner`: a process that owns a ModelRunner, and does what it is told until told to end.

It keeps no books: which tokens to compute, and where their KV goes, comes with every step. Weights and pool lie in
memory that it shares with the parent.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from nanopd.engine.heap import settle_heap, thaw_heap
from nanopd.engine.runner import ModelRunner
from nanopd.errors import NonFiniteLogitsError
from nanopd.kv.cache import KVCache
from nanopd.model.config import ModelConfig
from nanopd.model.transformer import Transformer
from nanopd.model.weights import Weights
from nanopd.ops import get_ops
from nanopd.workers import affinity
from nanopd.workers.spec import DeviceSpec
from nanopd.workers.wire import StepMessage, StepReader


@dataclass
class Setup:
    """What the child's runner is made of.

    Attributes:
        weights, pool: in shared memory, or on a GPU, which torch opens in the child through CUDA IPC.
        model: the name in the pool's fingerprint.
        options: of the ``ModelRunner``.
        num_threads: of torch's operators on the CPU, as in the parent.
    """

    config: ModelConfig
    weights: Weights
    pool: torch.Tensor
    model: str
    spec: DeviceSpec
    options: Mapping[str, Any]
    num_threads: int


@dataclass
class Capture:
    """Ask for the CUDA graphs; also for a sign of life, since the answer comes once the runner is there."""

    use_tqdm: bool


@dataclass
class Failure:
    """An exception, as it crosses the pipe: its own object may hold what cannot."""

    kind: str
    message: str
    request_ids: tuple[str, ...] | None  # of a NonFiniteLogitsError
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        ids = error.request_ids if isinstance(error, NonFiniteLogitsError) else None
        return cls(type(error).__name__, str(error), ids, traceback.format_exc())


def main(given: list[Setup], connection: Connection) -> None:
    """Run in the child until the parent says so (None), or is no more (the pipe ends).

    Each message is answered by what it asked for, or by a ``Failure``. An answer means that the device has ended the
    step. ``given`` holds the setup, or is empty: then it is the first message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    try:
        _serve(given, connection)
    except (EOFError, OSError):  # the parent is gone, or has closed the pipe
        pass
    finally:
        connection.close()
        thaw_heap()  # a claim on the parent's GPU memory ends with the tensor


def _serve(given: list[Setup], connection: Connection) -> None:
    with ExitStack() as stack:
        try:
            # Taken out of the list: the process object keeps its arguments, and nothing here may outlive this call.
            runner = _runner(given.pop() if given else connection.recv(), stack)
        except Exception as error:
            connection.recv()  # an answer needs a question
            connection.send(Failure.of(error))
            return
        _answer(runner, connection)


def _answer(runner: ModelRunner, connection: Connection) -> None:
    reader = StepReader()
    while (message := connection.recv()) is not None:
        answer: Any
        try:
            answer = _do(message, runner, reader)
        except Exception as error:
            answer = Failure.of(error)
        connection.send(answer)


def _do(message: StepMessage | Capture, runner: ModelRunner, reader: StepReader) -> list[list[int]] | None:
    if isinstance(message, Capture):
        runner.capture_graphs(use_tqdm=message.use_tqdm)
        if runner.device.type == "cuda":
            settle_heap()
        return None
    return runner.execute(reader.read(message))


def _runner(setup: Setup, stack: ExitStack) -> ModelRunner:
    """``stack`` ends what is done for it."""
    device = setup.pool.device
    torch.set_num_threads(setup.num_threads)
    stack.enter_context(affinity.apply(setup.spec))
    if device.type == "cuda":
        stack.enter_context(torch.cuda.device(device))
    cache, ops = KVCache(setup.pool, setup.model), get_ops(device)
    runner = ModelRunner(Transformer(setup.config, setup.weights, ops), cache, ops, **setup.options)
    stack.callback(runner.close)
    return runner
