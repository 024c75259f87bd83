"""The residual stream: what layers read through a norm, and add to."""

from __future__ import annotations

import torch
from torch import Tensor

from nanopd.ops.interface import Ops


class ResidualStream:
    """The hidden state of one forward pass, [T, hidden_size], and the linear layers at its ends.

    Each layer takes two steps of the form ``stream += linear(f(linear(norm(stream))))``. How norm and addition are
    computed depends on T:

    * One token's linear layers do both themselves: a step is bound by reading the weights, and a launch that moves a
      few kilobytes between two of them costs more than it does.
    * More tokens go through matrix products that know neither. An addition waits for the next norm, which reads both
      terms anyway: until then the stream is ``total + added``.

    Args:
        ops: of one forward pass, see ``nanopd.ops.alike``.
        embedded: [T, hidden_size], the stream's start; overwritten.
        eps: of every norm.
    """

    def __init__(self, ops: Ops, embedded: Tensor, eps: float) -> None:
        self._ops, self._eps = ops, eps
        self._total = embedded
        self._one_token = embedded.shape[0] == 1
        if not self._one_token:
            self._added, self._normed = torch.empty_like(embedded), torch.empty_like(embedded)
        self._pending = False  # _added holds something that _total lacks

    def linear(self, norm: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor) -> Tensor:
        """linear(norm(stream)): [T, N] in ``out``."""
        if self._one_token:
            return self._ops.norm_linear(self._total, norm, self._eps, weight, bias, out=out)
        return self._ops.linear(self._norm(norm), weight, bias, out=out)

    def gated_linear(self, norm: Tensor, gate_up: Tensor, *, out: Tensor) -> Tensor:
        """gated_linear(norm(stream)): [T, F] in ``out``."""
        if self._one_token:
            return self._ops.norm_gated_linear(self._total, norm, self._eps, gate_up, out=out)
        return self._ops.gated_linear(self._norm(norm), gate_up, out=out)

    def add_linear(self, x: Tensor, weight: Tensor) -> None:
        """stream += linear(x). There is a norm between any two additions."""
        if self._one_token:
            self._ops.add_linear(self._total, x, weight)
        else:
            self._ops.linear(x, weight, out=self._added)
            self._pending = True

    def logits(self, rows: Tensor, norm: Tensor, lm_head: Tensor, ops: Ops) -> Tensor:
        """linear(norm(stream)) of some rows [R] after the last layer, by ``ops``: [R, vocab].

        Only wanted rows go on: a prefill chunk of 2,048 tokens needs one row of logits at most.
        """
        if self._one_token:
            return ops.norm_linear(self._total, norm, self._eps, lm_head)
        normed, _ = ops.rms_norm(self._added[rows], norm, self._eps, self._total[rows])
        return ops.linear(normed, lm_head)

    def _norm(self, weight: Tensor) -> Tensor:
        rms_norm, out = self._ops.rms_norm, self._normed
        if not self._pending:
            return rms_norm(self._total, weight, self._eps, out=out)
        self._pending = False
        return rms_norm(self._added, weight, self._eps, self._total, out=out, total=self._total)[0]
