"""The residual stream by hand: one token and several tokens keep it differently, and must read the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanopd.model.residual import ResidualStream
from nanopd.ops.reference import ReferenceOps

EPS = 1e-5


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("tokens", [1, 3])
def test_norms_read_all_that_was_added(tokens: int) -> None:
    torch.manual_seed(0)
    ops, hidden, size = ReferenceOps(), 24, 40
    start, norms = torch.randn(tokens, hidden).double(), torch.rand(4, hidden).double()
    wide, bias, back, head = (torch.randn(*s).double() for s in ((size, hidden), (size,), (hidden, size), (7, hidden)))
    stream, want = ResidualStream(ops, start.clone(), EPS), start
    x, gated = torch.empty(tokens, size).double(), torch.empty(tokens, size // 2).double()
    for _ in range(2):
        stream.linear(norms[0], wide, bias, out=x)
        torch.testing.assert_close(x, normed(want, norms[0]) @ wide.T + bias)
        stream.add_linear(x, back)
        want = want + x @ back.T
        stream.gated_linear(norms[1], wide, out=gated)
        torch.testing.assert_close(gated, ops.silu_mul(normed(want, norms[1]) @ wide.T))
        stream.add_linear(gated, back[:, : size // 2])
        want = want + gated @ back[:, : size // 2].T
    rows = torch.tensor([tokens - 1])
    logits = stream.logits(rows, norms[2], head, ops)
    torch.testing.assert_close(logits, normed(want[rows], norms[2]) @ head.T)
