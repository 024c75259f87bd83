"""Pipeline: stages that hand buffers to each other, each on a stream of its own, so that all of them work at once.

Piece p goes through stage 0, 1, ..., in slot p mod depth of the buffers between them. A stage waits for the one before
it to have filled the slot, and for the one after it to have emptied it (of piece p - depth). All of that is said in
events: the host only enqueues. On the CPU the stages run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nanopd.transfer.marks import Mark
from nanopd.transfer.streams import Stream, enter, follow, mark, new_stream

Item = TypeVar("Item")


@dataclass
class Stage(Generic[Item]):
    """One step of a piece's way. ``prepare(item, slot)`` returns what enqueues it; ``stream`` is current during both.

    In two parts, since the host may need as long to check and to plan as the device to move: between a piece's marks
    it only enqueues.
    """

    prepare: Callable[[Item, int], Callable[[], object]]
    stream: Stream
    finished: dict[int, Mark] = field(default_factory=dict)  # slot -> when this stage was last through with it


class Pipeline(Generic[Item]):
    """See above.

    Args:
        depth: slots; two keep both neighbours of a buffer busy, more even out pieces of unequal size.
    """

    def __init__(self, stages: Sequence[Stage[Item]], depth: int) -> None:
        self.stages, self.depth = list(stages), depth
        self._count = 0
        first, last = stages[0].stream, stages[-1].stream
        # Events of two devices have no time between them, so ends are also marked on the first one's device.
        split = first is not None and last is not None and first.device != last.device
        self._clock = new_stream(first.device) if split and first is not None else None

    def push(self, item: Item, ready: Mark) -> tuple[Mark, Mark]:
        """Enqueue all stages of ``item``, the first after ``ready``. Returns marks of its begin and end."""
        slot = self._count % self.depth
        self._count += 1
        before, begin = ready, ready
        for i, stage in enumerate(self.stages):
            enter(stage.stream)
            enqueue = stage.prepare(item, slot)
            follow(stage.stream, before)
            if i + 1 < len(self.stages):
                follow(stage.stream, self.stages[i + 1].finished.get(slot))
            if i == 0:
                begin = mark(stage.stream)
            enqueue()
            before = stage.finished[slot] = mark(stage.stream)
        return begin, self._on_clock(before)

    def fence(self) -> Mark:
        """A mark after all that was enqueued on any stage."""
        last = self.stages[-1]
        for stage in self.stages:
            follow(last.stream, mark(stage.stream))
        return self._on_clock(mark(last.stream))

    def _on_clock(self, end: Mark) -> Mark:
        if self._clock is None:
            return end
        follow(self._clock, end)
        return mark(self._clock)
