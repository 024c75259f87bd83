"""CudaOps for the layers of one forward pass: what was checked for the first layer holds for all others.

Checking the arguments of ten launches and planning their grids takes the host longer than launching them, and a step
with a small prefill chunk is bound by just that. All layers of a model have the same shapes. So the first call of each
op is checked and prepared, and those that follow only say where their tensors lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanopd.ops.cuda import CudaOps
from nanopd.ops.interface import Ops
from nanopd.ops.launch import Launch
from nanopd.ops.linear import linear_into


def alike(ops: Ops) -> Ops:
    """``ops`` for calls that are alike, such as those of a model's layers.

    Of the CUDA ops, each validates the first call that is given its outputs. Later ones may pass other tensors, not
    other shapes, strides, dtypes, numbers or presence of what is optional, nor be made on another stream: none of that
    is looked at again. (``rms_norm`` with and without a residual count as two ops, and ``linear`` takes any sizes.)
    Decode attention comes after a ``linear`` and a ``norm_rope_store``, and starts while they run: what it reads was
    there before those two, except for queries and each sequence's newest token.
    For one thread and one forward pass. Any other implementation is returned as it is.
    """
    return AlikeOps(ops) if type(ops) is CudaOps else ops


class AlikeOps(CudaOps):
    """See ``alike``. Shares the kernels of the ops it is made from; what it does not override works as there."""

    def __init__(self, ops: CudaOps) -> None:
        self.__dict__.update(ops.__dict__)
        self._attention = ops.attention  # built by now, and not by every forward pass
        self._launches: dict[str, Launch] = {}
        self._gate_up: Tensor | None = None  # scratch of gated_linear

    def rms_norm(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        *,
        out: Tensor | None = None,
        total: Tensor | None = None,
    ) -> Any:
        if out is None or (residual is not None and total is None):
            return super().rms_norm(x, weight, eps, residual, out=out, total=total)  # type: ignore[arg-type]
        name = "rms_norm" if residual is None else "add_rms_norm"
        launch = self._launches.get(name)
        if launch is None:
            launch = self._launches[name] = self.prepare_rms_norm(x, weight, eps, residual, out, total)
        launch(x, weight, residual, out, total)
        return out if total is None else (out, total)

    def norm_rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        tensors = (q, k, v, q_norm, k_norm, positions, cos_sin, k_cache, v_cache, slot_mapping)
        launch = self._launches.get("norm_rope_store")
        if launch is None:
            launch = self._launches["norm_rope_store"] = self.prepare_norm_rope_store(eps, *tensors, overlap=True)
        launch(*tensors)
        return q

    def paged_decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            return super().paged_decode_attention(q, k_cache, v_cache, block_tables, context_lens, scale)
        tensors = (out, q, k_cache, v_cache, block_tables, context_lens)
        launch = self._launches.get("decode")
        if launch is None:
            launch = self._launches["decode"] = self.attention.prepare_decode(*tensors, scale, overlap=True)
        launch(*tensors)
        return out

    def paged_prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        max_seqlen_q: int,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            arguments = (q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens)
            return super().paged_prefill_attention(*arguments, max_seqlen_q, scale)
        tensors = (out, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens)
        launch = self._launches.get("prefill")
        if launch is None:
            launch = self._launches["prefill"] = self.attention.prepare_prefill(*tensors, max_seqlen_q, scale)
        launch(*tensors)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Of several matrices of different shapes in a layer: torch checks the sizes itself."""
        if out is None or out.shape[0] == 1:
            return super().linear(x, weight, bias, out=out)
        return linear_into(out, x, weight, bias)

    def gated_linear(self, x: Tensor, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None or out.shape[0] == 1:
            return super().gated_linear(x, gate_up, out=out)
        if self._gate_up is None:
            self._gate_up = torch.empty((x.shape[0], gate_up.shape[0]), dtype=x.dtype, device=x.device)
        return self.silu_mul(linear_into(self._gate_up, x, gate_up), out=out)

    def silu_mul(self, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            return super().silu_mul(gate_up)
        launch = self._launches.get("silu_mul")
        if launch is None:
            launch = self._launches["silu_mul"] = self.prepare_silu_mul(gate_up, out)
        launch(gate_up, out)
        return out
