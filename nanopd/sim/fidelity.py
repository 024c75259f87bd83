"""How far the simulator is from what was measured: the same arrivals, the same places, under the virtual clock.

    python -m nanopd.sim.fidelity         # against docs/results/nvidia-h200/one_card.json

One number is not the profile's: ``host_s``, what planning, launching and bookkeeping take per step in a server that
also has clients. It was set once, from the three lightest collocated runs of an earlier record (commit efc45a1), and is
kept for all others.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanopd.bench.cards import HEAVY, LIGHT, OBJECTIVES, SEED
from nanopd.bench.load import LoadOptions
from nanopd.bench.metrics import Percentiles, Summary, summarize
from nanopd.bench.raw import read_records
from nanopd.bench.records import RequestRecord
from nanopd.bench.workload import Schedule, Workload, poisson
from nanopd.costmodel.hardware_profile import HardwareProfile, load_profile
from nanopd.errors import ConfigError
from nanopd.router.decision import Policy
from nanopd.router.policies import make_policy
from nanopd.sim.cluster import SimulatedCluster
from nanopd.sim.load import run_virtual

HOST_S = 0.00085  # seconds per step, see above
WARM_UP_S = 60.0  # of virtual time, in which documents are computed
METRICS = ("ttft", "tpot", "e2e")
SHARES = ("p50", "p90")


def simulate(
    strategy: str,
    rate: float,
    record: Mapping[str, Any],
    profile: HardwareProfile,
    host_s: float,
    workload: Workload = LIGHT,
) -> tuple[Schedule, list[RequestRecord]]:
    """One of the record's runs, repeated in virtual time: what arrived, and what became of it."""
    schedule = poisson(workload, rate, record["duration_s"][workload.name], SEED)
    cluster, policy = _cluster(strategy, record, profile, host_s)
    whole, before = after_documents(schedule, cluster.hardware.num_gpus)
    records = run_virtual(cluster.driver(policy), whole, options=LoadOptions(drain_s=record["drain_s"]))
    own = sorted(records, key=lambda r: r.index)[before:]
    return schedule, [replace(r, index=r.index - before, time_s=r.time_s - WARM_UP_S) for r in own] if before else own


def _cluster(
    strategy: str, record: Mapping[str, Any], profile: HardwareProfile, host_s: float
) -> tuple[SimulatedCluster, Policy]:
    """What served, and how requests were routed. Without a place "whole", all of it is both cards."""
    places = record["places"]
    common: dict[str, Any] = {"num_blocks": 40_000, "max_model_len": 16_384, "host_s": host_s}
    if strategy == "chunked":
        whole = [places["whole"]] if "whole" in places else [places["prefill"], places["decode"]]
        cluster = SimulatedCluster(profile, collocated=whole, collocated_chunk=record["chunk_size"], **common)
        return cluster, make_policy("collocated")
    if strategy not in ("partitions", "apart"):
        raise ConfigError(f"no strategy {strategy!r} to compare; there are chunked, partitions and apart")
    if strategy == "apart":
        speeds = [link["gb_s"] for link in record["links"].values()]
        if not speeds or None in speeds:
            raise ConfigError(f"the record says of no link, or not of every one, how fast it was: {record['links']}")
        common["link_gb_s"] = min(speeds)
    else:
        common["shared_pool"] = True
    cluster = SimulatedCluster(profile, prefill=[places["prefill"]], decode=[places["decode"]], **common)
    return cluster, make_policy("disaggregated")


def after_documents(schedule: Schedule, copies: int = 1) -> tuple[Schedule, int]:
    """The same arrivals ``WARM_UP_S`` later, behind ``copies`` requests for each document that occurs, since the
    measured runs found these in the cache of each card. Returns them, and how many such requests there are."""
    first = {arrival.prefix: arrival for arrival in schedule.arrivals if arrival.prefix and arrival.prefix[0] < 0}
    if not first:
        return schedule, 0
    times = [i * WARM_UP_S / 2 / len(first) for i in range(len(first)) for _ in range(copies)]
    asked = [a for a in first.values() for _ in range(copies)]
    documents = [
        replace(a, index=i, time_s=time_s, prompt_tokens=len(a.prefix) * a.prefix_block, output_tokens=2)
        for i, (a, time_s) in enumerate(zip(asked, times, strict=True))
    ]
    others = [replace(a, index=a.index + len(documents), time_s=a.time_s + WARM_UP_S) for a in schedule.arrivals]
    whole = replace(schedule, arrivals=(*documents, *others), duration_s=schedule.duration_s + WARM_UP_S)
    return whole, len(documents)


def compare_with_record(
    record: Mapping[str, Any], profile: HardwareProfile, host_s: float = HOST_S, workload: Workload = LIGHT
) -> dict[str, dict[str, dict[str, float]]]:
    """strategy -> rate -> ``{metric}_{share}_{measured_ms | simulated_ms | error}``; the error is a ratio less one."""
    runs: dict[str, dict[str, dict[str, float]]] = {}
    for strategy in ("chunked", "partitions"):
        for rate, by_strategy in record["runs"][workload.name].items():
            schedule, records = simulate(strategy, float(rate), record, profile, host_s, workload)
            simulated = summarize(records, OBJECTIVES, offered=len(schedule), duration_s=schedule.duration_s)
            runs.setdefault(strategy, {})[rate] = differences(by_strategy[strategy], simulated)
    return runs


def request_errors(measured: Sequence[RequestRecord], simulated: Sequence[RequestRecord]) -> dict[str, float]:
    """How far the prediction for a single request is off: the median of |simulated / measured - 1|, by metric."""
    predicted = {record.index: record for record in simulated}
    found: dict[str, float] = {"requests": 0}
    for metric in METRICS:
        pairs = [(getattr(real, f"{metric}_s"), getattr(predicted[real.index], f"{metric}_s")) for real in measured]
        ratios = [virtual / real for real, virtual in pairs if real and virtual]
        found[metric] = statistics.median(abs(ratio - 1) for ratio in ratios)
        found["requests"] = max(found["requests"], len(ratios))
    return found


def differences(measured: Mapping[str, Any], simulated: Summary) -> dict[str, float]:
    """``{metric}_{share}_{measured_ms | simulated_ms | error}`` of a run: a summary's JSON against a simulated one."""
    row: dict[str, float] = {}
    for metric in METRICS:
        found: Percentiles = getattr(simulated, metric)
        for share in SHARES:
            real, virtual = measured[metric][share], getattr(found, share)
            name = f"{metric}_{share}"
            row[f"{name}_measured_ms"], row[f"{name}_simulated_ms"] = real * 1e3, virtual * 1e3
            row[f"{name}_error"] = virtual / real - 1
    return row


def table(runs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A line per run: simulated over measured, less one."""
    names = [f"{metric}_{share}" for metric in METRICS for share in SHARES]
    lines = ["strategy    rate  " + "  ".join(f"{name:>9}" for name in names)]
    for strategy, by_rate in runs.items():
        for rate, row in by_rate.items():
            errors = "  ".join(f"{row[name + '_error']:+9.1%}" for name in names)
            lines.append(f"{strategy:10}  {rate:>4}  {errors}")
    return "\n".join(lines)


def measured_record(name: str, gpu: str) -> dict[str, Any]:
    """The record ``name`` of ``nanopd.bench.<name>``. Raises ConfigError if ``gpu`` has none."""
    from nanopd.ops.measure import recorded

    record = recorded(name, gpu)
    if record is None:
        raise ConfigError(f"{gpu} has no record {name}.json; python -m nanopd.bench.{name} writes it")
    return record


def write_simulated(name: str, gpu: str, measured: Mapping[str, Any], command: str, values: Mapping[str, Any]) -> None:
    """``values`` as the record ``name`` beside the one that they are held against, with its environment."""
    from nanopd.ops.measure import results_dir

    path: Path = results_dir() / gpu / f"{name}.json"
    path.write_text(json.dumps({**measured, "command": command, "values": values}, indent=1) + "\n")
    print(f"written: {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m nanopd.sim.fidelity", description=__doc__)
    parser.add_argument("--gpu", default="nvidia-h200", help="whose record of nanopd.bench.one_card")
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--raw", type=Path, help="folder of its records, request by request; adds errors per request")
    parser.add_argument("--host-ms", type=float, default=HOST_S * 1e3)
    options = parser.parse_args(arguments)
    measured = measured_record("one_card", options.gpu)
    profile, host_s = load_profile(options.profile), options.host_ms / 1e3
    runs, heavy = (compare_with_record(measured["values"], profile, host_s, load) for load in (LIGHT, HEAVY))
    print(f"light\n{table(runs)}\nheavy\n{table(heavy)}")
    values: dict[str, Any] = {"host_ms": options.host_ms, "runs": runs, "heavy": heavy}
    if options.raw is not None:
        for strategy, by_rate in runs.items():
            for rate in by_rate:
                real = read_records(options.raw / f"light-{rate}-{strategy}.jsonl")
                errors = request_errors(real, simulate(strategy, float(rate), measured["values"], profile, host_s)[1])
                values.setdefault("per_request", {}).setdefault(strategy, {})[rate] = errors
                print(f"{strategy} {rate}: per request", {name: round(value, 3) for name, value in errors.items()})
    write_simulated("simulated", options.gpu, measured, "python -m nanopd.sim.fidelity", values)


if __name__ == "__main__":
    main()
