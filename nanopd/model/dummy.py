"""Random weights in a real model's shape: timing needs the shapes, not the meaning."""

from __future__ import annotations

import torch

from nanopd.model.config import ModelConfig
from nanopd.model.weights import Weights, allocate, checkpoint_slots


def random_weights(config: ModelConfig, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Weights drawn on the device itself, in ``dtype``: 8 billion parameters take a second or two on a GPU.

    Norms are one, biases and matrices normal with deviation 0.02 (as models are initialised for training), so that
    activations stay finite through any number of layers. Equal seeds give equal weights on equal devices.
    """
    weights = allocate(config, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, slot in checkpoint_slots(config, weights).items():
        if name.endswith("norm.weight"):
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, 0.02, generator=generator)
    return weights
