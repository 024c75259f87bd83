"""What Python's global lock costs: decodes beside somebody who does all of prefill but its arithmetic."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nanopd.model.dummy import random_weights
from nanopd.model.loader import LoadedModel
from nanopd.model.presets import preset
from nanopd.model.transformer import Transformer
from nanopd.ops import get_ops
from nanopd.workers.curves import summary
from nanopd.workers.loads import Decodes, Load, Prompts, gaps_ms, run_together
from nanopd.workers.measured import Sizes, measured_cluster
from nanopd.workers.spec import DeviceSpec
from nanopd.workers.worker import Worker

SWITCH_INTERVAL = 0.0005  # seconds: how long one thread may run Python while another waits; Python's own is 0.005


def gil_cost(loaded: LoadedModel, sizes: Sizes) -> dict[str, Any]:
    """What decodes wait for a token while somebody else prepares and launches prefill steps.

    Alone; beside a thread that does so, by switch interval; and beside a process (``Cluster.build(processes=True)``),
    on the whole of the device, since a partition is for one process. Two processes take turns on a GPU instead of
    sharing it, so this row holds those turns too.

    The other side runs prefill steps of a model with as many layers but next to no arithmetic, on the prefill side's
    SMs: as much Python and as many launches per step as the real one, and hardly any work for the device. So what it
    adds to the decodes' gaps is what it costs to share the interpreter.
    """
    model = loaded.model
    config = replace(preset("tiny"), name="no work", num_layers=loaded.config.num_layers)
    tiny = Transformer(config, random_weights(config, model.device, model.dtype), get_ops(model.device))
    middle = sizes.splits[len(sizes.splits) // 2]
    batch, context = sizes.states[0]
    place = replace(DeviceSpec.parse(middle[1]), num_sms=None)
    small = replace(sizes, states=(sizes.states[0],))
    no_work, few = LoadedModel(config, tiny, None), replace(small, states=((1, 64),))
    with (
        measured_cluster(loaded, small, prefill=[middle[1]], decode=[middle[0]]) as cluster,
        measured_cluster(no_work, few, collocated=[middle[1]]) as launcher,
    ):
        decode, lock = cluster.workers[1], threading.Lock()
        load = Load(decode, lock, Decodes(decode, batch, context))
        (steps,) = run_together([load], sizes.seconds, warmup=sizes.warmup)
        result: dict[str, Any] = {"state": f"b{batch}_ctx{context}", "alone": summary(gaps_ms(steps))}

        def beside(other: Worker) -> dict[str, Any]:
            busy = Load(other, threading.Lock(), prompts=Prompts(other, min(64, sizes.prompt)))
            load = Load(decode, lock, Decodes(decode, batch, context))
            steps, launched = run_together([load, busy], sizes.seconds, warmup=sizes.warmup)
            rate = len(launched) / (launched[-1].end - launched[0].end) if len(launched) > 1 else 0.0
            return {**summary(gaps_ms(steps)), "other_steps_per_s": rate}

        for interval in (0.005, SWITCH_INTERVAL):
            with switch_interval(interval):
                result[f"beside_{interval * 1e3:g}ms"] = beside(launcher.workers[0])
        with measured_cluster(no_work, few, collocated=[place], processes=True) as apart:
            result["beside_process"] = beside(apart.workers[0])
    return result


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """``sys.setswitchinterval`` for a while: how long a thread keeps the interpreter when others ask for it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
