"""Admission: may this request come in at all, and may it start now?"""

from __future__ import annotations

from nanopd.engine.plan import SchedulerConfig
from nanopd.engine.queues import Queues
from nanopd.engine.request import Request
from nanopd.errors import EmptyPromptError, PromptTooLongError
from nanopd.kv.block_manager import BlockManager, BlockTable


class Admission:
    """``validate`` refuses what could never finish; ``match`` says whether the head of the queue fits right now."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager, queues: Queues) -> None:
        self._config = config
        self._blocks = block_manager
        self._queues = queues
        self._refused: tuple[Request, int] | None = None  # head of waiting, and the free blocks that were too few

    def validate(self, request: Request, hand_off: bool | None = None) -> None:
        """Raise EmptyPromptError, DuplicateRequestError or PromptTooLongError if it cannot be accepted."""
        if not request.prompt_token_ids:
            raise EmptyPromptError(f"request {request.request_id!r}: the prompt is empty, it needs at least 1 token")
        self._queues.check_new(request.request_id)
        for index in range(1, request.params.n):
            self._queues.check_new(request.sibling_id(index))
        self.check_length(request, hand_off)

    def check_length(self, request: Request, hand_off: bool | None = None) -> None:
        """Raise PromptTooLongError unless the request fits the model's length, and the pool when alone in it.

        ``hand_off``: instead of the request's own.
        """
        num_prompt, max_tokens = request.num_prompt_tokens, request.params.max_tokens
        max_len = self._config.max_model_len
        if num_prompt + min(max_tokens, 1) > max_len:
            raise PromptTooLongError(
                f"request {request.request_id!r}: {num_prompt} prompt tokens leave no room for an output token within "
                f"max_model_len = {max_len}"
            )
        # The last token sampled is never computed, so it needs no slot; nor does any output of a prefill-only worker.
        num_slots = max(num_prompt, min(num_prompt + max_tokens, max_len) - 1)
        if request.hand_off if hand_off is None else hand_off:
            num_slots = request.num_tokens
        pool = self._blocks.num_blocks * self._blocks.block_size
        if num_slots > pool:
            raise PromptTooLongError(
                f"request {request.request_id!r}: {num_prompt} prompt tokens and max_tokens = {max_tokens} need "
                f"{num_slots} KV slots, the whole pool has {pool} ({self._blocks.num_blocks} blocks of "
                f"{self._blocks.block_size})"
            )

    def match(self, request: Request, *, reserve: int = 0) -> BlockTable | None:
        """A new table with the cached prefix of ``request``, or None if the rest of its tokens lacks blocks.

        ``reserve``: blocks that must remain for others.
        """
        blocks = self._blocks
        alone = self._queues.num_seated == 0
        # Matching is O(prompt): do not repeat it every step for a head that waits for blocks nobody gave back.
        if not alone and self._refused is not None and self._refused[0] is request:
            if blocks.num_free_blocks <= self._refused[1]:
                return None
        table = blocks.match_prefix(request.all_token_ids)
        # The watermark protects those who run; with nobody to protect it would only lock out a large prompt.
        missing = 1 if alone else request.num_tokens - table.num_tokens
        kept = reserve if alone else reserve + blocks.watermark_blocks
        if blocks.blocks_needed(table, missing) + kept <= blocks.num_free_blocks:
            return table
        blocks.free(table)
        if reserve == 0:
            self._refused = (request, blocks.num_free_blocks)
        return None

    def would_match(self, request: Request, *, reserve: int) -> bool:
        table = self.match(request, reserve=reserve)
        if table is not None:
            self._blocks.free(table)
        return table is not None

    def prefix_cache_grew(self) -> None:
        """A refused request may need fewer blocks now."""
        self._refused = None
