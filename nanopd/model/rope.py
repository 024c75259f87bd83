"""The table of cosines and sines that rotary position embedding reads."""

from __future__ import annotations

import math

import torch

from nanopd.model.config import ModelConfig, RopeScaling


def cos_sin_table(config: ModelConfig, device: torch.device | str) -> torch.Tensor:
    """[max_position_embeddings, head_dim] float32: cosines in the first half of a row, sines in the second.

    Pair i of a head turns by ``position * theta ** (-2 i / head_dim)`` (RoFormer, Su et al. 2021). The angle is
    formed in float32 as in the code the published models were trained with: at position 8,000 that is off by up to
    5e-4 rad from the exact one, and a more exact table would be another model.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = _scale(1.0 / (config.rope_theta**exponents), config.rope_scaling)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    """Stretch the frequencies [head_dim / 2] so that they cover more positions than pre-training did."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: how many turns a pair makes over the original length decides. At least high_freq_factor turns: the pair
    # tells near positions apart and stays. At most low_freq_factor turns: it is stretched in full. Between: a blend.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies
