"""ModelRunner: carries out a step's plan on the device. Copies first, then the forward pass, then one token each.

The mechanism below the engine's loop: it decides nothing. Which tokens to compute is in the plan, and which token to
draw follows from the logits, the request's parameters and its uniform number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanopd.engine.cuda_graphs import DecodeGraphs
from nanopd.engine.inputs import InputPacker
from nanopd.engine.pending import PendingStep
from nanopd.engine.plan import StepPlan
from nanopd.engine.request import Request
from nanopd.engine.run_ahead import StepAhead, plan_ahead
from nanopd.engine.sampler import SamplingBatch, greedy_tokens, sample_tokens
from nanopd.engine.uniforms import uniforms
from nanopd.engine.warm_up import sample_every_way, warm_up
from nanopd.errors import ConfigError
from nanopd.kv.cache import KVCache
from nanopd.model.batch import ForwardBatch
from nanopd.ops.interface import Ops

AfterLayer = Callable[[int], None]


class Model(Protocol):
    """What the runner needs of a model; ``nanopd.model.Transformer`` is one."""

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, after_layer: AfterLayer | None = None
    ) -> Tensor: ...  # [R, vocab]

    def each_product(self, num_tokens: int) -> None: ...


@dataclass
class StepLogits:
    """What a forward pass left on the device."""

    logits: Tensor  # [R, vocab]
    rows: list[int]  # for each chunk that somebody samples from, its row
    greedy: Tensor | None  # [R] int64, if the forward pass computed it along the way


class ModelRunner:
    """Runs plans on one device, on one stream. Everything it needs is passed in; several can live in one process.

    Args:
        model: weights on the device.
        kv_cache: the pool that the plans' block ids point into.
        ops: kernels of the device, for block copies.
        max_num_seqs, max_num_batched_tokens, max_model_len: the largest step, as in ``SchedulerConfig``.
        vocab_size: columns of the logits; only CUDA graphs need to know it beforehand.
        enforce_eager: launch decode steps kernel by kernel instead of replaying CUDA graphs.
        graph_sizes: batch sizes to capture; None for ``capture_sizes(max_num_seqs)``.
        stream: run everything on this stream; None means whichever is current. A stream of an SM partition works.
        run_ahead: launch decode steps before they are planned, see ``nanopd.engine.run_ahead``. Only for a pool that
            nobody else writes to.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        ops: Ops,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        enforce_eager: bool = False,
        graph_sizes: Sequence[int] | None = None,
        stream: torch.cuda.Stream | None = None,
        run_ahead: bool = False,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.ops = ops
        self.device = kv_cache.device
        self.stream = stream
        self.max_model_len = max_model_len
        self.run_ahead = run_ahead
        self.num_steps_ahead = 0  # that were handed out
        self._ahead: StepAhead | None = None
        self.graphs: DecodeGraphs | None = None
        with self._on_device(), torch.inference_mode():
            self.packer = InputPacker(
                block_size=kv_cache.block_size,
                max_blocks=-(-max_model_len // kv_cache.block_size),
                max_num_seqs=max_num_seqs,
                max_num_tokens=max_num_batched_tokens,
                device=self.device,
            )
            if self.device.type == "cuda" and not enforce_eager:
                self.graphs = DecodeGraphs(
                    model.forward, kv_cache, self.packer, vocab_size=vocab_size, sizes=graph_sizes, stream=stream
                )

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """Run one step to its end. Returns one list of token ids per chunk, aligned with ``chunk.samplers``.

        Raises NonFiniteLogitsError (see ``PendingStep.wait``), or what the kernels raise.
        """
        pending = self._take_ahead(plan)
        if pending is None:
            pending = self.launch(plan)
        else:
            self.num_steps_ahead += 1
        if self.run_ahead:
            with suppress(Exception):  # it comes again where it belongs, if somebody plans that step
                self._launch_ahead(pending)
        return pending.wait()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, after_layer: AfterLayer | None = None) -> PendingStep:
        """Enqueue one step without waiting for it. ``wait`` on the result before the next plan is made.

        ``after_layer`` is called with i once layer i is enqueued; such a step is never replayed from a graph.
        """
        self._drop_ahead()
        with self._on_device():
            if plan.copies:
                self._copy_blocks(plan.copies)
            if not plan.chunks:
                return PendingStep(plan, None, self.device)
            step = self._forward(plan, after_layer)
            return PendingStep(plan, self._sample(plan, step) if step.rows else None, self.device)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run one step and return logits instead of tokens: [R, vocab], a row per chunk that has samplers, in order.

        For algorithms that choose tokens themselves, such as beam search. A copy: later steps leave it alone, and the
        stream that is current here may use it at once.
        """
        self._drop_ahead()
        with self._on_device():
            if plan.copies:
                self._copy_blocks(plan.copies)
            step = self._forward(plan, None)
            logits = step.logits[step.rows]
        if self.stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.stream)
            logits.record_stream(here)
        return logits

    @torch.inference_mode()
    def capture_graphs(self, use_tqdm: bool = False) -> None:
        """On a GPU, do now what would stall the first steps: ``warm_up``, and capture all graphs."""
        if self.device.type == "cuda":
            self.warm_up()
        if self.graphs is None:
            return
        from tqdm.auto import tqdm

        with self._on_device(), tqdm(self.graphs.missing, "Capturing CUDA graphs", disable=not use_tqdm) as sizes:
            for size in sizes:
                self.graphs.capture(size)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """See ``nanopd.engine.warm_up``: call it before the pool's first blocks are in use; they are zero then."""
        most = min(self.packer.max_num_tokens, self.max_model_len)
        with self._on_device():
            logits = warm_up(self.model, self.kv_cache, most, self.packer.max_blocks)
            self._copy_blocks([(0, 0)])  # onto itself, which changes nothing
            PendingStep(StepPlan(), sample_every_way(logits), self.device).end()

    def close(self) -> None:
        """Drop the CUDA graphs, and the references to model and KV cache. The runner is of no use after this."""
        self._drop_ahead()
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        for name in ("model", "kv_cache"):
            self.__dict__.pop(name, None)

    # --- inside ------------------------------------------------------------------------------------------------

    def _on_device(self) -> AbstractContextManager[object]:
        if self.stream is not None:
            return torch.cuda.stream(self.stream)
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        pairs = torch.tensor(copies, dtype=torch.int64).T.contiguous()
        if self.device.type == "cuda":
            pairs = pairs.pin_memory()
        src, dst = pairs.to(self.device, non_blocking=True)
        self.ops.copy_blocks(self.kv_cache.tensor, src, dst)

    def _take_ahead(self, plan: StepPlan) -> PendingStep | None:
        """The step that was launched ahead, if ``plan`` is it, or a part of it."""
        rows = None if self._ahead is None else self._ahead.rows_of(plan)
        if self._ahead is None or rows is None:
            return None
        pending, self._ahead = self._ahead.pending, None
        pending.narrow(plan, rows)
        return pending

    def _drop_ahead(self) -> None:
        """Nobody wants the step ahead. It is waited for, since the next one may run on another stream."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.pending.end()

    @torch.inference_mode()
    def _launch_ahead(self, pending: PendingStep) -> None:
        """Launch what follows a step that has been launched, if that can be known."""
        planned = plan_ahead(pending.plan)
        if planned is None:
            return
        plan, rows = planned
        with self._on_device():
            step = self._forward(plan, None, pending.tokens_of(rows))
            self._ahead = StepAhead.of(PendingStep(plan, self._sample(plan, step, 1), self.device))

    def _forward(self, plan: StepPlan, after_layer: AfterLayer | None, tokens: Tensor | None = None) -> StepLogits:
        num_chunks = len(plan.chunks)
        if self.graphs is not None and plan.num_decodes == num_chunks and after_layer is None:
            size = self.graphs.size_for(num_chunks)
            if size is not None:
                logits, greedy = self.graphs.run(plan, size, tokens)
                return StepLogits(logits, [i for i, chunk in enumerate(plan.chunks) if chunk.samplers], greedy)
        batch = self.packer.pack(plan, tokens)
        logits = self.model.forward(batch, self.kv_cache, after_layer)
        return StepLogits(logits, list(range(logits.shape[0])), None)

    def _sample(self, plan: StepPlan, step: StepLogits, ahead: int = 0) -> Tensor:
        """One token per sampler, all chunks' samplers end to end: [N] int64. ``ahead``: outputs not booked yet."""
        sampled = [chunk.samplers for chunk in plan.chunks if chunk.samplers]
        samplers = [request for requests in sampled for request in requests]
        rows = [row for row, requests in zip(step.rows, sampled) for _ in requests]
        if not any(request.params.temperature for request in samplers):
            tokens = greedy_tokens(step.logits) if step.greedy is None else step.greedy
            if rows == list(range(tokens.shape[0])):
                return tokens
            return tokens[torch.tensor(rows).to(self.device)]
        return sample_tokens(step.logits, sampling_batch(samplers, rows, ahead))


def sampling_batch(samplers: Sequence[Request], rows: Sequence[int], ahead: int = 0) -> SamplingBatch:
    """Parameters and uniform numbers of requests that are about to take their next token, or the ``ahead``-th after.

    Raises ConfigError if a request that is not greedy has no seed: the engine draws one when it is added.
    """
    params = [request.params for request in samplers]
    temperature = np.array([p.temperature for p in params])
    for request, p in zip(samplers, params):
        if p.seed is None and p.temperature > 0:
            raise ConfigError(f"request {request.request_id!r} is to be sampled but has no seed")
    return SamplingBatch(
        rows=np.array(rows, dtype=np.int64),
        temperature=temperature,
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params]),
        uniform=uniforms(
            [p.seed or 0 for p in params],
            [request.sample_index for request in samplers],
            [len(request.output_token_ids) + ahead for request in samplers],
        ),
    )
