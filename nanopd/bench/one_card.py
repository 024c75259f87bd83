"""One card, three strategies: chunks on all SMs, prefill and decode in partitions, and whichever suits.

    python -m nanopd.bench.one_card --profile h200          # writes docs/results/<gpu>/one_card.json

The same arrivals and prompts for all, on the same card. Two workloads that each favour one way of computing prompts,
and one in which they take turns:

* ``light`` and ``heavy``, as `nanopd.bench.cards` has them;
* ``phases``: a few seconds of the one, a few seconds of the other.

The time per token that is promised, 20 ms, is what makes it a choice: chunks of 512 beside light KV keep it, beside
heavy KV they do not. Where 35 ms would do, chunks are the better way nearly everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanopd.bench.cards import HEAVY, LIGHT, OBJECTIVES, SEED, card_parser, compare, raw_folder, serving_options
from nanopd.bench.compare import Strategy
from nanopd.bench.serve import serving_strategy
from nanopd.bench.workload import Schedule, chain, poisson
from nanopd.costmodel.hardware_profile import HardwareProfile, load_profile
from nanopd.router.adaptive import Adaptive
from nanopd.router.decision import Policy
from nanopd.router.policies import make_policy


@dataclass(frozen=True)
class Plan:
    """What to run: the rates of both workloads, and multiples of ``phase_rates`` for the one that alternates."""

    light: tuple[float, ...] = (12.0, 17.0, 22.0, 27.0, 32.0, 37.0)
    heavy: tuple[float, ...] = (6.0, 8.5, 11.0, 13.5, 16.0, 18.5)
    phases: tuple[float, ...] = (0.85, 1.0)
    phase_rates: tuple[float, float] = (27.0, 11.0)
    duration_s: float = 4.5
    heavy_s: float = 5.0
    phase_s: float = 3.0
    drain_s: float = 4.0

    def schedules(self) -> Iterator[tuple[str, float, Schedule]]:
        """(workload, rate or multiple, arrivals). Those with documents first: these are then computed only once."""
        for rate in self.heavy:
            yield "heavy", rate, poisson(HEAVY, rate, self.heavy_s, SEED)
        for factor in self.phases:
            yield "phases", factor, self.phase_schedule(factor)
        for rate in self.light:
            yield "light", rate, poisson(LIGHT, rate, self.duration_s, SEED)

    def to_json(self) -> dict[str, Any]:
        """What the rates of `schedules` do not say."""
        return {
            "duration_s": {"light": self.duration_s, "heavy": self.heavy_s},
            "phase_s": self.phase_s,
            "phase_rates": list(self.phase_rates),
        }

    def phase_schedule(self, factor: float) -> Schedule:
        pair = [(LIGHT, self.phase_rates[0]), (HEAVY, self.phase_rates[1])]
        parts = [poisson(load, rate * factor, self.phase_s, SEED) for load, rate in pair]
        return chain("phases", parts * 2)


def strategies(
    model: Any, places: Mapping[str, str], profile: HardwareProfile, options: Mapping[str, Any]
) -> list[Strategy]:
    """The three, on one card: the places of all of it ("whole") and of its parts ("prefill", "decode").

    ``options``: of ``Cluster.build``, for all of them; ``collocated_chunk`` must be among them.
    """
    assert OBJECTIVES.tpot_s is not None
    tpot_ms = OBJECTIVES.tpot_s * 1e3
    parts: dict[str, Any] = {"prefill": [places["prefill"]], "decode": [places["decode"]], "shared_pool": True}

    def adaptive() -> Policy:
        return Adaptive(profile.step_time, tpot_ms, chunk_size=options["collocated_chunk"])

    return [
        serving_strategy("chunked", model, partial(make_policy, "collocated"), collocated=[places["whole"]], **options),
        serving_strategy("partitions", model, partial(make_policy, "disaggregated"), **parts, **options),
        serving_strategy("adaptive", model, adaptive, elastic=True, **parts, **options),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    from nanopd.model.loader import load_model
    from nanopd.ops.measure import write_result

    parser = card_parser("one_card", __doc__)
    parser.add_argument("--profile", default="h200", help="name of a preset or a file of nanopd profile")
    parser.add_argument("--decode-sms", type=int, default=64)
    parser.add_argument("--prefill-sms", type=int, default=68)
    options = parser.parse_args(arguments)
    raw = raw_folder(options.out, "one_card")
    places = {
        "whole": options.device,
        "prefill": f"{options.device}/sm={options.prefill_sms}",
        "decode": f"{options.device}/sm={options.decode_sms}",
    }
    profile = load_profile(options.profile)
    model = load_model(options.model, device=options.device)
    compared = strategies(model, places, profile, serving_options(options.blocks, options.chunk))
    command = f"python -m nanopd.bench.one_card --profile {options.profile}"

    def save(result: dict[str, Any]) -> None:
        write_result("one_card", result, device=options.device, command=command, folder=options.out)

    plan = Plan()
    about = {"chunk_size": options.chunk, "places": places, **plan.to_json()}
    compare(compared, list(plan.schedules()), drain_s=plan.drain_s, about=about, raw=raw, save=save)


if __name__ == "__main__":
    main()
