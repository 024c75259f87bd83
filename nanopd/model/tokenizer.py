"""Text to token ids and back, without importing transformers (which takes seconds).

A model's ``tokenizer.json`` describes its tokenizer completely; the ``tokenizers`` library, which transformers itself
uses, runs it. Names and results are those of transformers' ``PreTrainedTokenizerFast``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from nanopd.errors import InvalidRequestError, InvalidTokenError, ModelLoadError
from nanopd.model.checkpoint import read_json


class Tokenizer:
    """The tokenizer of one model.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        chat_template: Jinja source that lays out a conversation, None if the model has none.
        special_tokens: "bos_token", "eos_token", … -> text of the token; the template may use them.
    """

    def __init__(self, backend: Any, chat_template: str | None, special_tokens: Mapping[str, str]) -> None:
        # Some published files ask for truncation or padding: a training setting that would change prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer in a model folder, or None if the folder has no tokenizer files at all.

        Raises:
            ModelLoadError: files of an older format only, or unreadable ones.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            older = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
            if older:
                raise ModelLoadError(
                    f"{folder} has {older[0]} but no tokenizer.json; make one with transformers: "
                    f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
                )
            return None
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"cannot read {file}: {error}") from error
        config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        return cls(backend, _chat_template(folder, config), _special_tokens(config))

    @property
    def vocab_size(self) -> int:
        """Number of tokens it knows, added ones included. The model's own vocabulary may be padded beyond it."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        token = self.special_tokens.get("eos_token")
        return None if token is None else self.backend.token_to_id(token)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """As a tuple of none or one, for an engine that is not told the model's own (``ModelConfig`` may list more)."""
        return () if self.eos_token_id is None else (self.eos_token_id,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. ``add_special_tokens`` puts a begin-of-text token first, in models that use one.

        Raises:
            InvalidRequestError: not a ``str``, or one that holds half a surrogate pair and so is no text.
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise InvalidRequestError(f"cannot tokenize {text!r:.80}: it is not valid Unicode text") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are no complete UTF-8 character (yet) come out as U+FFFD.

        Raises:
            InvalidTokenError: not a list of token ids.
        """
        try:
            return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        except (TypeError, OverflowError) as error:
            raise InvalidTokenError(f"cannot decode {token_ids!r:.80}: {error}") from error

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Lay out a conversation as the text the model was tuned on. Encode it with ``add_special_tokens=False``.

        Args:
            messages: ``{"role": "system" | "user" | "assistant", "content": text}``, oldest first.
            add_generation_prompt: end with the header of the assistant's next message.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template; pass plain text instead")
        try:
            template = _environment().from_string(self.chat_template)
            return template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except Exception as error:  # a template is a program: any expression in it may fail on these messages
            raise InvalidRequestError(f"the model's chat template refused the messages: {error}") from error


def _environment() -> Any:
    """Jinja as chat templates expect it: a sandbox (templates are downloaded code) with a few helpers."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson  # the built-in one escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """From ``chat_template.jinja``, else from tokenizer_config.json: a text, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {file}: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str | None):
        raise ModelLoadError(f"{folder}: chat_template must be a text, got {template!r:.60}")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of tokenizer_config.json, each a text or an object with its "content"."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        if content is not None:
            found[name] = str(content)
    return found
