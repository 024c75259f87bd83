"""Prompts and parameters as callers write them, checked before anything is queued."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from operator import index
from typing import Any

from nanopd.engine.detokenizer import Tokenizer
from nanopd.engine.sampling_params import SamplingParams
from nanopd.errors import InvalidRequestError, InvalidSamplingParamsError, InvalidTokenError

Prompt = str | Sequence[int]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or token ids, becomes a list of one; a list of prompts stays what it is.

    Raises InvalidTokenError for what is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    return [items] if items and all(map(_is_integer, items)) else items


def params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One for all, or one for each of ``count`` prompts.

    Raises InvalidRequestError if there are not as many, InvalidSamplingParamsError if they are something else.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        check_params(params)
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} sampling_params for {count} prompts")
    for item in params:
        check_params(item)
    return list(params)


def check_params(params: Any) -> None:
    """Raise InvalidSamplingParamsError unless they are SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise InvalidSamplingParamsError(f"expected SamplingParams, got {params!r:.80} ({type(params).__name__})")


def check_seconds(name: str, value: float) -> float:
    """Seconds as a float. Raises InvalidRequestError for what is no finite number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):  # an int that no float can hold
            if math.isfinite(value):
                return float(value)
    raise InvalidRequestError(f"{name} must be a finite number of seconds, got {value!r:.80}")


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int | None) -> tuple[list[int], str | None]:
    """Token ids, and the text if it came as text. Any integers will do (NumPy's, a tensor's), but no bools.

    Raises InvalidRequestError or InvalidTokenError.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError("the prompt is text, and this model has no tokenizer: pass token ids")
        token_ids, text = list(tokenizer.encode(prompt)), prompt
    else:
        items = _items(prompt)
        if bool in set(map(type, items)):
            raise InvalidTokenError(
                f"token ids must be integers, got a bool at index {[*map(type, items)].index(bool)}"
            )
        try:
            token_ids, text = [index(item) for item in items], None
        except TypeError as error:
            raise InvalidTokenError(f"the prompt must be text or a list of token ids: {error}") from error
    limit = math.inf if vocab_size is None else vocab_size
    for token in token_ids:
        if not 0 <= token < limit:
            raise InvalidTokenError(f"token id {token} is outside of the vocabulary [0, {limit})")
    return token_ids, text


def _items(prompt: Any) -> list[Any]:
    """The items of a list, tuple, array or iterator. Bytes, sets and dicts iterate too, but over no tokens."""
    if isinstance(prompt, (bytes, bytearray, Set, Mapping)) or not isinstance(prompt, Iterable):
        raise InvalidTokenError(
            f"a prompt must be text or a list of token ids, got {prompt!r:.80} ({type(prompt).__name__})"
        )
    try:
        return list(prompt)
    except TypeError as error:  # arrays without dimensions claim to be iterable
        raise InvalidTokenError(f"a prompt must be text or a list of token ids: {error}") from error


def _is_integer(item: Any) -> bool:
    """Also NumPy's integers and the elements of an integer tensor, but no array with a dimension."""
    if getattr(item, "ndim", 0):
        return False
    try:
        index(item)
    except TypeError:
        return False
    return True
