"""Decode steps as CUDA graphs: the few hundred launches of a step become one.

A decode step of an 8B model takes a few milliseconds of GPU time and about 400 kernel launches, each of which costs
the host several microseconds; launched one by one they, not the memory, would set the pace. A graph replays the same
kernels on the same addresses, so inputs and outputs live in buffers that never move, and batch sizes are rounded up to
the next captured size: rows of padding have context length 0 and slot -1 and touch nothing.

Steps with prefill run eagerly, since their shapes vary without end. Two things hide the launches there: the kernels are
longer, and all but the first layer's launches are prepared (``nanopd.ops.alike``).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanopd.engine.inputs import InputPacker
from nanopd.engine.plan import StepPlan
from nanopd.engine.sampler import greedy_tokens
from nanopd.errors import ConfigError
from nanopd.kv.cache import KVCache
from nanopd.model.batch import ForwardBatch

Forward = Callable[[ForwardBatch, KVCache], Tensor]


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, … up to ``max_num_seqs``, which is always among them.

    Padding wastes at most half of a small batch, which is bound by reading the weights anyway, and 7 rows of a large
    one.
    """
    sizes = [size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs]
    return [*sizes, max_num_seqs]


class DecodeGraphs:
    """One graph per batch size, captured on first use or before; all share one memory pool.

    Sharing is safe because replays never overlap: they run on one stream, and what a step leaves behind (logits and
    greedy tokens) is copied to buffers outside of the pool inside the graph.
    """

    def __init__(
        self,
        forward: Forward,
        kv_cache: KVCache,
        packer: InputPacker,
        *,
        vocab_size: int,
        sizes: Sequence[int] | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """``stream``: where to capture; None makes a stream for it. Replays go to the stream that is current.

        That of an SM partition must be given, since a graph keeps the partition that it was captured in.
        """
        device = kv_cache.device
        self.sizes = sorted(sizes or capture_sizes(packer.max_num_seqs))
        if self.sizes[0] < 1 or self.sizes[-1] > packer.max_num_seqs:
            raise ConfigError(f"CUDA graph sizes must be in [1, {packer.max_num_seqs}], got {self.sizes}")
        self._forward = forward
        self._kv_cache = kv_cache
        self._packer = packer
        self._stream = stream  # the given one, or made by the first capture
        self._pool: Any = None  # made by the first capture
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        largest = self.sizes[-1]
        self._tables = torch.zeros((largest, packer.max_blocks), dtype=torch.int32, device=device)
        self._logits: Tensor | None = None  # [largest, vocab], in the model's dtype
        self._vocab_size = vocab_size
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)

    @property
    def missing(self) -> list[int]:
        """Sizes that have no graph yet, the largest first: captured first, its memory then serves all others."""
        return [size for size in reversed(self.sizes) if size not in self._graphs]

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest size that holds ``num_seqs``, or None: too many for any graph."""
        index = bisect.bisect_left(self.sizes, num_seqs)
        return self.sizes[index] if index < len(self.sizes) else None

    def run(self, plan: StepPlan, size: int, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Replay the graph of ``size`` for a decode-only plan; capture it first if need be.

        ``tokens``: as for ``InputPacker.pack``.

        Returns: logits [n, vocab] and greedy tokens [n] int64 (-1 for rows without a finite maximum), n = number of
            chunks. Views into static buffers: valid until the next run.
        """
        if size not in self._graphs:
            self.capture(size)
        layout = self._packer.pack_decodes(plan, size, tokens)
        packed = layout.tensor(self._packer.device_buffer, "block_tables")
        self._tables[:size, : layout.width].copy_(packed)  # a graph needs one stride for every step
        self.replay(size)
        n = len(plan.chunks)
        assert self._logits is not None
        return self._logits[:n], self._tokens[:n]

    def replay(self, size: int) -> None:
        """Repeat the step of ``size`` with whatever inputs are in place. For timing; ``run`` is what steps use."""
        self._graphs[size].replay()

    def capture(self, size: int) -> None:
        """Record one decode step of ``size`` sequences. The KV cache is left as it is."""
        batch = self._padding_batch(size)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._tokens.device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._step(batch, size)  # compiles kernels and creates library handles, which capture forbids
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: another worker's thread may allocate or synchronise while this one captures.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(batch, size)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._graphs[size] = graph

    def close(self) -> None:
        """Drop all graphs, their memory, and the references to model and KV cache."""
        self._graphs.clear()
        self._logits = None
        self.__dict__.pop("_forward", None)
        self.__dict__.pop("_kv_cache", None)

    def _step(self, batch: ForwardBatch, size: int) -> None:
        logits = self._forward(batch, self._kv_cache)
        if self._logits is None:
            self._logits = torch.zeros((self.sizes[-1], self._vocab_size), dtype=logits.dtype, device=logits.device)
        self._logits[:size].copy_(logits)
        self._tokens[:size].copy_(greedy_tokens(logits))

    def _padding_batch(self, size: int) -> ForwardBatch:
        """A batch of nothing but padding whose arrays lie where ``pack_decodes`` will put the real ones."""
        layout = self._packer.pack_decodes(StepPlan(), size)
        tensors = {name: layout.tensor(self._packer.device_buffer, name) for name in layout.shapes}
        tensors["block_tables"] = self._tables[:size]
        return ForwardBatch(**tensors, num_decodes=size, max_seqlen_q=0)
