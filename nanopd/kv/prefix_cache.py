"""Prefix cache: full blocks of computed KV, found again by what they hold.

A block's key is the chained hash ``h_i = H(h_{i-1}, tokens of block i)``: KV depends on every token before it, so
equal tokens after a different prefix are different content (vLLM calls this automatic prefix caching; SGLang's
RadixAttention keeps the same information in a radix tree, Zheng et al. 2024, arXiv:2312.07104).

Each distinct content is one `PrefixNode`, which knows its parent. A hit is verified: the hash must match, the tokens
must match, and the parent must be the very node matched before it. By induction the whole prefix matches, so a hash
collision costs a miss or a longer bucket, never a wrong block. That is why a cheap hash will do.

Eviction is least recently used, and leaf first without any search. Whoever holds a block of a node holds a block of
each of its ancestors too, and releases blocks last to first; hence a node never enters the LRU list after its parent.
The same content may be computed twice at the same time. Then the node has two blocks, and a block that nobody
holds is dropped as long as another one remains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from nanopd.errors import BlockAccountingError

HashFunction = Callable[[int, tuple[int, ...]], int]

ROOT_HASH = 0


def chain_hash(parent_hash: int, tokens: tuple[int, ...]) -> int:
    """Default H: Python's tuple hash, 64 bits. For integers it does not vary from process to process."""
    return hash((parent_hash, tokens))


class PrefixNode:
    """One distinct content: these tokens, after the parent's."""

    __slots__ = ("block_hash", "blocks", "parent", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: tuple[int, ...], block_hash: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_hash = block_hash
        self.blocks: list[int] = []  # physical blocks that hold it; almost always one


class PrefixCache:
    """Index from content to blocks, and the LRU order of those that nobody holds.

    It counts no references: the block manager tells it when the last holder of a block lets go (`release`) and when
    a block is held again (`acquire`).
    """

    def __init__(self, num_blocks: int, hash_function: HashFunction = chain_hash) -> None:
        self._hash = hash_function
        self._index: dict[int, list[PrefixNode]] = {}
        self._node_of: list[PrefixNode | None] = [None] * num_blocks
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached blocks that nobody holds, oldest first

    @property
    def num_evictable(self) -> int:
        return len(self._lru)

    def find(self, parent: PrefixNode | None, tokens: tuple[int, ...]) -> PrefixNode | None:
        """The node of ``tokens`` after ``parent`` (None: at the start), or None."""
        for node in self._index.get(self._key(parent, tokens), ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None

    def register(self, parent: PrefixNode | None, tokens: tuple[int, ...], block: int) -> tuple[PrefixNode, int | None]:
        """Record that ``block``, which its caller holds, holds ``tokens`` after ``parent``.

        Returns the content's node, and the block this one displaces: one with the same content that nobody holds.
        """
        key = self._key(parent, tokens)
        bucket = self._index.setdefault(key, [])
        node = next((n for n in bucket if n.parent is parent and n.tokens == tokens), None)
        displaced = None
        if node is None:
            node = PrefixNode(parent, tokens, key)
            bucket.append(node)
        elif node.blocks[0] in self._lru:
            displaced = node.blocks.pop()
            del self._lru[displaced]
            self._node_of[displaced] = None
        node.blocks.append(block)
        self._node_of[block] = node
        return node, displaced

    def acquire(self, block: int) -> None:
        """``block`` is held again: it is not evictable."""
        self._lru.pop(block, None)

    def release(self, block: int) -> bool:
        """Nobody holds ``block`` any more. True: it stays, evictable. False: its content is not worth keeping."""
        node = self._node_of[block]
        if node is None:
            return False
        if len(node.blocks) > 1:
            node.blocks.remove(block)
            self._node_of[block] = None
            return False
        self._lru[block] = None
        return True

    def evict(self) -> int:
        """Forget the least recently used block and return it. The caller knows that there is one."""
        block, _ = self._lru.popitem(last=False)
        node = self._node_of[block]
        assert node is not None
        self._node_of[block] = None
        bucket = self._index[node.block_hash]
        bucket.remove(node)
        if not bucket:
            del self._index[node.block_hash]
        node.blocks.clear()
        return block

    def node_of(self, block: int) -> PrefixNode | None:
        """The content that ``block`` is known to hold."""
        return self._node_of[block]

    def is_evictable(self, block: int) -> bool:
        return block in self._lru

    def check_integrity(self) -> None:
        """Raise BlockAccountingError unless index, blocks and LRU order agree."""
        nodes = [node for bucket in self._index.values() for node in bucket]
        known = {block for block, node in enumerate(self._node_of) if node is not None}
        if sorted(known) != sorted(block for node in nodes for block in node.blocks):
            raise BlockAccountingError("the prefix cache's index and its blocks disagree")
        age = {block: i for i, block in enumerate(self._lru)}
        for node in nodes:
            if not node.blocks or any(self._node_of[b] is not node for b in node.blocks):
                raise BlockAccountingError(f"prefix cache entry {node.tokens} lists blocks {node.blocks}, not its own")
            idle = [b for b in node.blocks if b in age]
            if idle and len(node.blocks) > 1:
                raise BlockAccountingError(f"blocks {node.blocks} hold the same content and {idle} are held by nobody")
            parent = node.parent
            if parent is None:
                continue
            if not parent.blocks:
                raise BlockAccountingError(f"block {node.blocks[0]} is cached but its parent was evicted before it")
            if parent.blocks[0] in age and (not idle or age[parent.blocks[0]] < age[idle[0]]):
                raise BlockAccountingError(
                    f"block {parent.blocks[0]} would be evicted before its child {node.blocks[0]}"
                )

    def _key(self, parent: PrefixNode | None, tokens: tuple[int, ...]) -> int:
        return self._hash(ROOT_HASH if parent is None else parent.block_hash, tokens)
