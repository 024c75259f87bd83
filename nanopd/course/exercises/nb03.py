"""Exercises of notebook 03: the block manager. Copy on write, chained block hashes, eviction."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_equal

# --- copy on write ---------------------------------------------------------------------------------------------


def append_token_stub(
    block_ids: list[int], num_tokens: int, ref_counts: list[int], free: list[int], block_size: int
) -> list[tuple[int, int]]:
    """Make room for one more token of a sequence. Changes block_ids, ref_counts and free in place.

    block_ids: the sequence's block table, which holds num_tokens tokens so far.
    ref_counts[b]: how many tables list block b.   free: unused blocks; take one with free.pop().
    Returns the physical copies (source block, destination block) to run before the token is stored.
    """
    raise NotImplementedError


def append_token_solution(
    block_ids: list[int], num_tokens: int, ref_counts: list[int], free: list[int], block_size: int
) -> list[tuple[int, int]]:
    """Make room for one more token of a sequence. Changes block_ids, ref_counts and free in place."""
    if num_tokens % block_size == 0:  # the last block is full, or there is none: start a new one
        block_ids.append(free.pop())
        ref_counts[block_ids[-1]] = 1
        return []
    source = block_ids[-1]
    if ref_counts[source] == 1:  # nobody else lists it: write in place
        return []
    destination = free.pop()
    ref_counts[source] -= 1
    ref_counts[destination] = 1
    block_ids[-1] = destination
    return [(source, destination)]


def _bookkeeping_only(block_ids: Any, num_tokens: int, ref_counts: Any, free: Any, block_size: int) -> list:
    append_token_solution(block_ids, num_tokens, ref_counts, free, block_size)
    return []


def _writes_in_place(block_ids: Any, num_tokens: int, ref_counts: Any, free: Any, block_size: int) -> list:
    if num_tokens % block_size == 0:
        return append_token_solution(block_ids, num_tokens, ref_counts, free, block_size)
    return []


def _keeps_its_reference(block_ids: Any, num_tokens: int, ref_counts: Any, free: Any, block_size: int) -> list:
    copies = append_token_solution(block_ids, num_tokens, ref_counts, free, block_size)
    for source, _ in copies:
        ref_counts[source] += 1
    return copies


def _copies_full_blocks(block_ids: Any, num_tokens: int, ref_counts: Any, free: Any, block_size: int) -> list:
    copies = []
    if block_ids and ref_counts[block_ids[-1]] > 1:
        source, destination = block_ids[-1], free.pop()
        ref_counts[source] -= 1
        ref_counts[destination] = 1
        block_ids[-1] = destination
        copies = [(source, destination)]
    return copies + append_token_solution(block_ids, num_tokens, ref_counts, free, block_size)


def _always_copies(block_ids: Any, num_tokens: int, ref_counts: Any, free: Any, block_size: int) -> list:
    if num_tokens % block_size == 0:
        return append_token_solution(block_ids, num_tokens, ref_counts, free, block_size)
    source, destination = block_ids[-1], free.pop()
    ref_counts[source] -= 1
    ref_counts[destination] = 1
    block_ids[-1] = destination
    return [(source, destination)]


@dataclass
class _Pool:
    """A pool whose slots hold whole prefixes: what a sequence reads must be its own history, position by position."""

    block_size: int
    num_blocks: int
    tables: list[list[int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory: list[list[Any]] = [[None] * self.block_size for _ in range(self.num_blocks)]
        self.ref_counts = [0] * self.num_blocks
        self.free = list(range(self.num_blocks - 1, -1, -1))

    def append(self, answer: Any, s: int, token: int) -> None:
        table, n, size = self.tables[s], len(self.tokens[s]), self.block_size
        last, full = (table[-1] if table else None), n % size == 0
        others = sum(last in t for i, t in enumerate(self.tables) if i != s) if table else 0
        name = f"sequence {_letter(s)} with {n} tokens, block size {size}"
        copies = answer(table, n, self.ref_counts, self.free, size)
        if not isinstance(copies, list):
            raise Wrong(f"{name}: expected a list of copies, got {describe(copies)}")
        if len(table) != n // size + 1:
            raise Wrong(f"{name}: {n + 1} tokens need {n // size + 1} blocks, the table lists {table}")
        if copies and full:
            raise Wrong(f"{name}: copied {copies}, but the last block is full and nobody will write it again")
        if copies and not others:
            raise Wrong(f"{name}: copied {copies}, but no other table lists block {last}")
        self._check_counts(name)
        for source, destination in copies:
            self.memory[destination] = list(self.memory[source])
        self.tokens[s].append(token)
        self.memory[table[-1]][n % size] = tuple(self.tokens[s])
        self._check_contents(s, n, copies)

    def fork(self, s: int) -> None:
        for block in self.tables[s]:
            self.ref_counts[block] += 1
        self.tables.append(list(self.tables[s]))
        self.tokens.append(list(self.tokens[s]))

    def _check_counts(self, name: str) -> None:
        listed = Counter(block for table in self.tables for block in table)
        for block, count in enumerate(self.ref_counts):
            if count != listed[block]:
                raise Wrong(
                    f"{name}: ref_counts[{block}] is {count} afterwards,"
                    f" but {listed[block]} table(s) list block {block}"
                )
        unused = [block for block in range(self.num_blocks) if not listed[block]]
        if sorted(self.free) != unused:
            raise Wrong(f"{name}: free is {sorted(self.free)} afterwards, but {unused} are the blocks in no table")

    def _check_contents(self, writer: int, n: int, copies: list) -> None:
        for s, (table, tokens) in enumerate(zip(self.tables, self.tokens)):
            for p in range(len(tokens)):
                found = self.memory[table[p // self.block_size]][p % self.block_size]
                if found == tuple(tokens[: p + 1]):
                    continue
                held = "nothing" if found is None else f"the KV of another sequence's token {found[-1]}"
                raise Wrong(
                    f"sequence {_letter(writer)} stored its token {n} (copies: {copies}); after that sequence"
                    f" {_letter(s)} finds {held} at its position {p}, in block {table[p // self.block_size]}"
                )


def _letter(s: int) -> str:
    return chr(ord("A") + s)


def _test_append_token(answer: Any, rng: random.Random) -> None:
    size = rng.choice([2, 3, 4, 8])
    pool = _Pool(size, 64, [[]], [[]])
    for _ in range(rng.randint(1, 2 * size) if rng.random() < 0.5 else size + 1):
        pool.append(answer, 0, rng.randrange(100))
    pool.append(answer, 0, 7)
    for _ in range(12):
        if len(pool.tables) < 4 and rng.random() < 0.4:
            pool.fork(rng.randrange(len(pool.tables)))
        pool.append(answer, rng.randrange(len(pool.tables)), rng.randrange(100))
    pool.fork(0)
    while len(pool.tokens[-1]) % size:  # until the shared block is full, then one more
        pool.append(answer, len(pool.tables) - 1, rng.randrange(100))
    pool.fork(len(pool.tables) - 1)
    pool.append(answer, len(pool.tables) - 1, 1)


append_token = Exercise(
    notebook="03",
    name="append_token",
    title="Copy on write: make room for one more token",
    test=_test_append_token,
    stub=append_token_stub,
    solution=append_token_solution,
    hints=(
        "There are three cases. The last block is full (or the table is empty). It has room and is yours alone. "
        "It has room, but another table lists it too.",
        "`num_tokens % block_size == 0` means that the next token needs a new block: a full block is never written "
        "again, so it may stay shared for ever. `ref_counts[block_ids[-1]] == 1` means that you may write in place.",
        "Third case: take a block, put it in place of the last one in `block_ids`, lower the old block's count by one, "
        "set the new one's to 1, and return `[(old, new)]`.",
    ),
    mistakes=(
        Mistake(_bookkeeping_only, says="finds nothing at its position"),
        Mistake(_writes_in_place, says="another sequence's token"),
        Mistake(_keeps_its_reference, says="ref_counts["),
        Mistake(_copies_full_blocks, says="the last block is full"),
        Mistake(_always_copies, says="no other table lists block"),
    ),
)

# --- chained block hashes --------------------------------------------------------------------------------------


def cached_prefix_stub(token_ids: list[int], cached: dict[int, int], block_size: int) -> list[int]:
    """Blocks that hold the longest cached prefix of token_ids, in order.

    cached maps a chained hash to a block id. The chained hash of a full block is hash((parent, tokens)): tokens is
    the tuple of the block's token ids, parent the chained hash of the block before it, 0 for the first block.
    At least one token of the prompt must remain to be computed.
    """
    raise NotImplementedError


def cached_prefix_solution(token_ids: list[int], cached: dict[int, int], block_size: int) -> list[int]:
    """Blocks that hold the longest cached prefix of token_ids, in order."""
    blocks, parent = [], 0
    for stop in range(block_size, len(token_ids), block_size):  # never reaches the last token
        parent = hash((parent, tuple(token_ids[stop - block_size : stop])))
        if parent not in cached:
            break
        blocks.append(cached[parent])
    return blocks


def _takes_the_last_token(token_ids: list[int], cached: dict[int, int], block_size: int) -> list[int]:
    return cached_prefix_solution([*token_ids, 0], cached, block_size)


def _forgets_the_parent(token_ids: list[int], cached: dict[int, int], block_size: int) -> list[int]:
    blocks = []
    for stop in range(block_size, len(token_ids), block_size):
        key = hash((0, tuple(token_ids[stop - block_size : stop])))
        if key not in cached:
            break
        blocks.append(cached[key])
    return blocks


def _goes_on_after_a_miss(token_ids: list[int], cached: dict[int, int], block_size: int) -> list[int]:
    blocks, parent = [], 0
    for stop in range(block_size, len(token_ids), block_size):
        parent = hash((parent, tuple(token_ids[stop - block_size : stop])))
        if parent in cached:
            blocks.append(cached[parent])
    return blocks


def _returns_tokens(token_ids: list[int], cached: dict[int, int], block_size: int) -> int:
    return len(cached_prefix_solution(token_ids, cached, block_size)) * block_size


def _cache_of(prompts: list[list[int]], block_size: int, rng: random.Random) -> dict[int, int]:
    """The chained hashes of all full blocks of ``prompts``, each with a block id of its own."""
    cached: dict[int, int] = {}
    ids = list(range(200))
    rng.shuffle(ids)
    for prompt in prompts:
        parent = 0
        for stop in range(block_size, len(prompt) + 1, block_size):
            parent = hash((parent, tuple(prompt[stop - block_size : stop])))
            if parent not in cached:
                cached[parent] = ids.pop()
    return cached


def _test_cached_prefix(answer: Any, rng: random.Random) -> None:
    size = rng.choice([2, 4, 5])

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    system, block = tokens(3 * size), tokens(size)
    one, two = system + tokens(2 * size + 1), system + block * 2
    cached = _cache_of([one, two, tokens(size) + block], size, rng)
    _ask(answer, one, cached, size, "a prompt that is cached but for its last, partly filled block")
    _ask(answer, system, cached, size, "a prompt of 3 full blocks that are all cached (one token must remain)")
    _ask(answer, system + tokens(3), cached, size, "a known system prompt before an unknown question")
    _ask(answer, tokens(2 * size) + system, cached, size, "a prompt that begins with unknown tokens")
    _ask(answer, block + system, cached, size, "tokens that are cached only after other tokens")
    _ask(answer, two + [1], cached, size, "a prompt that holds the same block of tokens twice in a row")
    _ask(answer, system[: size - 1], cached, size, "a prompt shorter than one block")
    holed = dict(cached)
    del holed[hash((hash((0, tuple(system[:size]))), tuple(system[size : 2 * size])))]
    _ask(answer, one, holed, size, "a prompt whose second block was evicted while the third is still there")


def _ask(answer: Any, prompt: list[int], cached: dict[int, int], size: int, what: str) -> None:
    want = cached_prefix_solution(prompt, cached, size)
    got = answer(list(prompt), dict(cached), size)
    where = f"{what} ({len(prompt)} tokens, block size {size})"
    if not isinstance(got, list):
        raise Wrong(f"{where}: expected a list of {len(want)} block ids, got {describe(got)}")
    if len(got) != len(want):
        raise Wrong(f"{where}: expected {len(want)} blocks {want}, got {len(got)} {got}")
    expect_equal(got, want, where)


cached_prefix = Exercise(
    notebook="03",
    name="cached_prefix",
    title="Chained hashes: the longest prefix that is already in the pool",
    test=_test_cached_prefix,
    stub=cached_prefix_stub,
    solution=cached_prefix_solution,
    hints=(
        "Walk over the full blocks from the front, and carry the hash of the block before along. "
        "Keys and values depend on every earlier token, so equal tokens after another prefix are not the same content.",
        "Stop at the first block that is not cached: a later one would be attended to without it. And look only at "
        "blocks that end *before* the last token, since its logits have to be computed.",
        "`for stop in range(block_size, len(token_ids), block_size)`: the block is "
        "`token_ids[stop - block_size : stop]`, `parent = hash((parent, tuple(block)))`, then look `parent` up.",
    ),
    mistakes=(
        Mistake(_takes_the_last_token, says="one token must remain"),
        Mistake(_forgets_the_parent, says="blocks"),
        Mistake(_goes_on_after_a_miss, says="second block was evicted"),
        Mistake(_returns_tokens, says="expected a list"),
    ),
)

# --- eviction --------------------------------------------------------------------------------------------------


class CachedBlock(NamedTuple):
    """A block whose content the prefix cache knows."""

    block_id: int
    parent: int | None  # block that holds the tokens before it; None for the first block of a prompt
    ref_count: int  # tables that list it
    last_used: int  # step in which a table listed it last


def choose_victim_stub(blocks: list[CachedBlock]) -> int | None:
    """Id of the block to evict, or None if none may be.

    A block may be evicted if no table lists it and it is no other block's parent. Of those, the one that was used
    longest ago goes.
    """
    raise NotImplementedError


def choose_victim_solution(blocks: list[CachedBlock]) -> int | None:
    """Id of the block to evict, or None if none may be."""
    parents = {block.parent for block in blocks}
    leaves = [block for block in blocks if block.ref_count == 0 and block.block_id not in parents]
    return min(leaves, key=lambda block: block.last_used).block_id if leaves else None


def _evicts_parents(blocks: list[CachedBlock]) -> int | None:
    idle = [block for block in blocks if block.ref_count == 0]
    return min(idle, key=lambda block: block.last_used).block_id if idle else None


def _evicts_the_newest(blocks: list[CachedBlock]) -> int | None:
    parents = {block.parent for block in blocks}
    leaves = [block for block in blocks if block.ref_count == 0 and block.block_id not in parents]
    return max(leaves, key=lambda block: block.last_used).block_id if leaves else None


def _evicts_blocks_in_use(blocks: list[CachedBlock]) -> int | None:
    parents = {block.parent for block in blocks}
    return min((b for b in blocks if b.block_id not in parents), key=lambda block: block.last_used).block_id


def _returns_the_block(blocks: list[CachedBlock]) -> Any:
    victim = choose_victim_solution(blocks)
    return next((block for block in blocks if block.block_id == victim), None)


def _forest(rng: random.Random) -> list[CachedBlock]:
    """Random prompts as chains of blocks that share prefixes. A chain's blocks are used together, in one step."""
    parent_of: dict[int, int | None] = {}
    ids = rng.sample(range(100), 30)
    for _ in range(rng.randint(2, 5)):
        parent = rng.choice([None, *parent_of])
        for _ in range(rng.randint(1, 4)):
            block = ids.pop()
            parent_of[block] = parent
            parent = block
    last_used = dict.fromkeys(parent_of, 0)
    refs = dict.fromkeys(parent_of, 0)
    ends = list(parent_of)
    rng.shuffle(ends)
    for step, end in enumerate(ends, 1):  # each block is the end of a prompt once, so no two leaves tie
        last_used.update(dict.fromkeys(_chain(end, parent_of), step))
    for block in _chain(ends[0], parent_of):  # the prompt used longest ago is still running
        refs[block] += 1
    blocks = [CachedBlock(b, parent_of[b], refs[b], last_used[b]) for b in parent_of]
    rng.shuffle(blocks)
    return blocks


def _chain(end: int, parent_of: dict[int, int | None]) -> list[int]:
    """The block ``end`` and all its ancestors."""
    chain, block = [], end
    while True:
        chain.append(block)
        parent = parent_of[block]
        if parent is None:
            return chain
        block = parent


def _test_choose_victim(answer: Any, rng: random.Random) -> None:
    blocks = _forest(rng)
    while blocks:  # evict until nothing is left to evict: every choice on the way must be right
        got, want = answer(list(blocks)), choose_victim_solution(blocks)
        _expect_victim(got, want, blocks)
        if want is None:
            return
        blocks = [block for block in blocks if block.block_id != want]


def _expect_victim(got: Any, want: int | None, blocks: list[CachedBlock]) -> None:
    where = f"{len(blocks)} cached blocks"
    by_id = {block.block_id: block for block in blocks}
    if got is None and want is None:
        return
    if type(got) is not int or got not in by_id:
        if want is None:
            raise Wrong(f"{where}, each in use or the parent of one in use: expected None, got {describe(got)}")
        raise Wrong(f"{where}: expected the id of one of them, got {describe(got)}")
    block = by_id[got]
    if block.ref_count:
        raise Wrong(f"{where}: block {got} is listed by {block.ref_count} table(s) that still read it")
    child = next((b for b in blocks if b.parent == got), None)
    if child is not None:
        raise Wrong(
            f"{where}: block {got} is the parent of block {child.block_id}, which nobody could find again without it"
        )
    if want is not None and got != want:
        raise Wrong(
            f"{where}: block {got} was last used in step {block.last_used},"
            f" block {want} longer ago, in step {by_id[want].last_used}"
        )


choose_victim = Exercise(
    notebook="03",
    name="choose_victim",
    title="Eviction: which cached block is given up first",
    test=_test_choose_victim,
    stub=choose_victim_stub,
    solution=choose_victim_solution,
    hints=(
        "First find the blocks that *may* go. Two things protect a block: a table that lists it, "
        "and a child in the cache.",
        "`parents = {block.parent for block in blocks}` names every block that has a child. "
        "Blocks of one prompt have the same `last_used`, so age alone does not protect a parent.",
        "`min(leaves, key=lambda block: block.last_used).block_id`, and `None` when `leaves` is empty.",
    ),
    mistakes=(
        Mistake(_evicts_parents, says="is the parent of block"),
        Mistake(_evicts_the_newest, says="longer ago"),
        Mistake(_evicts_blocks_in_use, says="is listed by 1 table"),
        Mistake(_returns_the_block, says="expected the id"),
    ),
)
