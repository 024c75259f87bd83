"""Which implementation of the kernels a device gets."""

from __future__ import annotations

import torch

from nanopd.errors import CudaUnavailableError, UnsupportedShapeError
from nanopd.ops.interface import Ops


def get_ops(device: torch.device | str) -> Ops:
    """A new set of ops for ``device``: CUDA kernels on a GPU, the PyTorch reference on the CPU.

    The object holds compiled kernels and scratch space, so build one per device and pass it on.

    Raises:
        CudaUnavailableError: a CUDA device was asked for and torch sees none, or cuda-core is missing.
        UnsupportedShapeError: neither a CPU nor a CUDA device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        from nanopd.ops.reference import ReferenceOps

        return ReferenceOps()
    if device.type != "cuda":
        raise UnsupportedShapeError(f"device {device} is not supported; use 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise CudaUnavailableError(f"device {device} was asked for, but torch {torch.__version__} sees no CUDA GPU")
    from nanopd.ops.cuda import CudaOps

    return CudaOps(device)
