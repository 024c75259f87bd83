"""``nanopd route``: why one request would take this path and not the other."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanopd.costmodel.checks import check_count, check_number
from nanopd.costmodel.estimate import Estimate
from nanopd.costmodel.hardware_profile import WHOLE, HardwareProfile, load_profile
from nanopd.engine.request import Request
from nanopd.router.decision import Path, Policy
from nanopd.router.policies import make_policy
from nanopd.router.rule import SeedEstimate
from nanopd.router.situation import Situation, imagined_request
from nanopd.router.slo import SloAware
from nanopd.router.snapshot import Snapshot


def explain(
    *,
    profile: str,
    policy: str,
    prompt_tokens: int,
    output_tokens: float,
    load: int,
    context: int,
    waiting_tokens: int,
    prefill_place: str,
    decode_place: str,
    ttft_ms: float,
    tpot_ms: float,
    chunk_size: int | None,
    console: Console | None = None,
) -> None:
    """Print both estimates term by term, and the decision. Raises ConfigError for what does not exist."""
    hardware = load_profile(profile)
    check_number("ttft_ms", ttft_ms, above=0.0, unit="ms")  # whatever the policy: nobody gives a limit for nothing
    check_number("tpot_ms", tpot_ms, above=0.0, unit="ms")
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, least=1)
    for place in (prefill_place, decode_place):
        if place != WHOLE:
            hardware.step_model(place)  # raises if the profile has none
    situation = Situation(hardware, context, waiting_tokens, prefill_place, decode_place)
    snapshot = situation.at_load(load)
    request = imagined_request(prompt_tokens, output_tokens)
    made = build_policy(policy, hardware, ttft_ms=ttft_ms, tpot_ms=tpot_ms, chunk_size=chunk_size)
    decision = made.decide(request, snapshot, output_tokens)
    collocated, disaggregated = decision.collocated, decision.disaggregated
    by = "its estimates"
    if collocated is None and disaggregated is None:  # it asked no model; the analytical one shows what it ignored
        collocated, disaggregated = SeedEstimate(hardware).estimates(request, snapshot, output_tokens)
        by = "which looks at no estimate; the analytical model's"
    table = estimate_table(collocated, disaggregated)
    for name, values in objectives(made, request, snapshot, output_tokens).items():
        table.add_row(name, *values)
    compared = f"Compared: {situation.compared}"
    if {prefill_place, decode_place} != {WHOLE} and not isinstance(made, SloAware):
        compared += " (the estimates are of whole devices: only the policy slo has others)"
    console = console or Console()
    console.print(compared, markup=False, highlight=False, soft_wrap=True)
    head = f"{hardware.device}, {hardware.model}. Policy {policy}, {by} in ms:\n"
    console.print(head, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"\n[bold]{decision.path}[/]: {escape(decision.reason)}", highlight=False, soft_wrap=True)


def build_policy(
    name: str, profile: HardwareProfile, *, ttft_ms: float, tpot_ms: float, chunk_size: int | None
) -> Policy:
    """The policy with what it needs from profile and objectives; every other option at its default."""
    if name in ("seed-rule", "seed-estimate"):
        return make_policy(name, profile=profile)
    if name == "slo":
        profile.step_model()  # raises if the profile has none
        models = profile.step_time
        return make_policy(name, models=models, ttft_ms=ttft_ms, tpot_ms=tpot_ms, chunk_size=chunk_size)
    return make_policy(name)


def estimate_table(collocated: Estimate | None, disaggregated: Estimate | None) -> Table:
    """Terms in rows, paths in columns; a term that is 0 on both paths is left out."""
    table = Table(box=None, pad_edge=False)
    table.add_column("term")
    for path in Path:
        table.add_column(path.value, justify="right")
    columns = [estimate.terms if estimate else {} for estimate in (collocated, disaggregated)]
    for name in dict.fromkeys(name for terms in columns for name in terms):
        values = [terms.get(name) for terms in columns]
        if any(values):
            table.add_row(name, *("-" if value is None else f"{value:,.2f}" for value in values))
    totals = (f"{estimate.total_ms:,.2f}" if estimate else "-" for estimate in (collocated, disaggregated))
    table.add_row("[bold]in all[/]", *totals)
    return table


def objectives(policy: Policy, request: Request, snapshot: Snapshot, output: float) -> dict[str, list[str]]:
    """What only the SLO-aware policy knows: predicted latencies and misses, by path."""
    if not isinstance(policy, SloAware):
        return {}
    best = [policy.forecasts(request, snapshot, output).get(path) for path in Path]
    return {
        f"TTFT (limit {policy.ttft_ms:g})": [f"{f.ttft_ms:,.2f}" if f else "-" for f in best],
        f"TPOT (limit {policy.tpot_ms:g})": [f"{f.tpot_ms:,.2f}" if f else "-" for f in best],
        "expected SLO misses": [f"{policy.misses(f):.3f}" if f else "-" for f in best],
    }
