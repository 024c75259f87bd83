"""Handoff: what moves from one worker to another, in words that need no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from nanopd.errors import TransferError
from nanopd.kv.fingerprint import LayoutFingerprint


@dataclass(frozen=True, slots=True)
class Handoff:
    """KV blocks of one request that move from one worker's pool to another's.

    One per prefill chunk if the request is streamed chunk by chunk, else one per request.

    Raises TransferError if the two block lists do not pair up, a destination block is named twice, or the blocks
    cannot hold ``num_tokens`` tokens.
    """

    transfer_id: int
    request_id: str
    source: str  # worker names
    destination: str
    source_blocks: tuple[int, ...]  # block ids of the source pool
    destination_blocks: tuple[int, ...]  # as many, of the destination pool: where each goes
    num_tokens: int  # whose KV these blocks hold; the last block may be partly filled
    is_last: bool  # no further handoff of this request follows
    fingerprint: LayoutFingerprint  # of the source pool

    def __post_init__(self) -> None:
        moved, target = self.source_blocks, self.destination_blocks
        if len(moved) != len(target):
            raise TransferError(f"{self}: {len(moved)} blocks are to move into {len(target)}")
        if len(set(target)) != len(target):
            raise TransferError(f"{self}: a destination block is named twice in {target}")
        slots = len(moved) * self.fingerprint.block_size
        if not 0 <= self.num_tokens <= slots:
            raise TransferError(f"{self}: {self.num_tokens} tokens do not fit {len(moved)} blocks with {slots} slots")

    @property
    def num_blocks(self) -> int:
        return len(self.source_blocks)

    def __str__(self) -> str:
        return f"handoff {self.transfer_id} of request {self.request_id!r}, {self.source} to {self.destination}"
