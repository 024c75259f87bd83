"""SloAware: the path on which fewer requests, this one and those it disturbs, miss their latency objectives.

DistServe (Zhong et al., OSDI 2024) counts a request as served well iff it meets its TTFT *and* TPOT objectives; routing
for that goal follows Mooncake's Conductor (Qin et al., FAST 2025) in predicting both from queues, and adds what the
decision does to others (an external cost, in the sense of Pigou). A prediction is off by a factor that is log-normal
with deviation ``uncertainty``, so a limit is missed with probability Phi(log(predicted / limit) / uncertainty): near a
limit every ms counts, and far from it none does.

Order: fewer expected misses; if they differ by no more than ``tolerance``, lower cost in ms; if equal, collocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import reduce
from statistics import NormalDist

from nanopd.costmodel.hardware_profile import BUSY, WHOLE
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.engine.request import Request
from nanopd.errors import ConfigError
from nanopd.router.decision import Decision, Path
from nanopd.router.forecast import Place
from nanopd.router.path_forecast import PathForecast, Sharing, forecast_collocated, forecast_disaggregated
from nanopd.router.paths import candidates, expected_output, possible_paths
from nanopd.router.rule import as_ms, deciding_term
from nanopd.router.snapshot import Snapshot, WorkerSnapshot
from nanopd.workers.worker import Role

_NORMAL = NormalDist()


class SloAware:
    """Args:
        models: step-time model by worker ``profile``; "whole device" is for workers without one. If there is one
            called "… beside a busy neighbour", it is used for a prefill worker while requests decode, and for the
            decodes while prompts are computed.
        ttft_ms, tpot_ms: the objectives.
        max_num_batched_tokens: of each worker's scheduler; ``chunk_size``: of collocated workers' (None: no limit);
            ``prefill_chunk_size``: of prefill workers'.
        uncertainty: standard deviation of log(real / predicted).
        tolerance: expected misses that make no difference.
        default_output: output tokens to reckon with when nobody predicts them.
        contention: by what share a step takes longer while workers of the other path run, where both paths share one
            card; 1.0 says that they take turns, 0.0 that they have devices of their own.

    Raises ConfigError for values out of range, and in `decide` for a worker whose profile has no model.
    """

    name = "slo"

    def __init__(
        self,
        models: Mapping[str, StepTimeModel],
        ttft_ms: float,
        tpot_ms: float,
        *,
        max_num_batched_tokens: int = 2048,
        chunk_size: int | None = None,
        prefill_chunk_size: int | None = None,
        uncertainty: float = 0.15,
        tolerance: float = 0.01,
        default_output: float = 256.0,
        contention: float = 0.0,
    ) -> None:
        _check_positive(ttft_ms=ttft_ms, tpot_ms=tpot_ms, uncertainty=uncertainty, default_output=default_output)
        _check_positive(max_num_batched_tokens=max_num_batched_tokens)
        for name, size in (("chunk_size", chunk_size), ("prefill_chunk_size", prefill_chunk_size)):
            if size is not None:
                _check_positive(**{name: size})
        for name, value in (("tolerance", tolerance), ("contention", contention)):
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be at least 0 and finite, got {value!r}")
        self.models = dict(models)
        self.ttft_ms, self.tpot_ms = ttft_ms, tpot_ms
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_sizes = {Role.COLLOCATED: chunk_size, Role.PREFILL: prefill_chunk_size, Role.DECODE: None}
        self.uncertainty, self.tolerance = uncertainty, tolerance
        self.default_output, self.contention = default_output, contention

    def decide(self, request: Request, snapshot: Snapshot, predicted_output: float | None = None) -> Decision:
        """Raises NoWorkerError if no path has workers for the request."""
        best = self.forecasts(request, snapshot, predicted_output)
        chosen = reduce(self.better, best.values())
        estimates = {path.value: forecast.estimate for path, forecast in best.items()}
        return Decision(chosen.path, self._reason(chosen, best), **estimates, predicted_output=predicted_output)

    def forecasts(
        self, request: Request, snapshot: Snapshot, predicted_output: float | None = None
    ) -> dict[Path, PathForecast]:
        """The best forecast of each path that is possible, over all workers that could serve it."""
        tokens, output = request.num_tokens, expected_output(request, predicted_output, self.default_output)
        at = {role: [self._place(worker, snapshot) for worker in snapshot.of(role)] for role in Role}
        collocated, apart = at[Role.COLLOCATED], at[Role.PREFILL] + at[Role.DECODE]
        fits = {role: candidates(request, snapshot, role) for role in Role}
        best = {}
        for path in possible_paths(request, snapshot):
            if path is Path.COLLOCATED:
                sharing = Sharing.of(collocated, apart, self.contention)
                every = [
                    forecast_collocated(place, tokens, output, snapshot, sharing)
                    for place in collocated
                    if place.worker in fits[Role.COLLOCATED]
                ]
            else:
                sharing = Sharing.of(apart, collocated, self.contention)
                every = [
                    forecast_disaggregated(first, second, tokens, output, snapshot, sharing)
                    for first in at[Role.PREFILL]
                    for second in at[Role.DECODE]
                    if first.worker in fits[Role.PREFILL] and second.worker in fits[Role.DECODE]
                ]
            best[path] = reduce(self.better, every)
        return best

    def better(self, first: PathForecast, second: PathForecast) -> PathForecast:
        """The one with fewer expected misses or, if they hardly differ, the cheaper one; ``first`` if equal."""
        if abs(self.misses(first) - self.misses(second)) > self.tolerance:
            return min(first, second, key=self.misses)
        return min(first, second, key=lambda forecast: forecast.estimate.total_ms)

    # --- objectives ------------------------------------------------------------------------------------------

    def misses(self, forecast: PathForecast) -> float:
        """Expected number of requests, this one included, that miss their objectives because of the decision."""
        return self.own_miss(forecast) + self.misses_of_others(forecast)

    def own_miss(self, forecast: PathForecast) -> float:
        """Probability that the request misses its TTFT or its TPOT."""
        in_time = 1.0 - self._miss(forecast.ttft_ms, self.ttft_ms)
        return 1.0 - in_time * (1.0 - self._miss(forecast.tpot_ms, self.tpot_ms))

    def misses_of_others(self, forecast: PathForecast) -> float:
        """How many more of the others are expected to miss theirs."""
        return sum(
            count * (self._miss(after, limit) - self._miss(before, limit))
            for count, before, after, limit in self._changes(forecast)
        )

    def _miss(self, predicted_ms: float, limit_ms: float) -> float:
        """Probability that the real value is above the limit."""
        return _NORMAL.cdf(math.log(predicted_ms / limit_ms) / self.uncertainty) if predicted_ms > 0 else 0.0

    def _changes(self, forecast: PathForecast) -> Iterator[tuple[int, float, float, float]]:
        """(number of others, their ms before, their ms after, limit) for each group that the request delays."""
        prefill, decode = forecast.prefill, forecast.decode
        output = decode.steps + 1.0  # the others' is taken to be the same
        tpot = decode.alone_ms + decode.mixing_ms / output
        slower = (prefill.interference + decode.slower_ms * decode.steps) / output
        yield decode.others, tpot, tpot + slower, self.tpot_ms
        ttft = prefill.before_ms + prefill.prefill
        yield prefill.behind, ttft, ttft + prefill.prefill, self.ttft_ms
        for count, step in forecast.sharing.steps:
            yield count, step, step * (1.0 + forecast.sharing.newly), self.tpot_ms

    # --- inside ----------------------------------------------------------------------------------------------

    def _reason(self, chosen: PathForecast, best: Mapping[Path, PathForecast]) -> str:
        where = f"on {' and '.join(chosen.workers)}"
        if len(best) == 1:
            return f"{where}: no other path has workers for it"
        (rejected,) = (forecast for forecast in best.values() if forecast is not chosen)
        gains = {  # in expected misses, by the group of terms that they come from
            "to_first": self._miss(rejected.ttft_ms, self.ttft_ms) - self._miss(chosen.ttft_ms, self.ttft_ms),
            "after": self._miss(rejected.tpot_ms, self.tpot_ms) - self._miss(chosen.tpot_ms, self.tpot_ms),
            "others": self.misses_of_others(rejected) - self.misses_of_others(chosen),
        }
        ours, theirs = self.misses(chosen), self.misses(rejected)
        if abs(ours - theirs) > self.tolerance:
            group = max(gains, key=lambda name: gains[name])
            term = deciding_term(getattr(chosen, group), getattr(rejected, group))
            return f"{where}: {ours:.2f} expected SLO misses against {theirs:.2f}, most of all by {term}"
        ours, theirs = chosen.estimate.total_ms, rejected.estimate.total_ms
        term = deciding_term(chosen.estimate.terms, rejected.estimate.terms)
        return f"{where}: equal SLO misses, {as_ms(ours)} against {as_ms(theirs)}, most of all by {term}"

    def _place(self, worker: WorkerSnapshot, snapshot: Snapshot) -> Place:
        key = WHOLE if worker.profile is None else worker.profile
        if key not in self.models:
            known = sorted(self.models)
            raise ConfigError(f"worker {worker.name!r} needs a step-time model for {key!r}; there are {known}")
        model, beside = self.models[key], self.models.get(key + BUSY)
        if worker.role is Role.PREFILL and beside and any(w.num_running for w in snapshot.of(Role.DECODE)):
            model = beside
        return Place(worker, model, self.max_num_batched_tokens, self.chunk_sizes[worker.role], beside)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} must be positive and finite, got {value!r}")
