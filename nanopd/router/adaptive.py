"""Adaptive: on one card, chunks on all SMs or a prefill in a partition, whichever computes prompts faster just now.

Beside few and short contexts, decodes leave most of the card idle between two reads of the weights, and chunks mixed
into their steps use it best (Sarathi-Serve, Agrawal et al., OSDI 2024). Beside heavy contexts a decode step takes long
whatever the number of its SMs, since it waits for memory, and a prefill in a partition of its own runs at full speed
meanwhile. Where one overtakes the other depends on the decodes that run now, and is what this policy computes: the
frontier of notebook 05 as a rule.

For workers of `Cluster.build(elastic=True)`: one decode worker that also takes prompts, one prefill worker, each with
the whole card while it is alone. All decodes share one batch, whichever way they came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nanopd.costmodel.estimate import Estimate
from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.hardware_profile import BUSY, WHOLE
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.engine.request import Request
from nanopd.errors import ConfigError
from nanopd.router.decision import Decision, Path
from nanopd.router.paths import possible_paths
from nanopd.router.snapshot import Snapshot, WorkerSnapshot
from nanopd.workers.worker import Role


@dataclass(frozen=True, slots=True)
class Mode:
    """What one way of computing prompts does to both sides."""

    path: Path
    tpot_ms: float  # of the running decodes while prompts are computed
    tokens_per_ms: float  # of prompts


class Adaptive:
    """Args:
        models: step-time models by place: "whole device", and for both partitions "sm=N beside a busy neighbour".
        tpot_ms: the objective; a way that breaks it is taken only if both do, and then the gentler one.
        chunk_size: prompt tokens per mixed step of the decode worker.
        prefill_chunk_size: prompt tokens per step of the prefill worker.
        margin: how much faster the other way must be before a queue is left for it: while both are used at once,
            neither has what it was chosen for.

    Raises ConfigError for values out of range, and in `decide` for a place without a model.
    """

    name = "adaptive"

    def __init__(
        self,
        models: Mapping[str, StepTimeModel],
        tpot_ms: float,
        *,
        chunk_size: int,
        prefill_chunk_size: int = 2048,
        margin: float = 0.1,
    ) -> None:
        for name, value in (
            ("tpot_ms", tpot_ms),
            ("chunk_size", chunk_size),
            ("prefill_chunk_size", prefill_chunk_size),
        ):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be positive and finite, got {value!r}")
        if not (margin >= 0 and math.isfinite(margin)):
            raise ConfigError(f"margin must be at least 0 and finite, got {margin!r}")
        self.models = dict(models)
        self.tpot_ms = tpot_ms
        self.chunk_size, self.prefill_chunk_size = chunk_size, prefill_chunk_size
        self.margin = margin

    def decide(self, request: Request, snapshot: Snapshot, predicted_output: float | None = None) -> Decision:
        """Raises NoWorkerError if no path has workers for the request."""
        paths = possible_paths(request, snapshot)
        if len(paths) == 1:
            return Decision(paths[0], "no other path has workers for it", predicted_output=predicted_output)
        chunks, partitions = self.modes(request, snapshot)
        current = self._current(snapshot)
        chosen, reason = self._choose(chunks, partitions, current)
        estimates = {
            mode.path.value: Estimate({"prefill": request.num_tokens / mode.tokens_per_ms, "decode step": mode.tpot_ms})
            for mode in (chunks, partitions)
        }
        return Decision(chosen.path, reason, **estimates, predicted_output=predicted_output)

    def modes(self, request: Request, snapshot: Snapshot) -> tuple[Mode, Mode]:
        """(chunks, partitions) beside the decodes that run now."""
        decode, prefill = snapshot.of(Role.DECODE)[0], snapshot.of(Role.PREFILL)[0]
        running = StepFeatures.decode(decode.num_running, decode.running_tokens)
        cached, whole = min(decode.cached_tokens, request.num_tokens - 1), self._model(WHOLE)
        tokens = request.num_tokens - cached
        mixed = whole.prefill_ms(tokens, start=cached, chunk_size=self.chunk_size, beside=running)
        steps = math.ceil(tokens / self.chunk_size)
        chunks = Mode(Path.COLLOCATED, mixed / steps, tokens / mixed)
        if running.num_decodes == 0:  # then the prefill worker has the whole card as well
            return chunks, Mode(Path.DISAGGREGATED, 0.0, tokens / self._prefill_ms(whole, tokens, cached))
        beside = self._prefill_ms(self._model(_place(prefill) + BUSY), tokens, cached)
        step = self._model(_place(decode) + BUSY).step_ms(running)
        return chunks, Mode(Path.DISAGGREGATED, step, tokens / beside)

    def _prefill_ms(self, model: StepTimeModel, tokens: int, cached: int) -> float:
        return model.prefill_ms(tokens, start=cached, chunk_size=self.prefill_chunk_size)

    def _choose(self, chunks: Mode, partitions: Mode, current: Path | None) -> tuple[Mode, str]:
        kept = [mode for mode in (chunks, partitions) if mode.tpot_ms <= self.tpot_ms]
        if len(kept) == 1:
            other = partitions if kept[0] is chunks else chunks
            return kept[0], f"the other way would take decodes to {other.tpot_ms:.1f} ms a token"
        if not kept:
            gentler = min(chunks, partitions, key=lambda mode: mode.tpot_ms)
            return gentler, f"both ways break the objective of {self.tpot_ms:g} ms, this one less"
        faster, slower = sorted(kept, key=lambda mode: -mode.tokens_per_ms)
        if current is slower.path and faster.tokens_per_ms < slower.tokens_per_ms * (1 + self.margin):
            return slower, "prompts are being computed this way, and the other is not much faster"
        return faster, f"prompts at {faster.tokens_per_ms:.1f} tokens/ms against {slower.tokens_per_ms:.1f}"

    def _current(self, snapshot: Snapshot) -> Path | None:
        """The way in which most prompt tokens are being computed, if any."""
        decode, prefill = snapshot.of(Role.DECODE)[0], snapshot.of(Role.PREFILL)[0]
        apart = prefill.waiting_tokens + snapshot.backlog_tokens
        if max(apart, decode.waiting_tokens) == 0:
            return None
        return Path.DISAGGREGATED if apart >= decode.waiting_tokens else Path.COLLOCATED

    def _model(self, place: str) -> StepTimeModel:
        if place not in self.models:
            raise ConfigError(f"a step-time model of {place!r} is needed; there are {sorted(self.models)}")
        return self.models[place]


def _place(worker: WorkerSnapshot) -> str:
    return WHOLE if worker.profile is None else worker.profile
