"""One card, three strategies: chunks on all SMs, prefill and decode in partitions, and whichever suits.

    python -m nanopd.bench.one_card --profile h200          # writes docs/results/<gpu>/one_card.json

The same arrivals and prompts for all, on the same card. Two workloads that each favour one way of computing prompts,
and one in which they take turns:

* ``light``: prompts of about 1,000 tokens that nobody shares, short outputs. There is much to prefill and little KV.
* ``heavy``: questions of about 1,000 tokens about one of 32 documents of 8,192. The prefix cache answers for the
  documents, every decode still reads their KV. (With few documents several decodes would read the same one at once,
  and the card's L2 cache would answer for some of them.)
* ``phases``: a few seconds of the one, a few seconds of the other.

The time per token that is promised, 20 ms, is what makes it a choice: chunks of 512 beside light KV keep it, beside
heavy KV they do not. Where 35 ms would do, chunks are the better way nearly everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nanopd.bench.compare import Strategy
from nanopd.bench.lengths import Uniform
from nanopd.bench.load import LoadOptions, run_load
from nanopd.bench.metrics import SLO, Summary, summarize
from nanopd.bench.raw import write_records
from nanopd.bench.records import RequestRecord
from nanopd.bench.serve import serving_strategy
from nanopd.bench.workload import Documents, Part, Schedule, Workload, chain, poisson
from nanopd.costmodel.hardware_profile import HardwareProfile, load_profile
from nanopd.engine.sampling_params import SamplingParams
from nanopd.router.adaptive import Adaptive
from nanopd.router.decision import Policy
from nanopd.router.policies import make_policy

LIGHT = Workload("light", (Part(1.0, Uniform(512, 1536), Uniform(32, 96)),))
HEAVY = Workload("heavy", (Part(1.0, Uniform(512, 1536), Uniform(96, 160), Documents(32, 8192)),))
OBJECTIVES = SLO(ttft_s=1.0, tpot_s=0.020)
SEED = 1


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
    model: Any, places: Mapping[str, str], profile: HardwareProfile, chunk: int, options: Mapping[str, Any]
) -> list[Strategy]:
    """The three, on one card: the places of all of it ("whole") and of its parts ("prefill", "decode").

    ``options``: of ``Cluster.build``, for all of them.
    """
    assert OBJECTIVES.tpot_s is not None
    tpot_ms = OBJECTIVES.tpot_s * 1e3
    parts: dict[str, Any] = {"prefill": [places["prefill"]], "decode": [places["decode"]], "shared_pool": True}

    def adaptive() -> Policy:
        return Adaptive(profile.step_time, tpot_ms, chunk_size=chunk)

    return [
        serving_strategy("chunked", model, partial(make_policy, "collocated"), collocated=[places["whole"]], **options),
        serving_strategy("partitions", model, partial(make_policy, "disaggregated"), **parts, **options),
        serving_strategy("adaptive", model, adaptive, elastic=True, **parts, **options),
    ]


def compare(
    strategies: Sequence[Strategy],
    schedules: Callable[[], Iterable[tuple[str, float, Schedule]]],
    *,
    drain_s: float,
    about: Mapping[str, Any],
    tpots_s: Sequence[float] = (),
    raw: Path | None = None,
    show: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run everything, strategy after strategy. ``save`` is called after each run with what there is so far.

    ``schedules``: (workload, rate, arrivals) of the runs. ``tpots_s``: other promises for TPOT, with the same TTFT.

    Returns: ``{"slo", **about, "drain_s", "runs": {workload: {rate: {strategy: Summary as JSON}}}}``; with ``tpots_s``
    each run also has ``"kept": {milliseconds of TPOT: requests that got both promises}``.
    """
    slo = {"ttft_s": OBJECTIVES.ttft_s, "tpot_s": OBJECTIVES.tpot_s}
    result: dict[str, Any] = {"slo": slo, **about, "drain_s": drain_s, "runs": {}}
    for strategy in strategies:
        with strategy.open() as server:
            for workload, rate, schedule in schedules():
                records = _run(server, schedule, strategy.hardware.num_gpus, drain_s)
                if raw is not None:
                    about_run = {"workload": schedule.name, "fingerprint": schedule.fingerprint()}
                    write_records(raw / f"{workload}-{rate:g}-{strategy.name}.jsonl", about_run, records)
                summary = _summary(records, schedule, strategy.hardware.num_gpus)
                run = summary.to_json()
                if tpots_s:
                    run["kept"] = {
                        f"{tpot_s * 1e3:g}": _summary(records, schedule, 1, tpot_s).attained for tpot_s in tpots_s
                    }
                result["runs"].setdefault(workload, {}).setdefault(f"{rate:g}", {})[strategy.name] = run
                show(_line(strategy.name, workload, rate, summary))
                save(result)
    return result


def _summary(
    records: Sequence[RequestRecord], schedule: Schedule, num_gpus: int, tpot_s: float | None = None
) -> Summary:
    slo = OBJECTIVES if tpot_s is None else SLO(OBJECTIVES.ttft_s, tpot_s)
    return summarize(records, slo, offered=len(schedule), duration_s=schedule.duration_s, num_gpus=num_gpus)


def _run(server: Any, schedule: Schedule, num_devices: int, drain_s: float) -> list[RequestRecord]:
    """Before it the documents' KV, which runs before may have driven out of the prefix cache, and kernels of each kind.

    Each document once for every device: the scheduler gives them in turn to workers that have equally much to do.
    """
    once = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    documents = [document for document in schedule.documents(server.vocab_size) for _ in range(num_devices)]
    server.generate([*[[1, 2, 3]] * num_devices, *documents], once, use_tqdm=False)
    options = LoadOptions(drain_s=drain_s)
    records = run_load(server, schedule, vocab_size=server.vocab_size, options=options, use_tqdm=False)
    server.drain(30.0)
    return records


def _line(strategy: str, workload: str, rate: float, summary: Summary) -> str:
    times = ", ".join(
        f"{name} p50 {_ms(found.p50)} p90 {_ms(found.p90)} ms"
        for name, found in (("ttft", summary.ttft), ("tpot", summary.tpot))
    )
    counters = summary.counters
    done = f"{counters.completed}/{counters.offered} done"
    return f"{workload:7} {rate:5.4g} {strategy:10} attained {summary.attainment:.3f}  {times}  {done}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    from nanopd.model.loader import load_model
    from nanopd.ops.measure import write_result

    parser = argparse.ArgumentParser(prog="python -m nanopd.bench.one_card", description=__doc__)
    parser.add_argument("--model", default="dummy:qwen3-8b")
    parser.add_argument("--profile", default="h200", help="name of a preset or a file of nanopd profile")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--decode-sms", type=int, default=64)
    parser.add_argument("--prefill-sms", type=int, default=68)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=40_000)
    parser.add_argument("--out", type=Path, help="folder of records; docs/results by default")
    options = parser.parse_args(arguments)
    places = {
        "whole": options.device,
        "prefill": f"{options.device}/sm={options.prefill_sms}",
        "decode": f"{options.device}/sm={options.decode_sms}",
    }
    profile = load_profile(options.profile)
    model = load_model(options.model, device=options.device)
    compared = strategies(model, places, profile, options.chunk, serving_options(options.blocks, options.chunk))
    command = f"python -m nanopd.bench.one_card --profile {options.profile}"

    def save(result: dict[str, Any]) -> None:
        write_result("one_card", result, device=options.device, command=command, folder=options.out)

    raw = None if options.out is None else options.out / "one_card"
    plan = Plan()
    about = {"chunk_size": options.chunk, "places": places, **plan.to_json()}
    compare(compared, plan.schedules, drain_s=plan.drain_s, about=about, raw=raw, save=save)


def serving_options(blocks: int, chunk: int) -> dict[str, Any]:
    """Options of ``Cluster.build`` for all strategies: pools of ``blocks``, steps of up to 256 decodes as graphs."""
    return {
        "num_blocks": blocks,
        "collocated_chunk": chunk,
        "max_model_len": 16_384,
        "graph_sizes": (1, 2, 4, 8, *range(16, 129, 8), 160, 192, 256),
        "use_tqdm": False,
    }


if __name__ == "__main__":
    main()
