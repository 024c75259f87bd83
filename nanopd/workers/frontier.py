"""The frontier of one device: how fast it prefills, against what its decodes wait for a token meanwhile.

Three ways to do both at once, each with the engine's own scheduler, runner and paged KV:

* **chunked**: one worker, each step takes a chunk of prompt tokens beside all decodes (Sarathi-Serve, Agrawal et al.,
  OSDI 2024). A larger chunk prefills faster and makes every decode wait longer.
* **split**: a decode and a prefill worker, each on its own SMs (on the CPU: cores), over one pool.
* **streams**: the same two workers with no partition: the device shares itself out.

Chunks attend to what their prompt has computed before. Contexts of the decodes stay constant as ``loads.Decodes``
says. ``python -m nanopd.workers.frontier`` measures and writes the record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from nanopd.engine.scheduler import Scheduler
from nanopd.errors import ConfigError
from nanopd.model.loader import LoadedModel, load_model
from nanopd.workers.curves import compare, lines, summary
from nanopd.workers.gil import SWITCH_INTERVAL, gil_cost, switch_interval
from nanopd.workers.loads import Decodes, Load, Prompts, Step, gaps_ms, prefill_rate, run_together
from nanopd.workers.measured import Sizes, cpu_sizes, gpu_sizes, measured_cluster
from nanopd.workers.partition import BlasHint
from nanopd.workers.spec import DeviceSpec
from nanopd.workers.worker import Worker


def measure_frontier(
    model: str | LoadedModel,
    device: str | None = None,
    *,
    sizes: Sizes | None = None,
    gil: bool = True,
    blas_hint: BlasHint = "always",
    progress: bool = True,
    save: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Measure all three curves for every state. Under four minutes on an H200, half of one on a small CPU model.

    Returns plain numbers for ``nanopd.ops.measure.write_result``: "states" by name ("b64_ctx8192"), each with

    * "alone": decodes without any prefill on the whole device
    * "chunked": chunk -> point; "split": "48/84" -> point; "streams": tokens per prefill step -> point
    * "at_equal_tpot": split -> its prefill throughput over the chunked curve's at the same TPOT, see ``compare``

    where a point has mean_ms, p50_ms, p99_ms between tokens, steps, and prefill_tokens_per_ms. A split's also has
    "decode_alone", the same decodes in the same partition without prefill, and "p99_of_alone", 99th over 99th
    percentile; with ``sizes.settle`` also "starting_of_alone", the longest gap before that, over the 99th percentile
    of "decode_alone"; "prefill_alone" is the prefill rate by split while nobody decodes. "gil": ``gil_cost``.

    ``blas_hint``: as for ``Cluster.build``. ``save`` is called with what there is after each split, in case the
    measurement does not get to its end.
    """
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    spec = DeviceSpec.parse(device)
    loaded = load_model(model, device=spec.device) if isinstance(model, str) else model
    sizes = sizes or (gpu_sizes(spec.device) if spec.is_cuda else cpu_sizes())
    states: dict[str, dict[str, Any]] = {
        f"b{batch}_ctx{context}": {"chunked": {}, "split": {}, "streams": {}, "at_equal_tpot": {}}
        for batch, context in sizes.states
    }
    results: dict[str, Any] = {
        "model": loaded.config.name,
        "blas_hint": blas_hint,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "prompt_tokens": sizes.prompt,
        "switch_interval_ms": SWITCH_INTERVAL * 1e3,
        "states": states,
        "prefill_alone": {},
    }
    num_points = len(states) * (len(sizes.chunks) + 2 * len(sizes.splits) + 3) + (gil and bool(sizes.splits))
    with switch_interval(SWITCH_INTERVAL), _bar(num_points, progress) as done:
        _measure_chunked(loaded, sizes, states, done)
        _measure_streams(loaded, sizes, states, done)
        for split in sizes.splits:
            _measure_split(loaded, sizes, split, results, done)
            for state in states.values():
                state["at_equal_tpot"] = compare(state)
            if save is not None:
                save(results)
        if gil and sizes.splits:
            results["gil"] = gil_cost(loaded, sizes)
            done("gil")
    return results


# --- the three curves ------------------------------------------------------------------------------------------


def _measure_chunked(loaded: LoadedModel, sizes: Sizes, states: dict[str, Any], done: Callable[[str], None]) -> None:
    with measured_cluster(loaded, sizes, collocated=[sizes.whole]) as cluster:
        (worker,) = cluster.workers
        lock, config = threading.Lock(), worker.scheduler.config
        for (batch, context), (name, state) in zip(sizes.states, states.items()):
            (steps,) = _run(sizes, Load(worker, lock, Decodes(worker, batch, context)))
            state["alone"] = summary(gaps_ms(steps))
            done(f"{name} alone")
            for chunk in sizes.chunks:
                worker.scheduler = Scheduler(replace(config, chunk_size=chunk), worker.block_manager)
                decodes, prompts = Decodes(worker, batch, context), Prompts(worker, sizes.prompt)
                whole_prompt = -(-sizes.prompt // chunk) + 1  # every kernel that its last chunk needs is compiled then
                load = Load(worker, lock, decodes, prompts)
                (steps,) = _run(sizes, load, warmup=whole_prompt, settle=sizes.settle)
                state["chunked"][str(chunk)] = point(steps, steps)
                done(f"{name} chunk {chunk}")


def _measure_streams(loaded: LoadedModel, sizes: Sizes, states: dict[str, Any], done: Callable[[str], None]) -> None:
    """Prefill in whole prompts, and in steps of a quarter of one, between which decodes may slip in."""
    device = DeviceSpec.parse(sizes.whole).device  # bound to no cores: each worker may use them all
    with measured_cluster(loaded, sizes, prefill=[device], decode=[device]) as cluster:
        prefill, decode = cluster.workers
        config = prefill.scheduler.config
        for (batch, context), (name, state) in zip(sizes.states, states.items()):
            for chunk in (sizes.prompt // 4, sizes.prompt):
                prefill.scheduler = Scheduler(replace(config, chunk_size=chunk), prefill.block_manager)
                _, decodes, prompts = _beside(prefill, decode, batch, context, sizes)
                state["streams"][str(chunk)] = point(decodes, prompts)
                done(f"{name} streams {chunk}")


def _measure_split(
    loaded: LoadedModel, sizes: Sizes, split: tuple[str, str], results: dict[str, Any], done: Callable[[str], None]
) -> None:
    hint = results["blas_hint"]
    with measured_cluster(loaded, sizes, prefill=[split[1]], decode=[split[0]], blas_hint=hint) as cluster:
        prefill, decode = cluster.workers
        lock, name = threading.Lock(), split_name(*split)
        (steps,) = _run(sizes, Load(prefill, lock, prompts=Prompts(prefill, sizes.prompt)), share=0.5)
        results["prefill_alone"][name] = prefill_rate(steps)
        for (batch, context), (state_name, state) in zip(sizes.states, results["states"].items()):
            (steps,) = _run(sizes, Load(decode, lock, Decodes(decode, batch, context)), share=1.5)
            solo = summary(gaps_ms(steps))
            done(f"{state_name} {name} alone")
            before, decodes, prompts = _beside(prefill, decode, batch, context, sizes, share=2.0)
            beside = point(decodes, prompts)
            ratio = beside["p99_ms"] / solo["p99_ms"]
            state["split"][name] = {**beside, "decode_alone": solo, "p99_of_alone": ratio}
            if gaps := gaps_ms(before):
                state["split"][name]["starting_of_alone"] = max(gaps) / solo["p99_ms"]
            done(f"{state_name} {name}")


def _beside(
    prefill: Worker, decode: Worker, batch: int, context: int, sizes: Sizes, share: float = 1.0
) -> tuple[list[Step], list[Step], list[Step]]:
    """Steps of the decode and of the prefill worker, running at once; first those decodes while the card settles."""
    lock = threading.Lock()  # over the books of the pool that they share
    load, prompts = Load(decode, lock, Decodes(decode, batch, context)), Prompts(prefill, sizes.prompt)
    steps, prefills = _run(sizes, load, Load(prefill, lock, prompts=prompts), share=share, settle=sizes.settle)
    before = [step for step in load.steps if step.end < steps[0].end][sizes.warmup :]
    return before if sizes.settle else [], steps, prefills


def point(decodes: Sequence[Step], prompts: Sequence[Step]) -> dict[str, float]:
    """One point of a curve: what decodes waited, and what was prefilled meanwhile."""
    return {**summary(gaps_ms(decodes)), "prefill_tokens_per_ms": prefill_rate(prompts)}


def split_name(decode: str, prefill: str) -> str:
    """ "48/84": SMs of decode and prefill, or numbers of cores."""

    def size(text: str) -> int:
        spec = DeviceSpec.parse(text)
        if spec.num_sms is None and spec.cores is None:
            raise ConfigError(f"a split gives each side a part of the device, got {text!r}: add /sm=… or /cores=…")
        return spec.num_sms or len(spec.cores or ())

    return f"{size(decode)}/{size(prefill)}"


# --- inside ----------------------------------------------------------------------------------------------------


def _run(
    sizes: Sizes,
    *loads: Load,
    share: float = 1.0,
    warmup: int = 0,
    settle: float = 0.0,
) -> list[list[Step]]:
    return run_together(loads, share * sizes.seconds, warmup=max(warmup, sizes.warmup), settle=settle)


@contextmanager
def _bar(total: int, show: bool) -> Iterator[Callable[[str], None]]:
    from tqdm.auto import tqdm

    with tqdm(total=total, disable=not show, desc="Frontier") as bar:

        def done(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        yield done


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write ``pd_frontier.json``."""
    import argparse

    from nanopd.ops.measure import write_result

    parser = argparse.ArgumentParser(prog="python -m nanopd.workers.frontier", description=main.__doc__)
    parser.add_argument("--device", default=None, help="cuda:0 or cpu; default a GPU if there is one")
    parser.add_argument("--model", default=None, help="default dummy:qwen3-8b on a GPU, smollm2 on the CPU")
    parser.add_argument("--blas-hint", default="always", choices=get_args(BlasHint), help="see Cluster.build")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    model = options.model or ("dummy:qwen3-8b" if device.startswith("cuda") else "smollm2")
    command = f"python -m nanopd.workers.frontier --model {model} --device {device} --blas-hint {options.blas_hint}"
    name = "pd_frontier" if options.blas_hint == "always" else f"pd_frontier_{options.blas_hint}"

    def save(results: dict[str, Any]) -> Path:
        return write_result(name, results, device=device, command=command)

    results = measure_frontier(model, device, blas_hint=options.blas_hint, save=save)
    print("\n".join(lines(results)))
    print(f"prefill alone, tokens per ms: {results['prefill_alone']}\ngil: {results.get('gil')}")
    print(f"written: {save(results)}")


if __name__ == "__main__":
    main()
