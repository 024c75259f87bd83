"""A runner without a model, and the oracle for it.

Its KV cache is an array of slots. Computing a token writes what stands for its KV: the token, its position, and a hash
of everything before it, read back from the cache. The next token is a hash of the whole history as read back through
the block table. So a wrong block, a missing copy or chunk, a stale slot or a wrong start each give a wrong token, and
the right tokens are known without any engine: `oracle`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from nanopd.engine.plan import StepPlan
from nanopd.engine.request import Request
from nanopd.engine.sampling_params import SamplingParams

VOCAB = 40
EOS = 0

Slot = tuple[int, int, int]  # token, position, hash of the tokens up to and including it
EMPTY: Slot = (-1, -1, -1)


def extend_hash(parent: int, token: int, position: int) -> int:
    return zlib.crc32(f"{parent},{token},{position}".encode())


def next_token(history: Sequence[int], seed: int | None, sample_index: int) -> int:
    value = 0
    for position, token in enumerate(history):
        value = extend_hash(value, token, position)
    return zlib.crc32(f"{value},{seed},{sample_index},{len(history)}".encode()) % VOCAB


def oracle(prompt: Sequence[int], params: SamplingParams, sample_index: int, max_len: int, eos: int = EOS) -> list[int]:
    """The output tokens of one sample, computed on the plain sequence."""
    history, output = list(prompt), []
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else {eos})
    while len(output) < params.max_tokens and len(history) < max_len:
        output.append(next_token(history, params.seed, sample_index))
        history.append(output[-1])
        if output[-1] in stop:
            break
    return output


class FakeRunner:
    """Carries out plans on an array, and checks that each is one."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[Slot] = [EMPTY] * (num_blocks * block_size)
        self.num_computed = 0

    def execute(self, plan: StepPlan) -> list[list[int]]:
        self._check(plan)
        self._copy(plan.copies)
        for chunk in plan.chunks:
            self._store(chunk.request, chunk.start, chunk.start + chunk.num_tokens)
        return [
            [
                next_token(
                    self._read(chunk.request, chunk.start + chunk.num_tokens), sampler.params.seed, sampler.sample_index
                )
                for sampler in chunk.samplers
            ]
            for chunk in plan.chunks
        ]

    def launch(self, plan: StepPlan, after_layer: Callable[[int], object] | None = None) -> LaunchedStep:
        """As `ModelRunner.launch`, for a model of two layers."""
        return launched(self.execute(plan), after_layer)

    def _check(self, plan: StepPlan) -> None:
        assert plan.chunks, "an empty plan was executed"
        assert all(chunk.num_tokens >= 1 for chunk in plan.chunks)
        assert all(chunk.num_tokens == 1 and len(chunk.samplers) == 1 for chunk in plan.chunks[: plan.num_decodes])
        requests = [chunk.request for chunk in plan.chunks]
        assert len(set(requests)) == len(requests), "a request stands twice in a plan"
        written = [
            self._slot(chunk.request, position)
            for chunk in plan.chunks
            for position in range(chunk.start, chunk.start + chunk.num_tokens)
        ]
        assert len(set(written)) == len(written), "two tokens are stored in one slot"
        for chunk in plan.chunks:
            samples = chunk.start + chunk.num_tokens == chunk.request.num_tokens
            assert bool(chunk.samplers) == samples, "a token is sampled exactly from the last token's logits"

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, destinations = [s for s, _ in copies], [d for _, d in copies]
        assert len(set(destinations)) == len(destinations) and not set(destinations) & set(sources)
        size = self.block_size
        content = [self.slots[block * size : (block + 1) * size] for block in sources]  # all read before any is written
        for block, slots in zip(destinations, content, strict=True):
            self.slots[block * size : (block + 1) * size] = slots

    def _slot(self, request: Request, position: int) -> int:
        assert request.table is not None and position < request.table.num_tokens, "a slot was not reserved"
        return request.table.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _store(self, request: Request, start: int, stop: int) -> None:
        parent = self.slots[self._slot(request, start - 1)][2] if start else 0
        for position in range(start, stop):
            token = request.all_token_ids[position]
            parent = extend_hash(parent, token, position)
            self.slots[self._slot(request, position)] = (token, position, parent)
            self.num_computed += 1

    def _read(self, request: Request, stop: int) -> list[int]:
        history, expected = [], 0
        for position in range(stop):
            token, at, value = self.slots[self._slot(request, position)]
            history.append(token)
            expected = extend_hash(expected, token, position)
            if at != position or value != expected:
                return [*history, -2]  # computed elsewhere or after something else: derail visibly
        return history


class LaunchedStep:
    """What ``FakeRunner.launch`` returns: a step that is over."""

    def __init__(self, tokens: list[list[int]]) -> None:
        self._tokens = tokens

    def wait(self) -> list[list[int]]:
        return self._tokens


def launched(tokens: list[list[int]], after_layer: Callable[[int], object] | None) -> LaunchedStep:
    """A step with these tokens, each of the two layers reported."""
    for layer in range(2):
        if after_layer is not None:
            after_layer(layer)
    return LaunchedStep(tokens)
