"""What Python's global lock costs: decodes beside a thread that does all of prefill but its arithmetic."""

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

SWITCH_INTERVAL = 0.0005  # seconds: how long one thread may run Python while another waits; Python's own is 0.005


def gil_cost(loaded: LoadedModel, sizes: Sizes) -> dict[str, Any]:
    """What decodes wait for a token while another thread prepares and launches prefill steps, by switch interval.

    The other thread runs prefill steps of a model with as many layers but next to no arithmetic, on the prefill side's
    SMs: as much Python and as many launches per step as the real one, and hardly any work for the device. So what it
    adds to the decodes' gaps is what it costs to share the interpreter.
    """
    model = loaded.model
    config = replace(preset("tiny"), name="no work", num_layers=loaded.config.num_layers)
    tiny = Transformer(config, random_weights(config, model.device, model.dtype), get_ops(model.device))
    middle = sizes.splits[len(sizes.splits) // 2]
    batch, context = sizes.states[0]
    small = replace(sizes, states=(sizes.states[0],))
    with (
        measured_cluster(loaded, small, prefill=[middle[1]], decode=[middle[0]]) as cluster,
        measured_cluster(
            LoadedModel(config, tiny, None), replace(small, states=((1, 64),)), collocated=[middle[1]]
        ) as launcher,
    ):
        decode, other = cluster.workers[1], launcher.workers[0]
        lock = threading.Lock()
        load = Load(decode, lock, Decodes(decode, batch, context))
        (steps,) = run_together([load], sizes.seconds, warmup=sizes.warmup)
        result: dict[str, Any] = {"state": f"b{batch}_ctx{context}", "alone": summary(gaps_ms(steps))}
        for interval in (0.005, SWITCH_INTERVAL):
            with switch_interval(interval):
                busy = Load(other, threading.Lock(), prompts=Prompts(other, min(64, sizes.prompt)))
                load = Load(decode, lock, Decodes(decode, batch, context))
                steps, launched = run_together([load, busy], sizes.seconds, warmup=sizes.warmup)
                beside = summary(gaps_ms(steps))
                rate = len(launched) / (launched[-1].end - launched[0].end) if len(launched) > 1 else 0.0
                result[f"beside_{interval * 1e3:g}ms"] = {**beside, "other_steps_per_s": rate}
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
