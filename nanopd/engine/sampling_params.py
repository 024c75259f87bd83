"""SamplingParams: what a caller may ask of one request. Plain data, checked once, immutable."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanopd.errors import InvalidSamplingParamsError

MAX_SEED = 2**64 - 1
MAX_N = 1 << 16  # each sample is a request in the queue
MAX_TOP_K = 2**31 - 1  # the sampler's integers; one that does not fit would fail everybody's step


@dataclass(frozen=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop.

    * ``n``: how many samples of the same prompt, 1 to 65,536; they share the prompt's KV blocks.
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
        check_int("n", self.n, 1, MAX_N)
        check_float("temperature", self.temperature, low=0.0)
        check_int("top_k", self.top_k, 0, MAX_TOP_K)
        check_float("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)
        check_int("max_tokens", self.max_tokens, 0)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidSamplingParamsError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        # Lists are what people write; tuples keep the object hashable and safe to share between requests.
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", token_ids_tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise InvalidSamplingParamsError unless ``value`` is an int in the range; both ends belong to it."""
    # bool is an int in Python, but n=True is a mistake, not a one.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSamplingParamsError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < low or (high is not None and value > high):
        limit = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidSamplingParamsError(f"{name} must be {limit}, got {value}")


def check_float(name: str, value: Any, low: float, high: float = math.inf, low_open: bool = False) -> None:
    """Raise InvalidSamplingParamsError unless ``value`` is a finite number in the range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidSamplingParamsError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        finite = False
    if not finite:
        raise InvalidSamplingParamsError(f"{name} must be finite, got {value!r:.40}")
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


def token_ids_tuple(ids: Any, name: str = "stop_token_ids") -> tuple[int, ...]:
    """Token ids as a tuple. Raises InvalidSamplingParamsError for what is no collection of ints >= 0."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise InvalidSamplingParamsError(f"{name} must be a list of ints, got {ids!r}")
    tokens = tuple(ids)
    for token in tokens:
        check_int(f"each of {name}", token, 0)
    return tokens
