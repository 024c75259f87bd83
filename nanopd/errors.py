"""One exception type per thing that can go wrong.

Every error says which value was wrong and what the limit is. Errors that a caller causes also derive from
``ValueError`` (bad argument) or ``KeyError`` (unknown name), so that generic handlers keep working.
"""


class NanoPDError(Exception):
    """Base class of every error that nanopd raises on purpose."""


# --- configuration and requests: the caller's to fix -----------------------------------------------------------


class ConfigError(NanoPDError, ValueError):
    """A configuration value is out of range or contradicts another one."""


class InvalidRequestError(NanoPDError, ValueError):
    """A request was refused before it was queued; nothing else is affected."""


class EmptyPromptError(InvalidRequestError):
    """The prompt holds no token, so there is no position to predict from."""


class PromptTooLongError(InvalidRequestError):
    """Prompt (plus the tokens asked for) exceeds the model's length or can never fit the KV pool."""


class InvalidTokenError(InvalidRequestError):
    """A token id lies outside the vocabulary."""


class InvalidSamplingParamsError(InvalidRequestError):
    """A sampling parameter is out of range."""


class UnknownRequestError(NanoPDError, KeyError):
    """No request has this id."""


class DuplicateRequestError(InvalidRequestError):
    """A request with this id is still in flight."""


class IllegalTransitionError(NanoPDError, RuntimeError):
    """A request cannot go from its state to that one, or the engine's steps were driven out of order."""


class EngineClosedError(NanoPDError, RuntimeError):
    """The engine was closed; it accepts no more work."""


class StepFailedError(NanoPDError, RuntimeError):
    """A model step raised; the requests of that step failed, all others go on."""


class NonFiniteLogitsError(NanoPDError, ArithmeticError):
    """The model's output for a sequence has no finite maximum (NaN or infinity), so no token can be drawn."""

    def __init__(self, message: str, request_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.request_ids = request_ids  # the sequences to blame, where they are known


# --- KV blocks -------------------------------------------------------------------------------------------------


class OutOfBlocksError(NanoPDError):
    """The KV pool has too few free blocks; nothing was changed."""


class StaleBlockError(NanoPDError):
    """A block was freed (its generation number moved on) while somebody still held a reference to it."""


class BlockAccountingError(NanoPDError):
    """A block was freed twice, or an integrity check found counts that do not add up."""


# --- prefill and decode apart ----------------------------------------------------------------------------------


class OverloadedError(InvalidRequestError):
    """The server has as many unfinished requests as it may; this one was refused, all others go on."""


class NoWorkerError(InvalidRequestError):
    """No worker that is alive can ever serve this request."""


class WorkerFailedError(NanoPDError, RuntimeError):
    """A worker failed for good, and no other one could take its requests."""


class LeaseExpiredError(NanoPDError, RuntimeError):
    """A transfer did not end within its lease; the blocks it read were given back."""


class TransferError(NanoPDError, RuntimeError):
    """KV could not be moved: a bad handoff, a failed or cancelled transfer, or a link that is closed."""


class LayoutMismatchError(TransferError):
    """Two KV pools differ in layout; nothing was moved between them."""


class LinkStalledError(TransferError):
    """A link did not move its bytes, or did not stop, in the time it was given."""


# --- kernels ---------------------------------------------------------------------------------------------------


class UnsupportedShapeError(NanoPDError, ValueError):
    """A kernel does not support this shape, dtype, device or layout; nothing was launched."""


class KernelCompileError(NanoPDError):
    """NVRTC refused the source; the message holds its log, with line numbers."""


class KernelLaunchError(NanoPDError, RuntimeError):
    """A launch failed or the device reported an error."""


class CudaUnavailableError(NanoPDError, RuntimeError):
    """A CUDA feature was asked for on a machine that lacks it; the message says what is missing."""


# --- models ----------------------------------------------------------------------------------------------------


class ModelLoadError(NanoPDError):
    """A checkpoint could not be found, read, or mapped onto the architecture."""


# --- cost model ------------------------------------------------------------------------------------------------


class FitError(NanoPDError, ValueError):
    """Too few measured points to fit a model to, or points that do not determine it."""


# --- serving benchmark -----------------------------------------------------------------------------------------


class TraceError(NanoPDError, ValueError):
    """A trace file cannot be read; the message names file, line and field."""


class CounterError(NanoPDError):
    """Requests were lost or counted twice: offered is not completed plus dropped."""


class UnequalHardwareError(NanoPDError, ValueError):
    """Strategies that ran on different amounts of hardware were to be compared as equals."""


class ReportError(NanoPDError, ValueError):
    """A benchmark record is damaged, of another version, or belongs to another run."""


# --- simulation ------------------------------------------------------------------------------------------------


class SimulationError(NanoPDError):
    """A simulation stands still, its books do not balance, or a recording does not repeat: a bug, not a result."""


class RecordingError(NanoPDError, ValueError):
    """A recording of a run cannot be read, is of another version, or lacks what a replay needs."""


# --- course ----------------------------------------------------------------------------------------------------


class CourseError(NanoPDError):
    """A text of the course is missing, stale, or names something that does not exist."""
