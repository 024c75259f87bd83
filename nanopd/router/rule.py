"""The routing that this project started from: a rule of two ratios, and the comparison that it was derived from.

`SeedRule` asks whether γ / transfer_rate > B* / load; `SeedEstimate` compares both analytical estimates in full. They
disagree about little, and notebook 08 shows why that is a weakness: see ``nanopd.costmodel.analytical``.
"""

from __future__ import annotations

from collections.abc import Mapping

from nanopd.costmodel.analytical import AnalyticalModel
from nanopd.costmodel.checks import check_number, shown
from nanopd.costmodel.cost_model import LoadState, RequestSize
from nanopd.costmodel.estimate import Estimate
from nanopd.costmodel.hardware_profile import HardwareProfile, load_profile
from nanopd.engine.request import Request
from nanopd.errors import ConfigError
from nanopd.router.decision import Decision, Path
from nanopd.router.paths import expected_output, system_load, take
from nanopd.router.snapshot import Snapshot
from nanopd.workers.worker import Role


class _Seed:
    """What both share. ``load`` is `system_load`; ``batch`` is that of the least loaded decode worker."""

    def __init__(self, profile: HardwareProfile | str, default_output: float = 256.0) -> None:
        found = load_profile(profile) if isinstance(profile, str) else profile
        if not isinstance(found, HardwareProfile):
            raise ConfigError(f"profile must be a hardware profile or the name of one, got {shown(profile)}")
        check_number("default_output", default_output, above=0.0, unit="tokens")
        self.model = AnalyticalModel(found)
        self.default_output = default_output

    def estimates(self, request: Request, snapshot: Snapshot, predicted: float | None) -> tuple[Estimate, Estimate]:
        size = RequestSize(request.num_tokens, expected_output(request, predicted, self.default_output))
        batch = min((worker.num_running for worker in snapshot.of(Role.DECODE)), default=0)
        return (
            self.model.collocated(size, LoadState(num_decodes=system_load(snapshot))),
            self.model.disaggregated(size, LoadState(num_decodes=batch)),
        )


class SeedRule(_Seed):
    """Disaggregate iff γ / transfer_rate > B* / load. Neither prompt nor output length matters.

    ``profile``: a HardwareProfile, a preset's name or a file. Raises ConfigError.
    """

    name = "seed-rule"

    def decide(self, request: Request, snapshot: Snapshot, predicted_output: float | None = None) -> Decision:
        load, threshold = system_load(snapshot), self.model.threshold_load
        yes = self.model.prefers_disaggregation(load)
        collocated, disaggregated = self.estimates(request, snapshot, predicted_output)
        return take(
            Path.DISAGGREGATED if yes else Path.COLLOCATED,
            f"load {load:.4g} is {'above' if yes else 'not above'} the threshold {threshold:.3f}",
            request,
            snapshot,
            collocated=collocated,
            disaggregated=disaggregated,
            predicted_output=predicted_output,
        )


class SeedEstimate(_Seed):
    """The path whose analytical estimate is lower; collocated if they are equal. Options as for `SeedRule`."""

    name = "seed-estimate"

    def decide(self, request: Request, snapshot: Snapshot, predicted_output: float | None = None) -> Decision:
        collocated, disaggregated = self.estimates(request, snapshot, predicted_output)
        margin = collocated.total_ms - disaggregated.total_ms
        worse, better = (collocated, disaggregated) if margin > 0 else (disaggregated, collocated)
        term = deciding_term(better.terms, worse.terms)
        return take(
            Path.DISAGGREGATED if margin > 0 else Path.COLLOCATED,
            f"{as_ms(better.total_ms)} against {as_ms(worse.total_ms)} ({abs(margin) / worse.total_ms:.2%}), "
            f"most of all by {term}",
            request,
            snapshot,
            collocated=collocated,
            disaggregated=disaggregated,
            predicted_output=predicted_output,
        )


def deciding_term(better: Mapping[str, float], worse: Mapping[str, float]) -> str:
    """The term, in ms, that speaks most for the better estimate, with both values."""
    names = [*worse, *(name for name in better if name not in worse)]
    name = max(names, key=lambda n: worse.get(n, 0.0) - better.get(n, 0.0))
    return f"{name} ({as_ms(better.get(name, 0.0))} against {as_ms(worse.get(name, 0.0))})"


def as_ms(value: float) -> str:
    """Three significant digits, or whole milliseconds."""
    return f"{value:,.0f} ms" if abs(value) >= 1000 else f"{value:.3g} ms"
