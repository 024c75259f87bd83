"""Models from the Hugging Face hub, kept in its own cache (``~/.cache/huggingface``)."""

from __future__ import annotations

from pathlib import Path

from nanopd.errors import ModelLoadError

# Nothing else is read. Some repositories hold the weights again, in other formats.
_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]


def hub_model(name: str) -> Path:
    """Local folder of a hub model ("Qwen/Qwen3-0.6B"), downloaded if need be.

    Raises:
        ModelLoadError: no such model, no access, or no network and not downloaded before.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{name} is gated: accept its licence on https://huggingface.co/{name}, then run: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"the Hugging Face hub has no model {name!r}, or it is private and needs: hf auth login"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{name} is not in the local cache and the Hugging Face hub cannot be reached. Go online (and unset "
            f"HF_HUB_OFFLINE), or run on a machine that is online: hf download {name} --local-dir FOLDER, "
            "and pass FOLDER as the model"
        ) from error
    except Exception as error:  # HTTP and network errors of several libraries
        raise ModelLoadError(f"downloading {name} failed: {type(error).__name__}: {error}") from error
