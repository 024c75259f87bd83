"""SamplingParams: what a caller may ask of one request. Plain data, checked once, immutable."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanopd.errors import InvalidSamplingParamsError

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop.

    * ``n``: how many samples of the same prompt (>= 1); they share the prompt's KV blocks.
    * ``temperature``: 0 is greedy; otherwise logits are divided by it.
    * ``top_k``: keep the k most likely tokens; 0 keeps all.
    * ``top_p``: keep the smallest set of most likely tokens whose probability reaches p, in (0, 1].
    * ``seed``: fixes the samples; ``None`` lets the engine draw one when the request is added.
    * ``max_tokens``: output limit; 0 is legal and finishes at once with reason ``length``.
    * ``stop``: strings that end the output; the text ends before the string. A single string is accepted.
    * ``stop_token_ids``: tokens that end the output; the token is kept in ``token_ids`` but not in the text.
    * ``ignore_eos``: keep going past the model's end-of-sequence token (for benchmarks with a fixed length).

    Raises InvalidSamplingParamsError, naming parameter, value and limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1)
        _check_float("temperature", self.temperature, low=0.0)
        _check_int("top_k", self.top_k, 0)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("max_tokens", self.max_tokens, 0)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidSamplingParamsError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        # Lists are what people write; tuples keep the object hashable and safe to share between requests.
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_token_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    # bool is an int in Python, but n=True is a mistake, not a one.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSamplingParamsError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < low or (high is not None and value > high):
        limit = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidSamplingParamsError(f"{name} must be {limit}, got {value}")


def _check_float(name: str, value: Any, low: float, high: float = math.inf, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidSamplingParamsError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not math.isfinite(value):
        raise InvalidSamplingParamsError(f"{name} must be finite, got {value}")
    if value < low or value > high or (low_open and value == low):
        left, right = ("(" if low_open else "["), ("inf)" if high == math.inf else f"{high}]")
        raise InvalidSamplingParamsError(f"{name} must be in {left}{low}, {right}, got {value}")


def _as_stop_strings(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Iterable):
        raise InvalidSamplingParamsError(f"stop must be a string or a list of strings, got {stop!r}")
    strings = tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidSamplingParamsError(f"each stop string must be a non-empty str, got {string!r}")
    return strings


def _as_token_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise InvalidSamplingParamsError(f"stop_token_ids must be a list of ints, got {ids!r}")
    tokens = tuple(ids)
    for token in tokens:
        _check_int("each of stop_token_ids", token, 0)
    return tokens
