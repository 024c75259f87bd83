"""How much of a transfer hides behind the prefill that feeds it, measured on a real model.

Four times are taken in turns, from the launch to the moment that the host knows: prefill alone; transfer alone; one
after the other; and streamed, where layer i leaves while layer i + 1 computes. The share hidden is
1 - (streamed - prefill) / transfer, see ``nanopd.transfer.timeline``.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from nanopd.engine.plan import ScheduledChunk, StepPlan
from nanopd.engine.request import Request
from nanopd.engine.runner import ModelRunner
from nanopd.engine.sampling_params import SamplingParams
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.cache import KVCache
from nanopd.model.loader import LoadedModel, load_model
from nanopd.ops.select import get_ops
from nanopd.transfer.handoff import Handoff
from nanopd.transfer.marks import HostMark, Mark
from nanopd.transfer.probe import BUILDERS
from nanopd.transfer.queued import QueuedLink, QueuedTransfer
from nanopd.transfer.streams import CudaMark, mark
from nanopd.transfer.throttled import ThrottledLink
from nanopd.transfer.timeline import LayerTimeline, Span, hidden_share

BLOCK_SIZE = 16
TIMEOUT = 120.0


class OverlapBench:
    """One prompt, a source pool it is prefilled into, a destination pool, and a link between them.

    Args:
        loaded: the model.
        num_tokens: length of the prompt; the step computes it whole.
        path: of the link, such as "pinned relay".
        gb_s: throttle the link to this; None: as fast as it is.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_tokens: int,
        path: str,
        *,
        gb_s: float | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        model, device = loaded.model, loaded.model.device
        num_blocks = -(-num_tokens // block_size)
        self.source, self.destination = (
            KVCache.allocate(loaded.config, num_blocks + 1, block_size, model.dtype, device) for _ in range(2)
        )
        self.runner = ModelRunner(
            model,
            self.source,
            model.ops,
            max_num_seqs=1,
            max_num_batched_tokens=num_tokens,
            max_model_len=num_tokens + 1,
            vocab_size=loaded.config.vocab_size,
            enforce_eager=True,
        )
        self.plan, blocks = _prefill_plan(num_tokens, num_blocks, block_size, loaded.config.vocab_size)
        ops = get_ops(device)  # kernels of its own: the link's thread launches beside the model's
        self.link: QueuedLink = BUILDERS[path](self.source, self.destination, ops, ops)
        if gb_s is not None:
            self.link = ThrottledLink(self.link, gb_s)
        targets = random.Random(2).sample(range(self.destination.num_blocks), len(blocks))
        self.handoff = Handoff(
            0, "prompt", "prefill", "decode", blocks, tuple(targets), num_tokens, True, self.source.fingerprint()
        )

    def close(self) -> None:
        self.link.close()
        self.runner.close()

    # --- the four ways -------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        self.runner.launch(self.plan).wait()

    def transfer(self) -> QueuedTransfer:
        transfer = self.link.send(self.handoff)
        transfer.wait(TIMEOUT)
        return transfer

    def serial(self) -> None:
        pending = self.runner.launch(self.plan)
        transfer = self.link.send(self.handoff)
        pending.wait()
        transfer.wait(TIMEOUT)

    def streamed(self) -> None:
        transfer = self.link.open(self.handoff)
        self.runner.launch(self.plan, transfer.send_layer).wait()
        transfer.wait(TIMEOUT)

    # --- what is read off ----------------------------------------------------------------------------------------

    def times(self, repeats: int) -> dict[str, float]:
        """Medians in ms, the four taken in turns, after one warm-up of each."""
        ways: dict[str, Callable[[], object]] = {
            "prefill_ms": self.prefill,
            "transfer_ms": self.transfer,
            "serial_ms": self.serial,
            "streamed_ms": self.streamed,
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repeats + 1):
            for name, run in ways.items():
                self._settle()
                begin = time.perf_counter()
                run()
                if turn > 0:
                    found[name].append((time.perf_counter() - begin) * 1e3)
        return {name: statistics.median(times) for name, times in found.items()}

    def timeline(self, streamed: bool) -> LayerTimeline:
        """One prefill with its transfer: when each layer ended and each piece travelled, by events of the device."""
        self._settle()
        stream = None if self.source.device.type == "cpu" else torch.cuda.current_stream(self.source.device)
        marks, host = [mark(stream)], HostMark()  # the device is idle: both say now
        transfer = self.link.open(self.handoff)

        def after_layer(layer: int) -> None:
            marks.append(mark(stream))
            if streamed:
                transfer.send_layer(layer)

        pending = self.runner.launch(self.plan, after_layer)
        transfer.send_rest()
        pending.wait()
        transfer.wait(TIMEOUT)

        def at(moment: Mark) -> float:
            origin = marks[0] if isinstance(moment, CudaMark) else host
            return moment.seconds_since(origin) * 1e3

        compute = tuple(Span(at(a), at(b)) for a, b in pairwise(marks))
        moved = tuple(Span(at(piece.begin), at(piece.end)) for piece in transfer.moved)
        return LayerTimeline(compute, moved, streamed)

    def verified(self) -> bool:
        """Whether what a streamed prefill leaves in the destination is what it left in the source, bit for bit."""
        self.destination.tensor.zero_()
        self.source.tensor.zero_()
        self._settle()
        self.streamed()
        sent, arrived = (cache.tensor.cpu().view(torch.uint8) for cache in (self.source, self.destination))
        equal = torch.equal(
            arrived[:, :, list(self.handoff.destination_blocks)], sent[:, :, list(self.handoff.source_blocks)]
        )
        return equal and bool(sent.any())

    def _settle(self) -> None:
        if self.source.device.type == "cuda":
            torch.cuda.synchronize(self.source.device)


def measure_overlap(
    model: str | LoadedModel = "dummy:qwen3-8b",
    device: torch.device | str | None = None,
    *,
    path: str = "pinned relay",
    num_tokens: int = 4096,
    repeats: int = 7,
    gb_s: float | None = None,
    verify: bool = False,
    timelines: bool = False,
) -> dict[str, Any]:
    """Time the four ways for one prompt. Returns plain values, times in ms.

    Args:
        model: name, or a model that is loaded.
        verify: also compare the KV that arrived, bit for bit.
        timelines: also record when layers computed and travelled, streamed and not.
    """
    loaded = load_model(model, device=device) if isinstance(model, str) else model
    bench = OverlapBench(loaded, num_tokens, path, gb_s=gb_s)
    try:
        result: dict[str, Any] = {
            "path": bench.link.path,
            "tokens": num_tokens,
            "bytes": bench.link.bytes_per_block * bench.handoff.num_blocks,
            "layers": loaded.config.num_layers,
            **bench.times(repeats),
        }
        result["hidden_share"] = hidden_share(result["prefill_ms"], result["transfer_ms"], result["streamed_ms"])
        result["gb_s"] = result["bytes"] / result["transfer_ms"] / 1e6
        if timelines:
            result["timeline"] = {
                name: bench.timeline(streamed).as_dict() for name, streamed in (("streamed", True), ("serial", False))
            }
        if verify:
            result["verified"] = bench.verified()
        return result
    finally:
        bench.close()


def _prefill_plan(
    num_tokens: int, num_blocks: int, block_size: int, vocab_size: int
) -> tuple[StepPlan, tuple[int, ...]]:
    """One step that computes a random prompt whole and samples a token, and the blocks that it fills."""
    rng = random.Random(0)
    prompt = [rng.randrange(vocab_size) for _ in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    request = Request("prompt", prompt, params)
    manager = BlockManager(num_blocks + 1, block_size, enable_prefix_caching=False)
    request.table = manager.match_prefix(prompt)
    manager.append_slots(request.table, num_tokens)
    return StepPlan([ScheduledChunk(request, 0, num_tokens, (request,))]), tuple(request.table.block_ids)
