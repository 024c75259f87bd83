"""Two cards, measured and simulated: which way keeps more promises, and whether the simulator knew.

    python -m nanopd.sim.two_cards        # against docs/results/nvidia-h200/two_cards.json

The profile is that of one card; of two the simulator knows the link's GB/s besides, as probing found it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from nanopd.bench.cards import OBJECTIVES, kept
from nanopd.bench.metrics import summarize
from nanopd.bench.records import RequestRecord
from nanopd.bench.two_cards import WORKLOADS
from nanopd.bench.workload import Schedule
from nanopd.costmodel.hardware_profile import HardwareProfile, load_profile
from nanopd.errors import ConfigError
from nanopd.sim.fidelity import HOST_S, differences, measured_record, simulate, table, write_simulated

WAYS = ("chunked", "apart")
CHUNKS = (128, 256, 512, 1024)  # tokens, of chunks tried in simulation


def compare_with_record(record: Mapping[str, Any], profile: HardwareProfile) -> dict[str, dict[str, dict[str, Any]]]:
    """Workload -> rate -> strategy -> differences, as `nanopd.sim.fidelity.differences` has them.

    Each also has "kept": milliseconds of TPOT promised -> [requests that got both promises, measured and simulated].
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, by_rate in record["runs"].items():
        for rate, by_strategy in by_rate.items():
            for strategy, measured in by_strategy.items():
                run = simulate(strategy, float(rate), record, profile, HOST_S, WORKLOADS[name])
                found.setdefault(name, {}).setdefault(rate, {})[strategy] = _with_kept(measured, *run)
    return found


def other_chunks(
    record: Mapping[str, Any], profile: HardwareProfile
) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Two cards with chunks of other sizes, simulated: workload -> rate -> tokens -> TPOT in ms -> requests kept."""
    found: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for name, by_rate in record["runs"].items():
        for rate, by_strategy in by_rate.items():
            for chunk in CHUNKS:
                run = simulate(
                    "chunked", float(rate), {**record, "chunk_size": chunk}, profile, HOST_S, WORKLOADS[name]
                )
                counts = {ms: kept(run[1], float(ms) / 1e3) for ms in by_strategy["chunked"]["kept"]}
                found.setdefault(name, {}).setdefault(rate, {})[str(chunk)] = counts
    return found


def _with_kept(measured: Mapping[str, Any], schedule: Schedule, records: Sequence[RequestRecord]) -> dict[str, Any]:
    found = summarize(records, OBJECTIVES, offered=len(schedule), duration_s=schedule.duration_s)
    counts = {ms: [count, kept(records, float(ms) / 1e3)] for ms, count in measured["kept"].items()}
    return {**differences(measured, found), "kept": counts}


def verdicts(found: Mapping[str, Mapping[str, Mapping[str, Any]]], record: Mapping[str, Any]) -> dict[str, int]:
    """Which way keeps more promises, measured and simulated, over all loads, rates and promises ("all").

    A lead is clear if it is more than a tenth of the requests. Of the measured leads that are ("clear"), the simulated
    one is the "same" way's ("same_clear": and as clear), "none", or the "other" way's. "unfounded": clear where the
    measured one is not.
    """
    count = dict.fromkeys(("all", "clear", "same", "same_clear", "none", "other", "unfounded"), 0)
    for load, by_rate in found.items():
        for rate, ways in by_rate.items():
            tenth = record["runs"][load][rate]["chunked"]["counters"]["offered"] / 10
            for apart, chunked in zip(ways["apart"]["kept"].values(), ways["chunked"]["kept"].values(), strict=True):
                lead, simulated = (a - c for a, c in zip(apart, chunked, strict=True))
                count["all"] += 1
                if abs(lead) <= tenth:
                    count["unfounded"] += abs(simulated) > tenth
                    continue
                count["clear"] += 1
                count["same" if lead * simulated > 0 else "other" if lead * simulated < 0 else "none"] += 1
                count["same_clear"] += lead * simulated > 0 and abs(simulated) > tenth
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m nanopd.sim.two_cards", description=__doc__)
    parser.add_argument("--gpu", default="nvidia-h200", help="whose record of nanopd.bench.two_cards")
    parser.add_argument("--profile", default="h200")
    options = parser.parse_args(arguments)
    measured = measured_record("two_cards", options.gpu)
    record, profile = measured["values"], load_profile(options.profile)
    for load, by_rate in record["runs"].items():
        for rate, ways in by_rate.items():
            if set(ways) != set(WAYS):
                raise ConfigError(f"two_cards.json has {load} at {rate}/s for {', '.join(ways)} only: it was cut off")
    runs = compare_with_record(record, profile)
    for load, by_rate in runs.items():
        print(f"{load}\n{table({way: {rate: row[way] for rate, row in by_rate.items()} for way in WAYS})}")
    values = {
        "host_ms": HOST_S * 1e3,
        "runs": runs,
        "verdicts": verdicts(runs, record),
        "chunks": other_chunks(record, profile),
    }
    print("who keeps more:", values["verdicts"])
    write_simulated("simulated_two_cards", options.gpu, measured, "python -m nanopd.sim.two_cards", values)


if __name__ == "__main__":
    main()
