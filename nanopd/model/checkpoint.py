"""Reading a model folder: ``config.json`` and safetensors files, one or many."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanopd.errors import ModelLoadError
from nanopd.model.config import ModelConfig, token_ids
from nanopd.model.weights import Weights, allocate, checkpoint_slots


def read_config(folder: Path, name: str) -> ModelConfig:
    """Shape of the model in ``folder``. ``generation_config.json`` may name more end-of-sequence tokens: all count.

    Raises:
        ModelLoadError: no ``config.json``, not JSON, or a model that is not supported.
    """
    config = ModelConfig.from_hf(read_json(folder / "config.json"), name)
    generation = folder / "generation_config.json"
    extra = token_ids(read_json(generation).get("eos_token_id"), name) if generation.is_file() else ()
    eos = tuple(dict.fromkeys((*config.eos_token_ids, *extra)))
    return dataclasses.replace(config, eos_token_ids=eos)


def read_weights(folder: Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Weights:
    """Fill newly allocated weights from the checkpoint, converted to ``dtype``.

    The files are mapped, not read: besides the weights themselves one tensor at a time is in memory.

    Raises:
        ModelLoadError: a file is missing or damaged, or tensors are missing, unexpected or of another shape.
    """
    weights = allocate(config, device, dtype)
    slots = checkpoint_slots(config, weights)
    unexpected: list[str] = []
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                    if name in slots:
                        _fill(slots.pop(name), tensors.get_tensor(name), name, file)
                    elif not _is_redundant(name, config):
                        unexpected.append(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} is damaged or unreadable: {error}") from error
    if slots or unexpected:
        raise ModelLoadError(
            f"{folder} does not hold a {config.architecture} model of the shape in its config.json: "
            f"missing {_few(sorted(slots))}; unexpected {_few(sorted(unexpected))}"
        )
    return weights


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those its index names, else all there are.

    Raises:
        ModelLoadError: none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map", {})
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelLoadError(f"{index}: weight_map must map names of tensors to names of files")
        files = [folder / name for name in sorted(set(names.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelLoadError(f"{folder}: {index.name} names files that are missing: {_few(missing)}")
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} holds no .safetensors file (other weight formats are not read)")
    return files


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelLoadError: missing, unreadable, or not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{file.parent} is not a model folder: it has no {file.name}") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def _fill(slot: torch.Tensor, tensor: torch.Tensor, name: str, file: Path) -> None:
    if slot.shape != tensor.shape:
        raise ModelLoadError(f"{file}: {name} has shape {list(tensor.shape)}, config.json implies {list(slot.shape)}")
    if not tensor.is_floating_point():
        raise ModelLoadError(f"{file}: {name} holds {tensor.dtype}, not floating point: quantised weights are not read")
    slot.copy_(tensor)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints carry though they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _few(names: list[str], limit: int = 6) -> str:
    """At most ``limit`` names, and how many more there are."""
    if not names:
        return "none"
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
