"""From a step's plan to the tensors of its forward pass: one pinned buffer, one copy to the device.

What a step costs the host is what its GPU idles, so work in Python is per *sequence*, never per token or per block:
positions and slots are computed as arrays, and a block table is written out once and then only where it grew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nanopd.engine.plan import StepPlan
from nanopd.errors import ConfigError
from nanopd.kv.block_table import BlockTable
from nanopd.model.batch import ForwardBatch

_ALIGN = 16  # bytes: kernels may load any of the arrays in 16-byte pieces
_KEPT_LAYOUTS = 1024
_INT64 = ("token_ids", "positions", "slot_mapping", "logits_rows")


class TableRows:
    """Block tables as the rows of one int32 matrix on the host.

    A table keeps its row from step to step. It changes in two ways only: blocks are appended, and copy on write
    replaces the last one. So comparing length and last block finds every change, and all that must be written again
    is what follows the last block but one. Freed tables are never filled again, so an object stands for one sequence.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.rows = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self._row_of: dict[int, int] = {}  # id(table) -> row; ids are unique while _tables holds the objects
        self._tables: list[BlockTable | None] = [None] * num_rows
        self._lengths = [0] * num_rows
        self._last = [-1] * num_rows
        self._unused = list(range(num_rows - 1, -1, -1))

    def update(self, tables: Sequence[BlockTable]) -> np.ndarray:
        """Bring the rows of ``tables`` up to date. Returns their row numbers, [len(tables)] int64."""
        row_of, lengths, last = self._row_of, self._lengths, self._last
        if len(self._unused) < len(tables):
            self._drop_all_but(tables)
        out = []
        for table in tables:
            row = row_of.get(id(table))
            if row is None:
                row = self._claim(table)
            ids = table.block_ids
            if len(ids) != lengths[row] or ids[-1] != last[row]:
                self._write(row, ids)
            out.append(row)
        return np.array(out, dtype=np.int64)

    def _claim(self, table: BlockTable) -> int:
        row = self._unused.pop()
        self._row_of[id(table)] = row
        self._tables[row] = table
        self._lengths[row] = 0
        return row

    def _write(self, row: int, ids: list[int]) -> None:
        if len(ids) > self.rows.shape[1]:
            raise ConfigError(f"a table of {len(ids)} blocks exceeds the {self.rows.shape[1]} of the model's length")
        first = max(0, self._lengths[row] - 1)
        self.rows[row, first : len(ids)] = ids[first:]
        self._lengths[row] = len(ids)
        self._last[row] = ids[-1]

    def _drop_all_but(self, tables: Sequence[BlockTable]) -> None:
        """Forget tables that are not in this step: finished, preempted, or resting; a resting one is written anew."""
        keep = {id(table) for table in tables}
        for key in [key for key in self._row_of if key not in keep]:
            row = self._row_of.pop(key)
            self._tables[row] = None
            self._unused.append(row)


@dataclass(slots=True)
class Layout:
    """Where each array of a ``ForwardBatch`` lies in the packed buffer. Block tables come last: their width varies."""

    num_tokens: int
    num_seqs: int
    num_rows: int  # of logits
    width: int  # blocks per table
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    spans: dict[str, tuple[int, int]] = field(init=False)  # first byte, byte behind the last
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        tokens, seqs = (self.num_tokens,), self.num_seqs
        self.shapes = {
            "token_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,
            "logits_rows": (self.num_rows,),
            "cu_seqlens_q": (seqs + 1,),
            "context_lens": (seqs,),
            "block_tables": (seqs, self.width),
        }
        self.spans, end = {}, 0
        for name, shape in self.shapes.items():
            start = -(-end // _ALIGN) * _ALIGN
            end = start + math.prod(shape) * (8 if name in _INT64 else 4)
            self.spans[name] = (start, end)
        self.num_bytes = end

    def array(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """View of one array in a host buffer [bytes] uint8."""
        start, stop = self.spans[name]
        return buffer[start:stop].view(np.int64 if name in _INT64 else np.int32).reshape(self.shapes[name])

    def tensor(self, buffer: Tensor, name: str) -> Tensor:
        """View of one array in a device buffer [bytes] uint8."""
        start, stop = self.spans[name]
        return buffer[start:stop].view(torch.int64 if name in _INT64 else torch.int32).view(self.shapes[name])


@dataclass(slots=True)
class _Views:
    """A layout, and its arrays in the host's and the device's buffer."""

    layout: Layout
    host: dict[str, np.ndarray]
    device: dict[str, Tensor] | None = None  # made when first asked for: decode graphs have views of their own


class InputPacker:
    """Packs plans into one buffer and sends it to the device with one copy.

    The device buffer never moves, so a CUDA graph may read its inputs from it. It is reused by every step: a batch is
    valid until the next ``pack``.
    """

    def __init__(
        self, *, block_size: int, max_blocks: int, max_num_seqs: int, max_num_tokens: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max(max_num_tokens, max_num_seqs)
        # Twice the rows a step can name: requests that sit a step out rarely lose theirs.
        self.table_rows = TableRows(2 * max_num_seqs, max_blocks)
        capacity = Layout(self.max_num_tokens, max_num_seqs, max_num_seqs, max_blocks).num_bytes
        self._pinned = torch.zeros(capacity, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._host = self._pinned.numpy()
        # On the CPU the model reads the host buffer itself.
        self.device_buffer = self._pinned if device.type == "cpu" else torch.zeros_like(self._pinned, device=device)
        self._kept_views: dict[tuple[int, int, int, int], _Views] = {}
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def pack(self, plan: StepPlan, tokens: Tensor | None = None) -> ForwardBatch:
        """The plan as a ``ForwardBatch`` with one row of logits for each chunk that somebody samples from.

        ``tokens``: [number of chunks] int64 on the device: the token ids of a plan of decodes, which the host does not
        know yet. Negative ones, which stand for a failed row, are taken as 0.

        Raises ConfigError if the step exceeds what the buffers were made for.
        """
        rows = [i for i, chunk in enumerate(plan.chunks) if chunk.samplers]
        lengths = np.array([chunk.num_tokens for chunk in plan.chunks], dtype=np.int64)
        views = self._fill(plan, lengths, rows, len(lengths), tokens)
        if views.device is None:
            views.device = {name: views.layout.tensor(self.device_buffer, name) for name in views.layout.shapes}
        prefills = lengths[plan.num_decodes :]
        return ForwardBatch(
            **views.device, num_decodes=plan.num_decodes, max_seqlen_q=int(prefills.max()) if len(prefills) else 0
        )

    def pack_decodes(self, plan: StepPlan, size: int, tokens: Tensor | None = None) -> Layout:
        """A decode-only plan, padded to ``size`` sequences with rows that compute nothing. Only sends; returns where.

        Row i of the logits belongs to chunk i. ``tokens``: as for ``pack``.
        """
        lengths = np.ones(len(plan.chunks), dtype=np.int64)
        return self._fill(plan, lengths, range(size), size, tokens).layout

    def _fill(
        self,
        plan: StepPlan,
        lengths: np.ndarray,
        logits_seqs: Sequence[int],
        padded_seqs: int,
        tokens: Tensor | None,
    ) -> _Views:
        chunks = plan.chunks
        num_seqs, num_tokens = len(chunks), int(lengths.sum())
        padding = padded_seqs - num_seqs
        if padded_seqs > self.max_num_seqs or num_tokens + padding > self.max_num_tokens:
            raise ConfigError(
                f"a step of {num_seqs} sequences and {num_tokens} tokens exceeds the runner's limits of"
                f" {self.max_num_seqs} and {self.max_num_tokens}"
            )
        tables = [chunk.request.table for chunk in chunks]
        if None in tables:
            raise ConfigError(f"request {chunks[tables.index(None)].request.request_id!r} is scheduled without blocks")
        rows = self.table_rows.update(tables)  # type: ignore[arg-type]
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        ends = starts + lengths
        width = -(-int(ends.max(initial=1)) // self.block_size)

        views = self._views(num_tokens + padding, padded_seqs, len(logits_seqs), width)
        arrays = views.host
        self._wait_for_last_copy()
        cu_seqlens = arrays["cu_seqlens_q"]
        cu_seqlens[0] = 0
        np.cumsum(lengths, out=cu_seqlens[1 : num_seqs + 1])
        cu_seqlens[num_seqs + 1 :] = np.arange(num_tokens + 1, num_tokens + padding + 1)
        if num_tokens == num_seqs:  # one token each: nothing to repeat
            row_of_token, positions = rows, starts
        else:
            row_of_token = np.repeat(rows, lengths)
            positions = np.arange(num_tokens) + np.repeat(starts - cu_seqlens[:num_seqs], lengths)
        blocks = self.table_rows.rows[row_of_token, positions // self.block_size]
        if tokens is None:
            self._fill_tokens(arrays["token_ids"], plan, cu_seqlens)
        arrays["positions"][:num_tokens] = positions
        arrays["slot_mapping"][:num_tokens] = blocks.astype(np.int64) * self.block_size + positions % self.block_size
        arrays["context_lens"][:num_seqs] = ends
        arrays["logits_rows"][:] = cu_seqlens[1:][logits_seqs] - 1
        np.take(self.table_rows.rows[:, :width], rows, axis=0, out=arrays["block_tables"][:num_seqs])
        for name, nothing in (("token_ids", 0), ("positions", 0), ("slot_mapping", -1)):
            arrays[name][num_tokens:] = nothing
        arrays["context_lens"][num_seqs:] = 0
        arrays["block_tables"][num_seqs:] = 0
        self._send(views.layout)
        if tokens is not None:
            torch.clamp(tokens, min=0, out=views.layout.tensor(self.device_buffer, "token_ids")[:num_tokens])
        return views

    def _views(self, num_tokens: int, num_seqs: int, num_rows: int, width: int) -> _Views:
        """Kept: decode steps and full chunks beside them have the same few layouts again and again."""
        key = (num_tokens, num_seqs, num_rows, width)
        views = self._kept_views.get(key)
        if views is None:
            if len(self._kept_views) >= _KEPT_LAYOUTS:
                self._kept_views.clear()
            layout = Layout(num_tokens, num_seqs, num_rows, width)
            host = {name: layout.array(self._host, name) for name in layout.shapes}
            views = self._kept_views[key] = _Views(layout, host)
        return views

    def _fill_tokens(self, token_ids: np.ndarray, plan: StepPlan, cu_seqlens: np.ndarray) -> None:
        decodes = plan.chunks[: plan.num_decodes]
        token_ids[: plan.num_decodes] = [chunk.request.all_token_ids[chunk.start] for chunk in decodes]
        for i, chunk in enumerate(plan.chunks[plan.num_decodes :], start=plan.num_decodes):
            tokens = chunk.request.all_token_ids[chunk.start : chunk.start + chunk.num_tokens]
            token_ids[cu_seqlens[i] : cu_seqlens[i + 1]] = tokens

    def _wait_for_last_copy(self) -> None:
        """The host must not overwrite what a copy still reads. Passed at once unless steps run ahead of the device."""
        if self._copied is not None:
            self._copied.synchronize()

    def _send(self, layout: Layout) -> None:
        if self._copied is None:
            return
        size = layout.num_bytes
        self.device_buffer[:size].copy_(self._pinned[:size], non_blocking=True)
        self._copied.record()
