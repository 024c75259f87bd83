"""Strategies on one card or two, under the same loads: what `one_card` and `two_cards` share.

* ``light``: prompts of about 1,000 tokens that nobody shares, short outputs. There is much to prefill and little KV.
* ``heavy``: questions of about 1,000 tokens about one of 32 documents of 8,192. The prefix cache answers for the
  documents, every decode still reads their KV. (With few documents several decodes would read the same one at once,
  and the card's L2 cache would answer for some of them.)
* ``long``: prompts of about 6,000 tokens that nobody shares, short outputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanopd.bench.compare import GoodputSearch, Strategy
from nanopd.bench.lengths import Uniform
from nanopd.bench.load import LoadOptions, run_load
from nanopd.bench.metrics import SLO, Summary, summarize
from nanopd.bench.raw import write_records
from nanopd.bench.records import RequestRecord
from nanopd.bench.workload import Documents, Part, Schedule, Workload
from nanopd.costmodel.files import check_writable
from nanopd.engine.sampling_params import SamplingParams

LIGHT = Workload("light", (Part(1.0, Uniform(512, 1536), Uniform(32, 96)),))
HEAVY = Workload("heavy", (Part(1.0, Uniform(512, 1536), Uniform(96, 160), Documents(32, 8192)),))
LONG = Workload("long", (Part(1.0, Uniform(4096, 8192), Uniform(96, 160)),))
OBJECTIVES = SLO(ttft_s=1.0, tpot_s=0.020)
TPOTS_S = (0.008, 0.010, 0.012, 0.015, 0.020)  # promises of TPOT for which requests are counted
ENOUGH = GoodputSearch.target  # of the requests, as for goodput
SEED = 1


def card_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Options that ``python -m nanopd.bench.<name>`` has for one card and for two."""
    parser = argparse.ArgumentParser(prog=f"python -m nanopd.bench.{name}", description=description)
    parser.add_argument("--model", default="dummy:qwen3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=40_000)
    parser.add_argument("--out", type=Path, help="folder of records; docs/results by default")
    return parser


def serving_options(blocks: int, chunk: int) -> dict[str, Any]:
    """Options of ``Cluster.build`` for all strategies: pools of ``blocks``, steps of up to 256 decodes as graphs."""
    return {
        "num_blocks": blocks,
        "collocated_chunk": chunk,
        "max_model_len": 16_384,
        "graph_sizes": (1, 2, 4, 8, *range(16, 129, 8), 160, 192, 256),
        "use_tqdm": False,
    }


def raw_folder(out: Path | None, name: str) -> Path | None:
    """Where raw records go, under ``--out``. Raises ConfigError, before anything is measured, if nothing can."""
    if out is None:
        return None
    check_writable("--out", out / name / "record.jsonl")
    return out / name


def compare(
    strategies: Sequence[Strategy],
    schedules: Sequence[tuple[str, float, Schedule]],
    *,
    drain_s: float,
    about: Mapping[str, Any],
    tpots_s: Sequence[float] = TPOTS_S,
    raw: Path | None = None,
    show: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run everything, strategy after strategy. ``save`` is called after each run with what there is so far.

    ``schedules``: (workload, rate, arrivals) of the runs. ``tpots_s``: promises for TPOT, with the TTFT of OBJECTIVES.

    Returns: ``{"slo", **about, "drain_s", "runs": {workload: {rate: {strategy: run}}}}``. A run is a Summary as JSON,
    and ``"kept": {milliseconds of TPOT: requests that got both promises}``. ``"highest"``: see `highest_rates`.
    """
    slo = {"ttft_s": OBJECTIVES.ttft_s, "tpot_s": OBJECTIVES.tpot_s}
    result: dict[str, Any] = {"slo": slo, **about, "drain_s": drain_s, "runs": {}}
    for strategy in strategies:
        with strategy.open() as server:
            for workload, rate, schedule in schedules:
                records = _run(server, schedule, strategy.hardware.num_gpus, drain_s)
                if raw is not None:
                    about_run = {"workload": schedule.name, "fingerprint": schedule.fingerprint()}
                    write_records(raw / f"{workload}-{rate:g}-{strategy.name}.jsonl", about_run, records)
                summary = summarize(
                    records,
                    OBJECTIVES,
                    offered=len(schedule),
                    duration_s=schedule.duration_s,
                    num_gpus=strategy.hardware.num_gpus,
                )
                run = summary.to_json()
                run["kept"] = {f"{tpot_s * 1e3:g}": kept(records, tpot_s) for tpot_s in tpots_s}
                result["runs"].setdefault(workload, {}).setdefault(f"{rate:g}", {})[strategy.name] = run
                result["highest"] = highest_rates(result["runs"])
                show(_line(strategy.name, workload, rate, summary))
                save(result)
    return result


def highest_rates(runs: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float | None]]]:
    """workload -> TPOT promised (ms) -> strategy -> the highest offered rate tried at which 90 % got both promises.

    Requests per second; None if there was no such rate.
    """
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for workload, by_rate in runs.items():
        for by_strategy in by_rate.values():
            for strategy, run in by_strategy.items():
                for ms, count in run["kept"].items():
                    best = found.setdefault(workload, {}).setdefault(ms, {})
                    best.setdefault(strategy, None)
                    if count >= ENOUGH * run["counters"]["offered"]:
                        best[strategy] = max(best[strategy] or 0.0, run["offered_rate"])
    return found


def kept(records: Iterable[RequestRecord], tpot_s: float) -> int:
    """Requests that got a first token in time, and TPOT within ``tpot_s`` seconds."""
    slo = SLO(OBJECTIVES.ttft_s, tpot_s)
    return sum(slo.met_by(record) for record in records)


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
