"""Which paths a request can take at all, and how a policy says which one it takes."""

from __future__ import annotations

from numbers import Real

from nanopd.costmodel.checks import shown
from nanopd.costmodel.estimate import Estimate
from nanopd.engine.request import Request
from nanopd.errors import ConfigError, NoWorkerError
from nanopd.router.decision import Decision, Path
from nanopd.router.snapshot import Snapshot, WorkerSnapshot
from nanopd.workers.worker import Role


def candidates(request: Request, snapshot: Snapshot, role: Role) -> tuple[WorkerSnapshot, ...]:
    """Workers of ``role`` whose pool, when empty, holds the request's tokens and one more."""
    slots = request.num_tokens + (role is not Role.PREFILL)
    return tuple(w for w in snapshot.of(role) if slots <= w.total_blocks * w.block_size)


def possible_paths(request: Request, snapshot: Snapshot) -> tuple[Path, ...]:
    """The paths that have workers for this request. Raises NoWorkerError if there is none."""
    has = {role: bool(candidates(request, snapshot, role)) for role in Role}
    paths = [Path.COLLOCATED] if has[Role.COLLOCATED] else []
    if has[Role.PREFILL] and has[Role.DECODE]:
        paths.append(Path.DISAGGREGATED)
    if not paths:
        raise NoWorkerError(
            f"request {request.request_id!r} with {request.num_tokens} tokens fits none of the "
            f"{len(snapshot.workers)} workers that are alive: {', '.join(map(_describe, snapshot.workers)) or 'none'}"
        )
    return tuple(paths)


def take(
    path: Path,
    reason: str,
    request: Request,
    snapshot: Snapshot,
    *,
    collocated: Estimate | None = None,
    disaggregated: Estimate | None = None,
    predicted_output: float | None = None,
) -> Decision:
    """Decide for ``path``, or for the only one that is possible. Raises NoWorkerError if there is none."""
    possible = possible_paths(request, snapshot)
    if path not in possible:
        path, reason = possible[0], f"{reason}, but no worker serves the {path} path"
    return Decision(path, reason, collocated, disaggregated, predicted_output)


def prefill_queue(snapshot: Snapshot) -> int:
    """Requests that wait to be prefilled on the disaggregated path."""
    return snapshot.backlog_requests + sum(w.num_waiting for w in snapshot.of(Role.PREFILL))


def system_load(snapshot: Snapshot) -> float:
    """Requests in the system, waiting or decoding, for each worker that decodes: comparable with a batch."""
    decoding = sum(worker.role is not Role.PREFILL for worker in snapshot.workers)
    requests = snapshot.backlog_requests + sum(w.num_waiting + w.num_running for w in snapshot.workers)
    return requests / max(decoding, 1)


def expected_output(request: Request, predicted: float | None, default: float) -> float:
    """Output tokens to reckon with: the prediction, or ``default``; never more than may still come.

    Raises ConfigError for a prediction that is no number of at least 0.
    """
    if predicted is not None and (not isinstance(predicted, Real) or not predicted >= 0):
        raise ConfigError(f"a predicted output must be a number of tokens >= 0, got {shown(predicted)}")
    most = max(request.params.max_tokens - request.num_output_tokens, 1)
    return min(max(default if predicted is None else predicted, 1.0), float(most))


def _describe(worker: WorkerSnapshot) -> str:
    return f"{worker.name} ({worker.role}, {worker.total_blocks * worker.block_size} tokens)"
