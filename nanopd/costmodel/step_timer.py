"""StepTimer: sets a step up as it would arise in service, and times it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.sweep import Setup, Sizes
from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler
from nanopd.kv.block_manager import BlockManager

if TYPE_CHECKING:
    from nanopd.engine.runner import ModelRunner

_QUIET, _SERIES = 1.3, 3  # median over fastest of an undisturbed series; how many series at most


@dataclass
class StepTimer:
    """Sets steps up and times them. The pool is all its own."""

    runner: ModelRunner
    config: SchedulerConfig
    num_blocks: int
    block_size: int
    vocab_size: int
    sizes: Sizes
    clock: Callable[[], float] = time.perf_counter

    def measure(self, setup: Setup) -> tuple[StepFeatures, float]:
        """The median of some timed steps that follow each other, after those that warm up: its counts and its ms.

        Step by step the context grows (by a token for a decode, by a chunk for a prompt), and so each has counts of
        its own. Where the median is far above the fastest, somebody else was busy on the machine: it is measured
        again, and the quietest of at most three series counts.
        """
        series = []
        for _ in range(_SERIES):
            timed = sorted(self.series(setup), key=lambda step: step[1])
            median = timed[len(timed) // 2]
            series.append(median)
            if median[1] <= _QUIET * timed[0][1]:
                break
        return min(series, key=lambda step: step[1])

    def series(self, setup: Setup) -> list[tuple[StepFeatures, float]]:
        """Timed steps that follow each other."""
        scheduler = self._prepare(setup)
        for _ in range(self.sizes.warm_up):
            self._run_step(scheduler)
        return [self._run_step(scheduler) for _ in range(self.sizes.steps)]

    def _run_step(self, scheduler: Scheduler) -> tuple[StepFeatures, float]:
        begin = self.clock()
        plan = scheduler.schedule()
        tokens = self.runner.launch(plan).wait()
        features = StepFeatures.of(plan)  # before update moves the requests on; a few µs
        scheduler.update(plan, tokens)
        return features, (self.clock() - begin) * 1e3

    def _prepare(self, setup: Setup) -> Scheduler:
        """A scheduler about to plan the step that is wanted."""
        config = replace(self.config, chunk_size=setup.per_prompt * setup.prompts or None)
        manager = BlockManager(self.num_blocks, self.block_size, enable_prefix_caching=False, watermark=0.0)
        scheduler = Scheduler(config, manager)
        rounds = self.sizes.rounds
        rng = random.Random(0)
        noise = [rng.randrange(self.vocab_size) for _ in range(4096)]
        for i in range(setup.num_decodes):
            tokens = _tokens(noise, setup.kv_len + 1, 5 * i)
            scheduler.attach(_decoding(manager, f"decode{i}", tokens, setup.skipped_steps + rounds + 1))
        params = SamplingParams(temperature=0.0, max_tokens=1)
        if setup.start:  # one prompt, which never reaches its end
            tokens = _tokens(noise, setup.per_prompt * (setup.skipped_steps + rounds) + 1, 3)
            scheduler.add(Request("prompt", tokens, params))
            for _ in range(setup.skipped_steps):
                plan = scheduler.schedule()
                scheduler.update(plan, [[0] * len(chunk.samplers) for chunk in plan.chunks])
        elif setup.prefill_tokens:
            for i in range(rounds * setup.prompts):
                scheduler.add(Request(f"prompt{i}", _tokens(noise, setup.per_prompt, 13 * i), params))
        return scheduler


def _tokens(noise: list[int], length: int, shift: int) -> list[int]:
    """``length`` token ids out of ``noise``, from another place for each ``shift``."""
    shift %= len(noise)
    repeated = noise[shift:] + noise * (length // len(noise) + 1)
    return repeated[:length]


def _decoding(manager: BlockManager, name: str, tokens: list[int], max_tokens: int) -> Request:
    """A request whose prompt, all tokens but the last, counts as computed."""
    request = Request(name, tokens[:-1], SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    request.table = manager.match_prefix(())
    manager.append_slots(request.table, len(tokens) - 1)
    manager.commit(request.table, tokens[:-1])
    request.num_computed_tokens = len(tokens) - 1
    request.append_token(tokens[-1])
    return request
