"""The one random number behind each sampled token: a hash of (seed, sample index, position), never a state.

A stateful generator makes tokens depend on history: which requests shared the batch, how the prompt was chunked,
whether the request was preempted and recomputed, which worker decoded it. Here the k-th output token of sample i of a
request with seed s always uses the same number, so none of these can change a token.

The hash is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): seed and sample
index are mixed into the start of a SplitMix64 stream, and k is the number of steps taken along it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: SplitMix64's step
_MASK = (1 << 64) - 1


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit flips half of the output bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) per (seed, sample index, position of the output token).

    Args:
        seeds: N integers of any size and sign; they count modulo 2**64.
        sample_indices: N integers >= 0, the sequence's number among the n samples of its request.
        positions: N integers >= 0, how many output tokens came before this one.

    Returns: [N] float64, multiples of 2**-53.
    """
    seed = np.array([s & _MASK for s in seeds], dtype=np.uint64)
    index = np.asarray(sample_indices, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    start = _mix(_mix(seed + _GOLDEN) ^ _mix(index * _GOLDEN))
    bits = _mix(start + (position + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
