"""Two cards, two ways to use them: both phases on each card, or one card that prefills and one that decodes.

    python -m nanopd.bench.two_cards          # writes docs/results/<gpu>/two_cards.json

The same arrivals and prompts for both, on the same cards. Three loads, of which each asks for something else:

* ``long``: much to prefill. One prompt occupies a card for as long as some twenty decode steps take (in the record).
* ``heavy``: little to prefill, much KV to read.
* ``light``: short prompts and little KV.

How many requests kept their promises is counted for several promises of TPOT: in chunks it is the mean of steps with
and without a chunk, apart a step is a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanopd.bench.cards import HEAVY, LIGHT, LONG, SEED, card_parser, compare, raw_folder, serving_options
from nanopd.bench.compare import Strategy
from nanopd.bench.hardware import Hardware
from nanopd.bench.serve import serving_strategy
from nanopd.bench.workload import Schedule, poisson
from nanopd.errors import ConfigError
from nanopd.router.policies import make_policy

WORKLOADS = {load.name: load for load in (HEAVY, LONG, LIGHT)}  # with documents first: these are computed only once


@dataclass(frozen=True)
class Plan:
    """Rates, in requests per second for both cards together, and how long they arrive."""

    heavy: tuple[float, ...] = (8.0, 12.0, 17.0)
    long: tuple[float, ...] = (2.0, 3.0, 4.0, 5.0, 6.0)
    light: tuple[float, ...] = (28.0, 36.0, 44.0)
    duration_s: float = 5.0
    long_s: float = 8.0
    drain_s: float = 4.0

    def schedules(self) -> Iterator[tuple[str, float, Schedule]]:
        """(workload, rate, arrivals)."""
        rates = {"heavy": self.heavy, "long": self.long, "light": self.light}
        for name, workload in WORKLOADS.items():
            for rate in rates[name]:
                yield name, rate, poisson(workload, rate, self.seconds(name), SEED)

    def seconds(self, workload: str) -> float:
        return self.long_s if workload == "long" else self.duration_s


def strategies(
    model: Any, first: str, second: str, options: Mapping[str, Any], links: dict[str, Any]
) -> list[Strategy]:
    """Both. What the link between the cards was found to be is put in ``links`` when it stands."""

    def note(cluster: Any, server: Any) -> None:
        for (source, destination), link in cluster.links.items():
            if link.report is not None:
                links[f"{source} to {destination}"] = {"path": link.report.path, "gb_s": link.report.gb_s}

    chunked, apart = (partial(make_policy, name) for name in ("collocated", "disaggregated"))
    return [
        serving_strategy("chunked", model, chunked, collocated=[first, second], **options),
        serving_strategy("apart", model, apart, prefill=[first], decode=[second], on_open=note, **options),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    from nanopd.model.loader import load_model
    from nanopd.ops.measure import write_result

    parser = card_parser("two_cards", __doc__)
    parser.add_argument("--peer", default="cuda:1")
    options = parser.parse_args(arguments)
    raw = raw_folder(options.out, "two_cards")
    if Hardware.of_specs([options.device, options.peer]).num_gpus != 2:
        raise ConfigError(f"two cards are needed; --device {options.device} and --peer {options.peer} are one")
    links: dict[str, Any] = {}
    model = load_model(options.model, device=options.device)
    serving = serving_options(options.blocks, options.chunk)
    compared = strategies(model, options.device, options.peer, serving, links)
    plan = Plan()

    def save(result: dict[str, Any]) -> None:
        command = "python -m nanopd.bench.two_cards"
        write_result("two_cards", result, device=options.device, command=command, folder=options.out)

    about = {
        "chunk_size": options.chunk,
        "places": {"prefill": options.device, "decode": options.peer},
        "links": links,
        "duration_s": {name: plan.seconds(name) for name in WORKLOADS},
    }
    compare(compared, list(plan.schedules()), drain_s=plan.drain_s, about=about, raw=raw, save=save)


if __name__ == "__main__":
    main()
