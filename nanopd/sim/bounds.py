"""Upper bounds of a layout's goodput, from arithmetic alone: what its devices could do if nothing ever waited.

A bound is a rate that no run can beat: prompts packed into full steps on every prefill worker, decodes at the largest
batch that still meets the TPOT and fits the pool. DistServe (Zhong et al., OSDI 2024) sizes its placements so; here it
only decides what need not be simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from nanopd.bench.metrics import SLO
from nanopd.bench.workload import Arrival
from nanopd.engine.plan import ScheduledChunk, StepPlan
from nanopd.engine.request import Request
from nanopd.errors import ConfigError
from nanopd.sim.cluster import SimulatedCluster
from nanopd.workers.worker import Role, Worker

Sizes = list[tuple[int, int, int]]  # (start, new prompt tokens, output tokens) of each request


@dataclass(frozen=True, slots=True)
class Bound:
    """Requests per second of the whole layout, which side sets the limit, and where decodes do: for how many seconds a
    request goes on after its first token, at the TPOT that is allowed, on average."""

    rate: float
    side: str
    stay_s: float = 0.0

    def slackened(self, target: float, slo: SLO, duration_s: float) -> float:
        """What a run of ``duration_s`` could attain at most: ``1 - target`` of its requests may miss their limits, and
        at its end as much may still wait as is served within the TTFT, and then decode."""
        backlog_s = (slo.ttft_s or 0.0) + self.stay_s
        return self.rate / target * (1.0 + backlog_s / duration_s)


def bound(cluster: SimulatedCluster, arrivals: Sequence[Arrival], slo: SLO) -> Bound:
    """For requests like ``arrivals``. Raises ConfigError if there are none."""
    if not arrivals:
        raise ConfigError("a bound needs at least one arrival to know what requests are like")
    sizes = (
        _sizes(arrivals) if cluster.enable_prefix_caching else [(0, a.prompt_tokens, a.output_tokens) for a in arrivals]
    )
    workers = cluster.workers()
    by_role = {role: [worker for worker in workers if worker.role is role] for role in Role}
    mixed = sum(_collocated_rate(worker, sizes, slo) for worker in by_role[Role.COLLOCATED])
    prefill = sum(_prefill_rate(worker, sizes) for worker in by_role[Role.PREFILL])
    decode = sum(_decode_rate(worker, sizes, slo) for worker in by_role[Role.DECODE])
    stay_s = (slo.tpot_s or 0.0) * sum(output for *_, output in sizes) / len(sizes)
    if not by_role[Role.PREFILL]:
        return Bound(mixed, "collocated", stay_s)
    if prefill < decode:
        return Bound(mixed + prefill, "prefill", stay_s if mixed else 0.0)
    return Bound(mixed + decode, "decode", stay_s)


def _sizes(arrivals: Sequence[Arrival]) -> Sizes:
    """Shared prefixes are computed once, if no cache forgets."""
    seen: set[int] = set()
    sizes = []
    for arrival in arrivals:
        known = 0
        for block in arrival.prefix:
            if block not in seen:
                break
            known += arrival.prefix_block
        seen.update(arrival.prefix)
        start = min(known, arrival.prompt_tokens - 1)
        sizes.append((start, arrival.prompt_tokens - start, arrival.output_tokens))
    return sizes


def _plan(num_decodes: int, context: int, chunks: Sequence[tuple[int, int]]) -> StepPlan:
    """A plan as far as step times look at one. ``chunks``: (start, tokens)."""
    nobody = cast(Request, None)
    parts = [(max(0, context - 1), 1)] * num_decodes + list(chunks)
    return StepPlan([ScheduledChunk(nobody, start, tokens, ()) for start, tokens in parts], num_decodes)


def _seconds(worker: Worker, plan: StepPlan) -> float:
    runner: Any = worker.runner
    return float(runner.seconds(plan)[0])


def _prefill_rate(worker: Worker, sizes: Sizes) -> float:
    """All prompts, packed into full steps one after the other, as under saturation."""
    config = worker.scheduler.config
    budget = min(config.max_num_batched_tokens, config.chunk_size or config.max_num_batched_tokens)
    seconds, room, chunks = 0.0, budget, list[tuple[int, int]]()
    for start, tokens, _ in sizes:
        while tokens:
            taken = min(tokens, room)
            chunks.append((start, taken))
            start, tokens, room = start + taken, tokens - taken, room - taken
            if not room:
                seconds += _seconds(worker, _plan(0, 0, chunks))
                room, chunks = budget, []
    if chunks:  # the last step would be filled by requests that come later
        seconds += _seconds(worker, _plan(0, 0, chunks)) * (budget - room) / budget
    return len(sizes) / seconds if seconds else float("inf")


def _decode_rate(worker: Worker, sizes: Sizes, slo: SLO, chunk_per_decode: float = 0.0) -> float:
    """The best batch size: requests per second that leave it, at a step time within the TPOT.

    ``chunk_per_decode``: prompt tokens that each step computes beside each of its decodes.
    """
    steps = sum(output - 1 for *_, output in sizes)
    if not steps:
        return float("inf")
    context = round(
        sum((start + tokens + output / 2) * output for start, tokens, output in sizes) / sum(o for *_, o in sizes)
    )
    blocks = worker.block_manager
    most = max(1, min(worker.scheduler.config.max_num_seqs, blocks.num_blocks * blocks.block_size // max(1, context)))
    best, batch = 0.0, 1
    while batch <= most:
        chunk = round(batch * chunk_per_decode)
        seconds = _seconds(worker, _plan(batch, context, [(0, chunk)] if chunk else []))
        if slo.tpot_s is not None and seconds > slo.tpot_s and batch > 1:
            break
        best = max(best, batch / seconds if seconds else float("inf"))
        batch = batch + 1 if batch < 16 else batch + batch // 8
    return best * len(sizes) / steps * 1.1  # batch sizes between those tried, and outputs that end unevenly


def _collocated_rate(worker: Worker, sizes: Sizes, slo: SLO) -> float:
    """In balance, each step computes as many prompt tokens as its decodes will need successors."""
    prompt, steps = sum(tokens for _, tokens, _ in sizes), sum(output - 1 for *_, output in sizes)
    if not steps:
        return _prefill_rate(worker, sizes)
    return min(_prefill_rate(worker, sizes), _decode_rate(worker, sizes, slo, prompt / steps))
