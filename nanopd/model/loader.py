"""``load_model``: from a name to a model that is ready to run."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from nanopd.errors import ConfigError, CudaUnavailableError, ModelLoadError
from nanopd.model.checkpoint import read_config, read_weights
from nanopd.model.config import ModelConfig
from nanopd.model.dummy import random_weights
from nanopd.model.embedded import EMBEDDED, EMBEDDED_NAMES, embedded_model
from nanopd.model.hub import hub_model
from nanopd.model.presets import preset, presets
from nanopd.model.tokenizer import Tokenizer
from nanopd.model.transformer import Transformer
from nanopd.ops import get_ops

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass
class LoadedModel:
    """What a name stands for. ``tokenizer`` is None for random weights and folders without tokenizer files."""

    config: ModelConfig
    model: Transformer
    tokenizer: Tokenizer | None


def load_model(
    name: str | os.PathLike[str] = "smollm2",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Load a model by name.

    Args:
        name: "smollm2" (embedded, needs no network), "dummy:SHAPE" (random weights: qwen3-8b, llama3-8b, qwen2-1.5b,
            tiny), a folder with config.json and safetensors, or a hub name such as "Qwen/Qwen3-0.6B".
        device: "cuda" if there is a GPU, else "cpu".
        dtype: bfloat16 on CUDA, else float32. A torch dtype or its name.
        seed: of random weights.

    Raises:
        ModelLoadError: the model cannot be found, read, or is not supported; the message says what to do.
        ConfigError: no such device or dtype.
        CudaUnavailableError: a CUDA device was asked for and there is none of this number.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise ModelLoadError(f"a model is a name or the path of a folder, got {name!r:.80} ({type(name).__name__})")
    name = os.fspath(name)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    ops = get_ops(device)
    if name.startswith("dummy:"):
        config = preset(name.removeprefix("dummy:"))
        check_memory(config, device, dtype)
        return LoadedModel(config, Transformer(config, random_weights(config, device, dtype, seed), ops), None)
    folder, short_name = find_model(name)
    config = read_config(folder, short_name)
    check_memory(config, device, dtype)
    tokenizer = Tokenizer.from_folder(folder)
    return LoadedModel(config, Transformer(config, read_weights(folder, config, device, dtype), ops), tokenizer)


def find_model(name: str) -> tuple[Path, str]:
    """(folder, name to show) of the embedded model, a local folder or a hub model.

    Raises:
        ModelLoadError: none of them.
    """
    if name.lower() in EMBEDDED_NAMES:
        return embedded_model(), EMBEDDED
    with suppress(OSError, RuntimeError):  # a name too long for a path, a ~user without a home
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder, folder.resolve().name
    if _HUB_NAME.fullmatch(name):
        return hub_model(name), name
    dummies = ", ".join(f"dummy:{shape}" for shape in presets())
    raise ModelLoadError(
        f"no model {name!r:.200}: it is not a folder here, and no name known here. Use smollm2, {dummies}, "
        "the path of a folder, or a Hugging Face name such as Qwen/Qwen3-0.6B"
    )


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device, by default the first GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is none: use 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type == "cpu" and device.index:
        raise ConfigError(f"device {device} is none: the CPU is one device, 'cpu', whatever its number of cores")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CudaUnavailableError(f"device {device} was asked for, but torch {torch.__version__} sees no CUDA GPU")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise CudaUnavailableError(f"device {device} was asked for, and there are {torch.cuda.device_count()} GPUs")
    return device


def resolve_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The dtype, by default bfloat16 on a GPU and float32 elsewhere.

    Raises:
        ConfigError: a name that is no supported dtype.
    """
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_memory(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse weights larger than the machine's memory: the system would kill the whole process instead.

    Raises:
        ModelLoadError: too large. GPUs are not checked, torch reports their shortage itself.
    """
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return
    rope = 4 * config.max_position_embeddings * config.head_dim
    need, have = config.weight_bytes(dtype.itemsize) + rope, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        raise ModelLoadError(
            f"{config.name} in {dtype} takes {need / 1e9:.1f} GB of memory, this machine has {have / 1e9:.1f} GB; "
            "use a smaller model or dtype, or a GPU"
        )
