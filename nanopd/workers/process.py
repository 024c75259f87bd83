"""ProcessRunner: a ModelRunner in a process of its own, behind the same methods.

All books stay in this process: schedulers, block managers, links. What moves out is what holds Python's global lock
for most of a step: packing its inputs and launching its kernels. Weights and KV pool are shared, not copied: links
here read the very blocks that the other process wrote. For that, a step's answer comes when its device has ended it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing

from nanopd.engine.plan import StepPlan
from nanopd.errors import (
    ConfigError,
    CudaUnavailableError,
    IllegalTransitionError,
    NanoPDError,
    NonFiniteLogitsError,
    StepFailedError,
    WorkerFailedError,
)
from nanopd.kv.cache import KVCache
from nanopd.model.transformer import Transformer
from nanopd.ops.interface import Ops
from nanopd.workers.process_child import Capture, Failure, Setup, main
from nanopd.workers.sharing import share
from nanopd.workers.spec import DeviceSpec
from nanopd.workers.wire import StepMessage, StepWriter

AfterLayer = Callable[[int], None]

LOOK_S = 1.0  # how long to wait for an answer before looking whether the process still lives
CLOSE_S = 5.0  # how long a process may take to end before it is killed
_GUARD = "it imports the script that starts it, which must do so under `if __name__ == '__main__':`"


class ProcessRunner:
    """Starts a process and gives it plans. One thread at a time; ``close`` from any, at any time.

    Args:
        name: of the worker, for messages.
        spec: its device; cores are bound in the process.
        model: its weights are moved to shared memory if they lie on the CPU; this changes no value.
        kv_cache: the pool, likewise.
        ops: kernels for whoever uses the pool in this process, such as links. The child makes its own.
        options: of the ``ModelRunner`` over there.

    The process is there at once, and busy importing torch: ``capture_graphs`` waits until it can work.

    Raises ConfigError if shared memory does not hold weights and pool, CudaUnavailableError if a GPU's memory cannot be
    shared, WorkerFailedError without a process.
    A step raises NonFiniteLogitsError; StepFailedError for whatever else the runner over there raised; and
    WorkerFailedError once the process is gone: it has ended then, and writes nothing any more.
    """

    stream = None  # a step has ended on the device when its answer comes: whoever reads then need not wait for it
    graphs = None  # they are over there

    def __init__(
        self,
        name: str,
        spec: DeviceSpec,
        model: Transformer,
        kv_cache: KVCache,
        ops: Ops,
        options: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.model = model  # its weights, like the pool, must outlive the process that reads them
        self.kv_cache = kv_cache
        self.ops = ops
        self.device = kv_cache.device
        self.closed = False
        self._num_layers = kv_cache.num_layers
        self._writer = StepWriter()
        self._waiting = False  # an answer is due
        self._started = False  # there has been one
        self._ending = threading.Lock()  # of the process object: a step may wait while another thread closes
        self._ended = False
        self._exit_code: int | None = None
        share(model.weights, kv_cache.tensor)
        setup = Setup(
            model.config, model.weights, kv_cache.tensor, kv_cache.model, spec, options, torch.get_num_threads()
        )
        # Spawned, not forked: a fork has neither a working CUDA nor the threads that hold locks.
        context = torch.multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        # Memory of the CPU is passed on as open files, which only a process being started can be given. Handles of a
        # GPU's memory are bytes, and more of them than the pipe through which a process is started holds.
        on_gpu = self.device.type == "cuda"
        self._process = context.Process(
            target=main, args=([] if on_gpu else [setup], theirs), name=f"nanopd {name}", daemon=True
        )
        try:
            self._process.start()
        except OSError as error:
            self._connection.close()
            raise WorkerFailedError(f"no process for worker {name} could be started: {error}") from error
        finally:
            theirs.close()  # else the end of the process would not end the pipe
        if on_gpu:
            self._hand_over(setup)

    def capture_graphs(self, use_tqdm: bool = False) -> None:
        """Wait until the process is ready and has captured its graphs. Raises WorkerFailedError if it cannot start."""
        self._check_free()
        self._send(Capture(use_tqdm))
        try:
            self._receive()
        except (StepFailedError, NonFiniteLogitsError) as error:
            raise WorkerFailedError(f"worker {self.name} did not start: {error}") from error

    def launch(self, plan: StepPlan, after_layer: AfterLayer | None = None) -> PendingAnswer:
        """Send a step. ``wait`` on the result before the next plan is made.

        ``after_layer`` is called for every layer, but not before the step has ended: nothing is streamed.
        """
        self._check_free()  # before it is written: what the writer has written counts as known over there
        self._send(self._writer.write(plan))
        return PendingAnswer(self, after_layer)

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """See ``ModelRunner.execute``."""
        return self.launch(plan).wait()

    def close(self) -> None:
        """End the process: ask, wait, kill. Idempotent. Lets go of model and pool."""
        if self.closed:
            return
        self.closed = True
        if not self._connection.closed:
            with suppress(OSError):  # it has ended already
                self._connection.send(None)
        self._end()
        self._connection.close()
        for attribute in ("model", "kv_cache"):
            self.__dict__.pop(attribute, None)

    @property
    def pid(self) -> int | None:
        """Of the process; None once it has ended and somebody has noticed."""
        with self._ending:
            return None if self._ended else self._process.pid

    # --- inside ------------------------------------------------------------------------------------------------

    def _hand_over(self, setup: Setup) -> None:
        """Raises CudaUnavailableError where a GPU's memory cannot be shared with another process."""
        try:
            self._send(setup)
        except BaseException as error:
            self._connection.close()  # it waits for a setup, and not for an end
            self.close()
            if isinstance(error, RuntimeError) and not isinstance(error, NanoPDError):
                raise CudaUnavailableError(f"memory of {self.device} reaches no other process: {error}") from error
            raise

    def _check_free(self) -> None:
        if self.closed:
            raise WorkerFailedError(f"the runner of worker {self.name} was closed")
        if self._waiting:
            raise IllegalTransitionError(f"worker {self.name} has a step that nobody has waited for")

    def _send(self, message: Setup | Capture | StepMessage) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._gone() from error
        self._waiting = not isinstance(message, Setup)

    def _receive(self) -> Any:
        """The answer to the last message. Raises what the child did, or WorkerFailedError."""
        try:
            while not self._connection.poll(LOOK_S):
                with self._ending:
                    alive = not self._ended and self._process.is_alive()
                if not alive and not self._connection.poll():
                    raise EOFError
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        self._waiting, self._started = False, True
        if isinstance(answer, Failure):
            raise _raised(answer)
        return answer

    def _gone(self) -> WorkerFailedError:
        """Once it has ended for good: its writes to the pool end with it."""
        self._waiting = False
        code = self._end()
        hint = "" if self._started else f" before it was ready: {_GUARD}"
        return WorkerFailedError(f"the process of worker {self.name} ended with exit code {code}{hint}")

    def _end(self) -> int | None:
        """See to it that the process ends. Returns its exit code."""
        with self._ending:
            if not self._ended:
                self._process.join(CLOSE_S)
                if self._process.is_alive():
                    self._process.kill()
                    self._process.join()
                self._exit_code, self._ended = self._process.exitcode, True
                self._process.close()
            return self._exit_code


class PendingAnswer:
    """A step that was sent; it may still be running."""

    def __init__(self, runner: ProcessRunner, after_layer: AfterLayer | None) -> None:
        self._runner, self._after_layer = runner, after_layer

    def wait(self) -> list[list[int]]:
        """See ``PendingStep.wait``; raises as ``ProcessRunner`` says."""
        tokens: list[list[int]]
        try:
            tokens = self._runner._receive()
        except KeyboardInterrupt:  # the step goes on over there, and writes to blocks that are freed once this returns
            with suppress(NanoPDError):
                self._runner._receive()
            raise
        if self._after_layer is not None:
            for layer in range(self._runner._num_layers):
                self._after_layer(layer)
        return tokens


def check_processes(specs: Sequence[DeviceSpec], elastic: bool) -> None:
    """Raise ConfigError if workers with these specs cannot run in processes of their own."""
    if elastic:
        raise ConfigError("processes=True and elastic=True: who is alone on a card is known in one process only")
    for spec in specs:
        if spec.num_sms is not None:
            raise ConfigError(f"processes=True and {spec}: an SM partition is for one process; leave one out")


def _raised(failure: Failure) -> Exception:
    if failure.request_ids is not None:
        return NonFiniteLogitsError(failure.message, failure.request_ids)
    error = StepFailedError(f"{failure.kind}: {failure.message}")
    error.add_note(f"In the worker's process:\n{failure.trace}")
    return error
