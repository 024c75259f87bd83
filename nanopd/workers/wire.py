"""A step on its way to another process: what the runner there does not know yet, as plain tuples. No torch.

A plan refers to requests with all their tokens and to block tables with all their blocks; sent whole, a decode step
would grow with its contexts. What a runner reads is little: of a chunk its own tokens, of a table the blocks that came
since the last step, of whoever samples six numbers. Block tables are all that the reading side remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanopd.engine.plan import ScheduledChunk, StepPlan
from nanopd.engine.request import Request
from nanopd.errors import ConfigError
from nanopd.kv.block_table import BlockTable

# (table, start, token ids, first new block, new blocks, samplers), each sampler as the fields of `Sampler`
ChunkMessage = tuple[int, int, list[int], int, list[int], list[tuple[Any, ...]]]


@dataclass(slots=True)
class StepMessage:
    """What crosses the pipe for one step.

    Attributes:
        num_decodes, copies: as in `StepPlan`.
        chunks: in the plan's order.
        gone: numbers of tables that were freed, to be forgotten before the chunks are read.
    """

    num_decodes: int
    copies: list[tuple[int, int]]
    chunks: list[ChunkMessage]
    gone: list[int]


@dataclass(slots=True)
class _Sent:
    """A table as the other side has it."""

    table: BlockTable
    number: int
    length: int = 0  # blocks
    last: int = -1  # the last of them


class StepWriter:
    """The sending side. Whatever it wrote must be read, in order."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}  # by id(table), unique while the objects are held here
        self._next = 0

    def write(self, plan: StepPlan) -> StepMessage:
        """Raises ConfigError, and nothing counts as sent, if a request of the plan holds no blocks."""
        tables = [_table(chunk.request) for chunk in plan.chunks]
        gone = [sent for sent in self._sent.values() if sent.table.freed]
        for sent in gone:
            del self._sent[id(sent.table)]
        chunks = [self._chunk(chunk, table) for chunk, table in zip(plan.chunks, tables, strict=True)]
        return StepMessage(plan.num_decodes, plan.copies, chunks, [sent.number for sent in gone])

    def _chunk(self, chunk: ScheduledChunk, table: BlockTable) -> ChunkMessage:
        sent = self._sent.get(id(table))
        if sent is None:
            sent = self._sent[id(table)] = _Sent(table, self._next)
            self._next += 1
        ids, first, blocks = table.block_ids, sent.length, []
        # A table changes in two ways: blocks are appended, and copy on write replaces the last one.
        if len(ids) != sent.length or (ids and ids[-1] != sent.last):
            first = max(0, sent.length - 1)
            blocks = ids[first:]
            sent.length, sent.last = len(ids), ids[-1]
        tokens = chunk.request.all_token_ids[chunk.start : chunk.start + chunk.num_tokens]
        return sent.number, chunk.start, tokens, first, blocks, [_sampler(request) for request in chunk.samplers]


class Sampler(NamedTuple):
    """Stands for a request where a token is drawn for it."""

    request_id: str
    sample_index: int
    num_output_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None

    @property
    def params(self) -> Sampler:
        return self

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Only how many there are is known here."""
        return range(self.num_output_tokens)


@dataclass(slots=True)
class TokenWindow:
    """Tokens ``[start, start + len(token_ids))`` of a sequence, under their positions in the whole of it."""

    start: int
    token_ids: list[int]

    def __getitem__(self, where: int | slice) -> Any:
        if isinstance(where, slice):
            return self.token_ids[where.start - self.start : where.stop - self.start]
        return self.token_ids[where - self.start]


@dataclass(slots=True, eq=False)
class Computed:
    """Stands for a request where its KV is computed."""

    request_id: str
    table: BlockTable
    all_token_ids: TokenWindow


class StepReader:
    """The receiving side."""

    def __init__(self) -> None:
        self.tables: dict[int, BlockTable] = {}

    def read(self, message: StepMessage) -> StepPlan:
        """The plan, with stand-ins for its requests. A table is the same object from step to step."""
        for number in message.gone:
            del self.tables[number]
        return StepPlan([self._chunk(*chunk) for chunk in message.chunks], message.num_decodes, message.copies)

    def _chunk(
        self, number: int, start: int, token_ids: list[int], first: int, blocks: list[int], samplers: list[Any]
    ) -> ScheduledChunk:
        table = self.tables.setdefault(number, BlockTable())
        if blocks:
            table.block_ids[first:] = blocks
        who: Any = tuple(Sampler(*sampler) for sampler in samplers)
        request: Any = Computed(who[0].request_id if who else f"table {number}", table, TokenWindow(start, token_ids))
        return ScheduledChunk(request, start, len(token_ids), who)


def _table(request: Request) -> BlockTable:
    if request.table is None:
        raise ConfigError(f"request {request.request_id!r} is scheduled without blocks")
    return request.table


def _sampler(request: Request) -> tuple[Any, ...]:
    p = request.params
    index, count = request.sample_index, len(request.output_token_ids)
    return request.request_id, index, count, p.temperature, p.top_k, p.top_p, p.seed
