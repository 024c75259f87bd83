"""What this device can do at most: the two lines of its roofline, measured rather than read off a data sheet."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from nanopd.ops.measure import time_op


@dataclass(frozen=True)
class Ceilings:
    """Measured upper limits of one device and dtype."""

    device: str
    dtype: str
    copy_gb_s: float  # bytes read plus bytes written by a large device-to-device copy, 1e9 bytes per second
    matmul_tflop_s: float  # a large square matrix product, 1e12 operations per second, 2 per multiply-add

    @property
    def ridge(self) -> float:
        """Operations per byte above which a kernel is limited by arithmetic, not by memory (Williams et al. 2009)."""
        return self.matmul_tflop_s * 1e3 / self.copy_gb_s

    def attainable_tflop_s(self, intensity: float) -> float:
        """The roofline: the most that ``intensity`` operations per byte allow, in TFLOP/s."""
        return min(self.matmul_tflop_s, intensity * self.copy_gb_s / 1e3)

    def as_dict(self) -> dict[str, str | float]:
        return {**asdict(self), "ridge": self.ridge}


def measure_ceilings(device: torch.device | str, dtype: torch.dtype | None = None) -> Ceilings:
    """Measure copy bandwidth and matrix-product rate. About a second.

    Args:
        device: CPU or CUDA device.
        dtype: of the matrix product; bfloat16 on CUDA and float32 on the CPU by default.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    # Far beyond any cache: 1 GiB against 60 MB of L2, 128 MiB against the few tens of MB of a laptop's L3.
    num_bytes = 2**30 if on_gpu else 2**27
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)  # zeros may share one page that was never written
    # Not captured: a copy inside a CUDA graph becomes a memcpy node, which a copy engine may run at two thirds of the
    # rate that the SMs reach (2.7 against 4.2 TB/s on an H200).
    copy_ms = time_op(device, torch.empty_like(source).copy_, [(source,)], samples=9, graph=False)

    size = 8192 if on_gpu else 768
    # Real values: power draw, and so the clock, depends on how many bits flip.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    matmul_ms = time_op(device, lambda: torch.matmul(a, b, out=out), samples=9, sample_ms=6.0)
    return Ceilings(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        copy_gb_s=2 * num_bytes / copy_ms / 1e6,
        matmul_tflop_s=2 * size**3 / matmul_ms / 1e9,
    )
