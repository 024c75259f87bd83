"""Helpers of the tests that serve one model on several workers."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path as File
from queue import Empty, SimpleQueue
from typing import Any

from model_cases import random_hf_model, save

from nanopd import LLM, SamplingParams
from nanopd.engine.outputs import RequestOutput
from nanopd.errors import UnknownRequestError
from nanopd.model.loader import LoadedModel, load_model
from nanopd.router.decision import Decision, Path
from nanopd.router.server import Server
from nanopd.transfer.probe import BUILDERS
from nanopd.transfer.throttled import ThrottledLink
from nanopd.workers.cluster import Cluster


class Always:
    def __init__(self, path: Path) -> None:
        self.name, self.path = f"always {path}", path

    def decide(self, request: object, snapshot: object, predicted_output: float | None = None) -> Decision:
        return Decision(self.path, "always")


class Alternate:
    """Every other request."""

    name = "alternate"

    def decide(self, request: Any, snapshot: object, predicted_output: float | None = None) -> Decision:
        return Decision(list(Path)[int(request.parent_id) % 2], "its number is even or odd")


def make_links(cluster: Cluster, path: str) -> dict[tuple[str, str], Any]:
    """A link of one kind between each prefill and decode worker. "throttled" is a same-device copy at 0.2 GB/s."""
    links = {}
    for source, destination in cluster.links:
        ends = [cluster.worker(source).runner, cluster.worker(destination).runner]
        caches, ops = [end.kv_cache for end in ends], [end.ops for end in ends]
        kind = "same-device copy" if path == "throttled" else path
        link = BUILDERS[kind](*caches, *ops, source_stream=ends[0].stream, piece_bytes=1 << 16)
        links[source, destination] = ThrottledLink(link, 0.2, 1e-4) if path == "throttled" else link
    return links


@dataclass
class Load:
    """Requests, what each asks for, and which of them are given up half-way."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    aborted: dict[int, int] = field(default_factory=dict)  # request -> after how many tokens

    @classmethod
    def at_random(cls, seed: int, count: int, vocab_size: int, longest: int = 70, most_tokens: int = 12) -> Load:
        """Greedy and seeded, short and long, alone and n = 2; a tenth is aborted."""
        draw = random.Random(seed)
        prefix = [draw.randrange(1, vocab_size) for _ in range(40)]  # many begin alike
        prompts, params = [], []
        for i in range(count):
            tail = [draw.randrange(1, vocab_size) for _ in range(draw.randint(1, longest - 40))]
            prompts.append((prefix if draw.random() < 0.4 else []) + tail)
            sampled = draw.random() < 0.5
            params.append(
                SamplingParams(
                    n=2 if draw.random() < 0.1 else 1,
                    max_tokens=draw.randint(1, most_tokens),
                    temperature=0.9 if sampled else 0.0,
                    top_p=0.95 if draw.random() < 0.5 else 1.0,
                    top_k=draw.choice((0, 20)),
                    seed=1000 * seed + i,
                    ignore_eos=True,
                )
            )
        aborted = {i: draw.randint(0, most_tokens) for i in range(count) if draw.random() < 0.1}
        return cls(prompts, params, aborted)


def float64_model(folder: File) -> LoadedModel:
    """In float64 no rounding depends on who shares a batch."""
    save(random_hf_model("qwen3"), folder)
    return load_model(str(folder), device="cpu", dtype="float64")


def answers_alone(model: LoadedModel, load: Load) -> list[list[list[int]]]:
    """The tokens of each request's samples, each request alone on one engine without a prefix cache."""
    llm = LLM(model, num_blocks=64, enable_prefix_caching=False, max_num_seqs=2)
    return [
        [sample.token_ids for sample in llm.generate([prompt], params, use_tqdm=False)[0].outputs]
        for prompt, params in zip(load.prompts, load.params, strict=True)
    ]


def run(server: Server, load: Load, timeout: float = 60.0) -> dict[int, RequestOutput]:
    """Submit in small bursts, abort as the load says, wait for the end."""
    outputs: SimpleQueue[RequestOutput] = SimpleQueue()
    final: dict[int, RequestOutput] = {}
    draw = random.Random(0)
    submitted, deadline = 0, time.monotonic() + timeout
    while len(final) < len(load.prompts):
        for _ in range(draw.randint(1, 6)):
            if submitted < len(load.prompts):
                server.add_request(
                    load.prompts[submitted],
                    load.params[submitted],
                    request_id=str(submitted),
                    stream=True,
                    on_output=outputs.put,
                )
                if load.aborted.get(submitted) == 0:
                    server.abort(str(submitted))
                submitted += 1
        try:
            output = outputs.get(timeout=0.01 if submitted < len(load.prompts) else 1.0)
        except Empty:
            assert time.monotonic() < deadline, f"{len(final)} of {len(load.prompts)} have ended"
            continue
        number = int(output.request_id)
        if output.finished:
            assert number not in final
            final[number] = output
        elif len(output.outputs[0].token_ids) == load.aborted.get(number):
            with suppress(UnknownRequestError):  # it was quicker
                server.abort(output.request_id)
    return final


def check(final: dict[int, RequestOutput], load: Load, expected: list[list[list[int]]]) -> int:
    """Everybody's tokens are the expected ones, or the first of them where aborted. Returns how many were aborted."""
    num_aborted = 0
    for number, output in final.items():
        assert output.error is None, output.error
        for sample, tokens in zip(output.outputs, expected[number], strict=True):
            if sample.finish_reason == "aborted":
                num_aborted += 1
                assert number in load.aborted
                assert sample.token_ids == tokens[: len(sample.token_ids)], number
            else:
                assert sample.token_ids == tokens, number
    return num_aborted


def check_pools_are_free(cluster: Cluster) -> None:
    for worker in cluster.workers:
        blocks = worker.block_manager
        assert blocks.num_free_blocks == blocks.num_blocks, worker
        blocks.check_integrity([], [])
