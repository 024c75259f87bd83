"""Random operation sequences on the block manager, against a brute-force model.

The model keeps a fake physical pool. What a slot stores is the whole token prefix up to its position, because that is
what KV depends on: a block that is right token by token but comes after another prefix is wrong data. The model runs
the copies as one parallel kernel would, writes the reserved slots, and reads every table back after every operation.
It predicts free blocks, out-of-blocks and prefix hits from sets of held blocks and contents, without the manager's
counts, hashes or lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanopd.errors import BlockAccountingError, OutOfBlocksError, StaleBlockError
from nanopd.kv.block_manager import BlockManager
from nanopd.kv.block_table import BlockLease, BlockTable
from nanopd.kv.prefix_cache import chain_hash

Prefix = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # two tokens only: equal prefixes are common
FEW_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=3)
PICK = st.integers(0, 1000)


@dataclass(eq=False)
class Sequence:
    table: BlockTable
    tokens: list[int] = field(default_factory=list)  # computed
    reserved: list[int] = field(default_factory=list)  # have a slot, not computed yet


@dataclass(eq=False)
class Reader:
    lease: BlockLease
    tokens: list[int]  # what it must read


class Machine(RuleBasedStateMachine):
    caching = True
    hash_function = staticmethod(chain_hash)

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([4, 3, 2, 1]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.manager = BlockManager(
            num_blocks, block_size, enable_prefix_caching=self.caching, hash_function=self.hash_function
        )
        self.physical: list[list[Prefix | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.sequences: list[Sequence] = []
        self.readers: list[Reader] = []
        self.late_readers: list[Reader] = []
        self.copies: list[tuple[int, int]] = []  # handed out in this step
        self.content: dict[int, Prefix] = {}  # full computed block -> what it holds
        self.idle: list[Prefix] = []  # contents that nobody holds, least recently released first

    # --- the model --------------------------------------------------------------------------------------------

    def held(self) -> set[int]:
        blocks = {b for s in self.sequences for b in s.table.block_ids}
        blocks |= {b for r in self.readers for b in r.lease.block_ids}
        return blocks | {b for copy in self.copies for b in copy}

    def num_free(self) -> int:
        return self.manager.num_blocks - len(self.held())

    def note_released(self, before: list[int]) -> None:
        """``before``, in the order in which they were let go, may be held by nobody now."""
        held = self.held()
        for block in before:
            if block in held:
                continue
            content = self.content.pop(block, None)
            if content and content not in {self.content.get(b) for b in held}:
                if content in self.idle:
                    self.idle.remove(content)
                self.idle.append(content)

    def note_taken(self, num_blocks: int, num_free_before: int) -> None:
        """``num_blocks`` were taken; contents are given up, oldest first, when no other free block was left."""
        lost = max(0, num_blocks - (num_free_before - len(self.idle)))
        del self.idle[:lost]

    def expected_match(self, tokens: list[int]) -> int:
        known = set(self.idle) | {self.content[b] for b in self.held() if b in self.content}
        n = 0
        while n + self.size < len(tokens) and tuple(tokens[: n + self.size]) in known:
            n += self.size
        return n

    def read(self, block_ids: list[int] | tuple[int, ...], n: int) -> list[Prefix | None]:
        return [self.physical[block_ids[p // self.size]][p % self.size] for p in range(n)]

    def pick(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    def have_sequences(self) -> bool:
        return bool(self.sequences)

    def ready(self) -> list[Sequence]:
        """Sequences with tokens, all of them computed."""
        return [s for s in self.sequences if s.tokens and not s.reserved]

    # --- operations -------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS)
    def match(self, tokens: list[int]) -> None:
        expected = self.expected_match(tokens)
        assert self.manager.peek_prefix(tokens) == expected
        table = self.manager.match_prefix(tokens)
        assert table.num_tokens == table.num_committed == expected
        for end in range(self.size, expected + 1, self.size):
            content = tuple(tokens[:end])
            self.content[table.block_ids[end // self.size - 1]] = content
            if content in self.idle:
                self.idle.remove(content)
        self.sequences.append(Sequence(table, tokens[:expected]))
        if not self.reserve(self.sequences[-1], tokens[expected:]):
            self.free(len(self.sequences) - 1)  # not admitted

    @precondition(have_sequences)
    @rule(index=PICK, tokens=FEW_TOKENS)
    def append(self, index: int, tokens: list[int]) -> None:
        self.reserve(self.pick(index), tokens)

    def reserve(self, sequence: Sequence, tokens: list[int]) -> bool:
        table, n = sequence.table, len(sequence.tokens) + len(sequence.reserved)
        shared = n % self.size > 0 and sum(table.block_ids[-1] in s.table.block_ids for s in self.sequences) > 1
        needed = -(-(n + len(tokens)) // self.size) - len(table.block_ids) + shared
        num_free = self.num_free()
        assert self.manager.blocks_needed(table, len(tokens)) == needed
        assert self.manager.can_append(table, len(tokens)) == (needed <= num_free)
        if needed > num_free:
            before = (self.manager.snapshot(), list(table.block_ids), table.num_tokens)
            with pytest.raises(OutOfBlocksError):
                self.manager.append_slots(table, len(tokens))
            assert before == (self.manager.snapshot(), table.block_ids, table.num_tokens)
            return False
        before_blocks = self.held()
        copies = self.manager.append_slots(table, len(tokens))
        assert len(copies) == shared
        taken = set(table.block_ids) - before_blocks
        assert len(taken) == needed, "blocks that were held by somebody were handed out"
        self.note_taken(needed, num_free)
        for block in taken:
            self.content.pop(block, None)
        self.copies += copies
        sequence.reserved += tokens
        return True

    @precondition(lambda self: any(s.reserved for s in self.sequences))
    @rule(part=st.sampled_from([0.0, 0.0, 0.4]))
    def run_step(self, part: float) -> None:
        """Copies at once, then stores, then commits; ``part`` of each sequence's tokens is left for the next step."""
        sources = {src for src, _ in self.copies}
        destinations = [dst for _, dst in self.copies]
        assert len(set(destinations)) == len(destinations) and not sources & set(destinations)
        values = [list(self.physical[src]) for src, _ in self.copies]
        for dst, value in zip(destinations, values, strict=True):
            self.physical[dst] = value
        ends = [block for copy in self.copies for block in copy]
        self.copies = []
        self.manager.copies_done()
        self.note_released(ends)
        for sequence in self.sequences:
            n = len(sequence.reserved) - int(part * len(sequence.reserved))
            self.compute(sequence, n)

    def compute(self, sequence: Sequence, n: int) -> None:
        table, start = sequence.table, len(sequence.tokens)
        new, sequence.reserved = sequence.reserved[:n], sequence.reserved[n:]
        sequence.tokens += new
        for position, slot in enumerate(self.manager.slots(table, start, start + n), start):
            self.physical[slot // self.size][slot % self.size] = tuple(sequence.tokens[: position + 1])
        self.manager.commit(table, new)
        if not self.caching:
            return
        for i in range(start // self.size, len(sequence.tokens) // self.size):
            content = tuple(sequence.tokens[: (i + 1) * self.size])
            self.content[table.block_ids[i]] = content
            if content in self.idle:
                self.idle.remove(content)

    @precondition(lambda self: any(s.reserved for s in self.sequences))
    @rule()
    def fork_too_early(self) -> None:
        unfinished = next(s for s in self.sequences if s.reserved)
        with pytest.raises(BlockAccountingError):
            self.manager.fork(unfinished.table)

    @precondition(lambda self: self.ready())
    @rule(index=PICK, writes=st.lists(FEW_TOKENS, max_size=3))
    def fork_and_write(self, index: int, writes: list[list[int]]) -> None:
        """Fork once for each of ``writes``, then append to the forks, all within one step."""
        sequence = self.ready()[index % len(self.ready())]
        forks = [Sequence(self.manager.fork(sequence.table), list(sequence.tokens)) for _ in writes or [[]]]
        self.sequences += forks
        for fork, tokens in zip(forks, writes, strict=False):
            self.reserve(fork, tokens)

    @precondition(have_sequences)
    @rule(index=PICK)
    def free(self, index: int) -> None:
        sequence = self.pick(index)
        self.sequences.remove(sequence)
        blocks = list(sequence.table.block_ids)
        self.manager.free(sequence.table)
        assert sequence.table.block_ids == []
        self.note_released(blocks[::-1])
        with pytest.raises(BlockAccountingError):
            self.manager.free(sequence.table)

    @precondition(lambda self: self.ready())
    @rule(index=PICK)
    def pin(self, index: int) -> None:
        sequence = self.ready()[index % len(self.ready())]
        lease = self.manager.pin(sequence.table)
        assert lease.num_tokens == len(sequence.tokens)
        self.readers.append(Reader(lease, list(sequence.tokens)))

    @precondition(lambda self: self.readers)
    @rule(index=PICK)
    def unpin(self, index: int) -> None:
        reader = self.readers.pop(index % len(self.readers))
        self.manager.unpin(reader.lease)
        self.note_released(list(reader.lease.block_ids)[::-1])
        self.late_readers.append(reader)
        with pytest.raises(BlockAccountingError):
            self.manager.unpin(reader.lease)

    # --- what must hold after each ----------------------------------------------------------------------------

    @invariant()
    def counts_add_up(self) -> None:
        self.manager.check_integrity([s.table for s in self.sequences], [r.lease for r in self.readers])
        assert self.manager.num_free_blocks == self.num_free()
        states = [b.state for b in self.manager.snapshot().blocks]
        assert states.count("cached") == len(self.idle)

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        being_copied = {dst for _, dst in self.copies}
        for sequence in self.sequences:
            assert sequence.table.num_tokens == len(sequence.tokens) + len(sequence.reserved)
            if being_copied.isdisjoint(sequence.table.block_ids):
                expected = [tuple(sequence.tokens[: p + 1]) for p in range(len(sequence.tokens))]
                assert self.read(sequence.table.block_ids, len(sequence.tokens)) == expected

    @invariant()
    def leases_protect_and_late_readers_notice(self) -> None:
        for reader in self.readers:
            self.manager.check(reader.lease)
            assert self.read_lease(reader)
        for reader in self.late_readers:
            try:
                self.manager.check(reader.lease)
            except StaleBlockError:
                continue
            assert self.read_lease(reader), "the check passed, but the blocks hold something else"

    def read_lease(self, reader: Reader) -> bool:
        expected = [tuple(reader.tokens[: p + 1]) for p in range(len(reader.tokens))]
        return self.read(reader.lease.block_ids, len(reader.tokens)) == expected

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for sequence in self.sequences:
            self.manager.free(sequence.table)
        for reader in self.readers:
            self.manager.unpin(reader.lease)
        self.manager.copies_done()
        self.manager.check_integrity([])
        assert self.manager.num_free_blocks == self.manager.num_blocks


class ConstantHash(Machine):
    """Every block collides with every other one."""

    hash_function = staticmethod(lambda parent, tokens: 7)


class ParentBlindHash(Machine):
    """Equal tokens after different prefixes collide."""

    hash_function = staticmethod(lambda parent, tokens: hash(tokens))


class NoCaching(Machine):
    caching = False


@pytest.mark.parametrize("machine", [Machine, ConstantHash, ParentBlindHash, NoCaching])
def test_random_operations(machine: type[Machine]) -> None:
    examples = 200 if machine is Machine else 60
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
