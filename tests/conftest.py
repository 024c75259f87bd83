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
