"""Linear layers with a given output: torch's ``linear`` documents none, the functions that it calls have one."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, bit by bit what ``linear`` gives. x [T, K], weight [N, K], bias [N]; returns out [T, N]."""
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
