"""Run-ahead: launch the next decode step before the tokens of this one are known to the host.

Between two steps the host books tokens, schedules and packs inputs, and the GPU idles. But after a step that only
decodes, with nobody waiting, the next one is known but for its tokens: the same requests, each one position further.
And the tokens are on the device already. So the runner launches that step at once, behind the one it waits for, and
hands it out when the scheduler comes to the same plan. (SGLang's overlap scheduler and vLLM's asynchronous scheduling
are after the same time, in the scheduler; here policy knows nothing of it.)

What can go differently, and what happens then:

* A request ends with this step. Its row of the next one was computed for nobody. What that row wrote lies behind its
  last token, in a block that nobody shares; whoever gets the block writes to it later on the same stream.
* Anything else, such as a new request: the plan is another one, and the step ahead is waited for and thrown away. What
  it wrote for requests that go on is what their next step writes again.

Both hold for a pool whose blocks are written on one stream only, so workers that share pools do without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanopd.engine.plan import ScheduledChunk, StepPlan

if TYPE_CHECKING:
    from nanopd.engine.pending import PendingStep
    from nanopd.engine.request import Request
    from nanopd.kv.block_table import BlockTable


@dataclass(slots=True)
class Row:
    """What a row of a step ahead was computed from."""

    number: int
    request: Request
    table: BlockTable
    start: int


@dataclass(slots=True)
class StepAhead:
    """A step that was launched before it was planned."""

    pending: PendingStep
    rows: dict[str, Row]  # by request id

    @classmethod
    def of(cls, pending: PendingStep) -> StepAhead:
        rows = {}
        for number, chunk in enumerate(pending.plan.chunks):
            assert chunk.request.table is not None
            rows[chunk.request.request_id] = Row(number, chunk.request, chunk.request.table, chunk.start)
        return cls(pending, rows)

    def rows_of(self, plan: StepPlan) -> list[int] | None:
        """Which rows are those of ``plan``, chunk by chunk; None if it is not a part of this step."""
        if plan.copies or plan.num_decodes != len(plan.chunks):
            return None
        numbers = []
        for chunk in plan.chunks:
            row = self.rows.get(chunk.request.request_id)
            if row is None or row.request is not chunk.request or row.table is not chunk.request.table:
                return None
            if row.start != chunk.start or len(chunk.samplers) != 1:
                return None
            numbers.append(row.number)
        return numbers


def plan_ahead(plan: StepPlan) -> tuple[StepPlan, list[int]] | None:
    """The step after ``plan``, as far as it can be known: (its plan, for each chunk the row of ``plan`` that samples
    its token). Without requests that end for their length. None if nothing useful can be said, such as if a request
    that goes on has no slot for its next token yet.
    """
    if not plan.steady or plan.num_decodes != len(plan.chunks):
        return None
    chunks, rows = [], []
    for row, chunk in enumerate(plan.chunks):
        request, start = chunk.request, chunk.start + 1
        if start + 1 >= request.token_limit:
            continue
        if len(chunk.samplers) != 1 or request.table is None or start >= request.table.num_tokens:
            return None
        chunks.append(ScheduledChunk(request, start, 1, chunk.samplers))
        rows.append(row)
    return (StepPlan(chunks, num_decodes=len(chunks)), rows) if chunks else None
