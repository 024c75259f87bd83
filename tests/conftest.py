"""Fixtures shared by the layers' tests."""

from __future__ import annotations

import os

# transformers warns at import about every optional package that is missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model on the CPU in float32, loaded once: LoadedModel(config, model, tokenizer)."""
    from nanopd.model import load_model

    return load_model("smollm2", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def tiny():
    """The preset ``dummy:tiny`` on the CPU in float32: two layers of random weights, no tokenizer."""
    from nanopd.model import load_model

    return load_model("dummy:tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def hf_smollm2(smollm2):
    """The embedded model in transformers, float32 on the CPU: the oracle. ``smollm2`` has converted it before."""
    import torch
    import transformers

    from nanopd.model.embedded import embedded_model

    model = transformers.AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32).eval()
    # The checkpoint brings defaults for generation (sampling, a penalty ...); the tests say what they want.
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model
