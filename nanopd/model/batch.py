"""ForwardBatch: everything one forward pass needs to know, passed explicitly."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class ForwardBatch:
    """The ragged input of one step. T tokens of S sequences, laid end to end.

    Invariants, which the attention kernels rely on:

    * the first ``num_decodes`` sequences have exactly one token each; the others are prefill chunks (>= 1 token);
    * sequence ``s`` owns rows ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]`` of every [T, ...] tensor;
    * its tokens stand at positions ``context_lens[s] - q_len(s) ... context_lens[s] - 1``: a chunk attends to
      everything cached before it, and causally to itself;
    * all tokens of a decode but the newest are in the cache before the step: they may be read while it stores others;
    * ``block_tables[s, p // block_size]`` holds position ``p``, for all ``p < context_lens[s]``. Entries past that
      are padding (0) and are never read.

    A padding token (CUDA graphs round the batch size up) has slot -1, which ``store_kv`` skips, and belongs to a
    sequence whose ``context_lens`` is 0, for which attention writes zeros.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64: block_id * block_size + offset, or -1
    cu_seqlens_q: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32, this step's tokens included
    block_tables: torch.Tensor  # [S, max_blocks] int32
    logits_rows: torch.Tensor  # [R] int64: rows of [0, T) whose logits are wanted
    num_decodes: int  # how many leading sequences are decodes
    max_seqlen_q: int  # longest chunk among the prefills, 0 when there is none

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]
