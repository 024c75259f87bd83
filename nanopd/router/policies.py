"""Routing policies that need no model of time, and `make_policy` for all of them by name.

Each is a pure function of request and snapshot: what it must remember between requests (nothing, so far) would have to
stand in the snapshot. So a decision can be repeated, explained and tested.
"""

from __future__ import annotations

import importlib
import inspect
import re
import zlib
from collections.abc import Callable
from typing import Any

from nanopd.costmodel.checks import check_count, is_number, shown
from nanopd.engine.request import Request
from nanopd.errors import ConfigError, NanoPDError
from nanopd.router.decision import Decision, Path, Policy
from nanopd.router.paths import prefill_queue, take
from nanopd.router.snapshot import Snapshot
from nanopd.workers.worker import Role


class AlwaysCollocated:
    """Prefill and decode in one worker, whatever the load."""

    name = "collocated"

    def decide(self, request: Request, snapshot: Snapshot, predicted_output: float | None = None) -> Decision:
        return take(
            Path.COLLOCATED, "always collocated", request, snapshot, predicted_output=predicted_output
        )  # fmt: skip


class AlwaysDisaggregated:
    """Prefill in one worker, decode in another, whatever the load."""

    name = "disaggregated"

    def decide(self, request: Request, snapshot: Snapshot, predicted_output: float | None = None) -> Decision:
        return take(
            Path.DISAGGREGATED, "always disaggregated", request, snapshot, predicted_output=predicted_output
        )  # fmt: skip


class RoundRobin:
    """Both paths in turn, by the request's index.

    The index is the number at the end of its id, or a hash of an id without one: a counter inside of the policy would
    make the decision depend on who asked before. ``share`` of the requests is disaggregated, as evenly spread as
    possible. Raises ConfigError unless 0 <= share <= 1.
    """

    name = "round-robin"

    def __init__(self, share: float = 0.5) -> None:
        if not (is_number(share) and 0.0 <= share <= 1.0):
            raise ConfigError(f"share must be in [0, 1], got {shown(share)}")
        self.share = share

    def decide(self, request: Request, snapshot: Snapshot, predicted_output: float | None = None) -> Decision:
        index = request_index(request.parent_id)
        turn = int((index + 1) * self.share) - int(index * self.share)
        path = Path.DISAGGREGATED if turn else Path.COLLOCATED
        reason = f"request number {index}: {self.share:.0%} of them, in turn, are disaggregated"
        return take(path, reason, request, snapshot, predicted_output=predicted_output)


class PrefillLengthThreshold:
    """Conditional disaggregation, as NVIDIA Dynamo's design of disaggregated serving describes it.

    A prompt is prefilled remotely iff what is left of it after the cached prefix is longer than
    ``max_local_prefill_length`` tokens *and* fewer than ``max_prefill_queue_size`` requests wait for a prefill worker.
    Short prompts disturb the decodes little, and a long queue costs more than the disturbance.

    Source: docs.nvidia.com/dynamo, "Disaggregated Serving", conditional disaggregation. Raises ConfigError for a
    negative length or a queue size below 1.
    """

    name = "threshold"

    def __init__(self, max_local_prefill_length: int = 512, max_prefill_queue_size: int = 4) -> None:
        check_count("max_local_prefill_length", max_local_prefill_length)
        check_count("max_prefill_queue_size", max_prefill_queue_size, least=1)
        self.max_local_prefill_length = max_local_prefill_length
        self.max_prefill_queue_size = max_prefill_queue_size

    def decide(self, request: Request, snapshot: Snapshot, predicted_output: float | None = None) -> Decision:
        new_tokens = request.num_tokens - cached_tokens(snapshot)
        queue = prefill_queue(snapshot)
        if new_tokens <= self.max_local_prefill_length:
            path = Path.COLLOCATED
            reason = f"{new_tokens} tokens to prefill, at most {self.max_local_prefill_length} stay local"
        elif queue >= self.max_prefill_queue_size:
            path = Path.COLLOCATED
            reason = f"{queue} requests wait for a prefill worker, the limit is {self.max_prefill_queue_size}"
        else:
            path = Path.DISAGGREGATED
            reason = (
                f"{new_tokens} tokens to prefill, more than {self.max_local_prefill_length}, and the prefill queue "
                f"has {queue} of {self.max_prefill_queue_size}"
            )
        return take(path, reason, request, snapshot, predicted_output=predicted_output)


def request_index(request_id: str) -> int:
    """The number at the end of an id, of which nine digits tell one turn from the next; else a hash of the id."""
    number = re.search(r"\d{1,9}$", request_id)
    return int(number[0]) if number else zlib.crc32(request_id.encode(errors="surrogatepass"))


def cached_tokens(snapshot: Snapshot) -> int:
    """Prompt tokens of the request that a local prefill would find in a prefix cache.

    A snapshot that was taken without looking at a request says nothing about it: then none.
    """
    return max((worker.cached_tokens for worker in snapshot.of(Role.COLLOCATED)), default=0)


# --- by name ---------------------------------------------------------------------------------------------------

_HOME = {
    "collocated": ("policies", "AlwaysCollocated"),
    "disaggregated": ("policies", "AlwaysDisaggregated"),
    "round-robin": ("policies", "RoundRobin"),
    "seed-rule": ("rule", "SeedRule"),
    "seed-estimate": ("rule", "SeedEstimate"),
    "threshold": ("policies", "PrefillLengthThreshold"),
    "slo": ("slo", "SloAware"),
}
POLICY_NAMES = tuple(_HOME)


def policy_class(name: str) -> Callable[..., Policy]:
    """The class behind a name. Raises ConfigError that lists the names."""
    if not isinstance(name, str) or name not in _HOME:
        hint = "; `nanopd.router.adaptive.Adaptive` needs elastic workers, and is made in Python" * (name == "adaptive")
        raise ConfigError(f"no policy is called {shown(name)}; there are {', '.join(POLICY_NAMES)}{hint}")
    module, attribute = _HOME[name]
    found: Callable[..., Policy] = getattr(importlib.import_module(f"nanopd.router.{module}"), attribute)
    return found


def make_policy(name: str, **options: Any) -> Policy:
    """A policy by name: "collocated", "disaggregated", "round-robin", "seed-rule", "seed-estimate", "threshold", "slo".

    Raises ConfigError for a name or an option that does not exist, or one that is missing, and lists what there is; and
    for a value that is none of the option's kind.
    """
    made = policy_class(name)
    parameters = inspect.signature(made).parameters
    if strange := sorted(set(options) - set(parameters)):
        raise ConfigError(
            f"policy {name!r} has no option {', '.join(strange)}; it has {', '.join(parameters) or 'none'}"
        )
    required = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
    if required:
        raise ConfigError(f"policy {name!r} needs {', '.join(required)}; its options are {', '.join(parameters)}")
    try:
        return made(**options)
    except NanoPDError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # a text where a number must stand, an int of 400 digits
        given = ", ".join(f"{key}={shown(value):.40}" for key, value in options.items())
        raise ConfigError(f"policy {name!r} cannot be made of {given}: {error}") from error
