"""A plan that crosses a pipe says there what it says here, and its size does not grow with the sequences."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
from fake_cluster import make_workers
from fake_runner import VOCAB, FakeRunner, LaunchedStep, launched, oracle
from server_cases import COLLOCATED, DISAGGREGATED, MAX_LEN, prompts, serve

from nanopd.engine.engine import Engine
from nanopd.engine.plan import SchedulerConfig, StepPlan
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams
from nanopd.engine.scheduler import Scheduler
from nanopd.errors import ConfigError
from nanopd.kv.block_manager import BlockManager
from nanopd.workers.wire import StepMessage, StepReader, StepWriter
from nanopd.workers.worker import Worker


class Wired:
    """A runner that reads each plan through a pipe as well, and compares all that a ``ModelRunner`` reads of it."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner, self.writer, self.reader = runner, StepWriter(), StepReader()
        self.num_copies = self.num_preempted = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)  # links read its slots

    def execute(self, plan: StepPlan) -> list[list[int]]:
        there = self.reader.read(pickle.loads(pickle.dumps(self.writer.write(plan))))
        assert (there.num_decodes, there.copies, len(there.chunks)) == (plan.num_decodes, plan.copies, len(plan.chunks))
        for mine, theirs in zip(plan.chunks, there.chunks, strict=True):
            assert (mine.start, mine.num_tokens) == (theirs.start, theirs.num_tokens)
            assert mine.request.table.block_ids == theirs.request.table.block_ids
            where = slice(mine.start, mine.start + mine.num_tokens)
            assert mine.request.all_token_ids[where] == theirs.request.all_token_ids[where]
            assert mine.request.all_token_ids[mine.start] == theirs.request.all_token_ids[mine.start]
            assert [drawn(one) for one in mine.samplers] == [drawn(one) for one in theirs.samplers]
        alive = {id(chunk.request.table) for chunk in plan.chunks}
        assert len({id(chunk.request.table) for chunk in there.chunks}) == len(alive)
        self.num_copies += len(plan.copies)
        self.num_preempted += len(plan.preempted)
        return self.runner.execute(plan)

    def launch(self, plan: StepPlan, after_layer: Callable[[int], object] | None = None) -> LaunchedStep:
        return launched(self.execute(plan), after_layer)


def drawn(request: Request) -> tuple[object, ...]:
    p = request.params
    return (
        request.request_id, request.sample_index, len(request.output_token_ids), p.temperature, p.top_k, p.top_p, p.seed
    )  # fmt: skip


def wire(workers: list[Worker]) -> list[Wired]:
    for worker in workers:
        worker.runner = Wired(worker.runner)
    return [worker.runner for worker in workers]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("names", ["c0", "p0 d0", "c0 p0 d0 d1"])
def test_what_arrives_is_what_was_sent(names: str, shared: bool) -> None:
    """A pool nearly too small, prefixes in common, so that tables end, begin and grow at any step."""
    workers = make_workers(names, num_blocks=20, shared_pool=shared)
    runners = wire(workers)
    prefix = prompts(1, seed=5)[0][:12]
    asked = [(prefix if i % 2 else []) + one[:24] for i, one in enumerate(prompts(60, seed=3))]
    params = [SamplingParams(max_tokens=1 + i % 12, seed=i, temperature=0.5 * (i % 3)) for i in range(60)]
    with serve(workers, COLLOCATED if names == "c0" else DISAGGREGATED) as server:
        outputs = server.generate(asked, params, use_tqdm=False)
    expected = [oracle(prompt, one, 0, MAX_LEN) for prompt, one in zip(asked, params, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    if names == "c0":
        assert runners[0].num_preempted > 0
    for runner in runners:  # freed ones are forgotten with the step after
        assert len(runner.reader.tables) <= 6 + 6


def test_samples_that_fork_and_write_to_copies_of_a_block() -> None:
    blocks = BlockManager(40, 4)
    runner = Wired(FakeRunner(40, 4))
    engine = Engine(Scheduler(SchedulerConfig(12, 24, 8, 64), blocks), runner, vocab_size=VOCAB, eos_token_ids=(0,))
    draw, final = random.Random(1), {}
    asked = {f"r{i}": [draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 20))] for i in range(12)}
    params = {name: SamplingParams(n=3, max_tokens=9, seed=i) for i, name in enumerate(asked)}
    for name, prompt in asked.items():
        engine.add_request(
            prompt, params[name], request_id=name, on_output=lambda out: final.update({out.request_id: out})
        )
    while len(final) < len(asked):
        engine.step()
    for name, prompt in asked.items():
        samples = [one.token_ids for one in final[name].outputs]
        assert samples == [oracle(prompt, params[name], index, 64) for index in range(3)]
    assert runner.num_copies > 5


def test_a_decode_step_is_as_small_after_a_long_context_as_after_a_short_one() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 4096, None, 8192), BlockManager(1024, 8))
    writer, request = StepWriter(), Request("r", [1] * 4000, SamplingParams(max_tokens=64, ignore_eos=True))
    scheduler.add(request, 0.0)
    sizes, messages = [], []
    for now in range(20):
        plan = scheduler.schedule(float(now))
        messages.append(writer.write(plan))
        sizes.append(len(pickle.dumps(messages[-1])))
        scheduler.update(plan, [[2]], float(now))
    assert len(messages[0].chunks[0][4]) == 500 and sizes[0] > 4000
    assert max(sizes[1:]) < 250
    assert sum(len(message.chunks[0][4]) for message in messages[1:]) <= 2 * 3, "a block or two where the table grew"


def test_a_table_that_was_freed_is_gone_on_the_other_side() -> None:
    blocks, writer, reader = BlockManager(64, 8), StepWriter(), StepReader()
    scheduler = Scheduler(SchedulerConfig(8, 64, None, 64), blocks)
    for i in range(5):
        scheduler.add(Request(f"r{i}", [i + 1] * 9, SamplingParams(max_tokens=1 if i else 4, ignore_eos=True)), 0.0)
    known = []
    for now in range(3):
        plan = scheduler.schedule(float(now))
        message: StepMessage = writer.write(plan)
        reader.read(message)
        known.append((len(reader.tables), len(message.gone)))
        scheduler.update(plan, [[1] for _ in plan.chunks], float(now))
    assert known == [(5, 0), (1, 4), (1, 0)]


def test_a_request_without_blocks_is_refused_and_nothing_counts_as_sent() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 64, None, 64), BlockManager(64, 8))
    for i in range(2):
        scheduler.add(Request(f"r{i}", [1, 2, 3 + i], SamplingParams(max_tokens=2)), 0.0)
    plan, writer = scheduler.schedule(0.0), StepWriter()
    table, plan.chunks[1].request.table = plan.chunks[1].request.table, None
    with pytest.raises(ConfigError, match="'r1' is scheduled without blocks"):
        writer.write(plan)
    plan.chunks[1].request.table = table
    assert [chunk[4] for chunk in writer.write(plan).chunks] == [c.request.table.block_ids for c in plan.chunks]
