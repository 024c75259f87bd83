"""StepTimeModel: how long a step takes, from what it computes and reads.

A step runs its kernels one after the other, so its time is a sum:

* the linear layers: a floor for reading the weights, then so much for each token. Below the ``knee`` a token rides
  along with the weights; above it the multiplications set the pace (roofline: Williams et al., CACM 2009). Convex and
  piecewise linear stands for max(read, compute), of which real kernels show a rounded version;
* attention of the prefill, by query-key pairs, and by context for chunks too short to fill the device;
* attention of the decodes, by tokens of KV that they read;
* what each chunk and each sequence costs beside (launches, sampling, bookkeeping on the host).

A step with prefill is launched kernel by kernel, and cannot be faster than the host launches it; a step that only
decodes replays a CUDA graph. That is the one maximum in the model: max(device, ``launch_ms``).

Fitted by ``nanopd.costmodel.step_fit``. Plain floats, a few microseconds a step: the simulator asks for every one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from nanopd.costmodel.checks import check_count, check_number, shown
from nanopd.costmodel.features import StepFeatures
from nanopd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Coefficients in milliseconds per unit, all >= 0. Raises ConfigError if one is negative or not finite."""

    base_ms: float  # any step: weights read, fixed overhead
    token_ms: float = 0.0  # each token, prefill or decode
    dense_token_ms: float = 0.0  # each token beyond the knee, in addition
    knee_tokens: float = 0.0
    pair_ms: float = 0.0  # each query-key pair of the prefill's attention
    chunk_context_ms: float = 0.0  # each context token of a chunk, whatever the chunk's length
    kv_token_ms: float = 0.0  # each token of KV that the decodes read
    chunk_ms: float = 0.0  # each prefill chunk
    sequence_ms: float = 0.0  # each sequence in the step, on the host
    launch_ms: float = 0.0  # the host's time to launch a step with prefill

    def __post_init__(self) -> None:
        for field in fields(self):
            check_number(f"{field.name} of a step-time model", getattr(self, field.name))

    def step_ms(self, features: StepFeatures) -> float:
        """Predicted time of one step in ms, never negative; 0 for a step without tokens, which nobody runs."""
        return sum(self.terms(features).values())

    def terms(self, features: StepFeatures) -> dict[str, float]:
        """The same, term by term, in ms."""
        tokens = features.num_tokens
        if tokens == 0:
            return dict.fromkeys(TERMS, 0.0)
        linear = self.token_ms * tokens + self.dense_token_ms * max(0.0, tokens - self.knee_tokens)
        prefill = self.pair_ms * features.prefill_pairs + self.chunk_context_ms * features.chunk_context
        decode = self.kv_token_ms * features.kv_tokens
        chunks = self.chunk_ms * features.num_prefills
        device = self.base_ms + linear + prefill + decode + chunks
        launch = max(0.0, self.launch_ms - device) if features.num_prefills else 0.0
        sequences = self.sequence_ms * (features.num_decodes + features.num_prefills)
        return dict(zip(TERMS, (self.base_ms, linear, prefill, decode, chunks, launch, sequences)))

    def interference_ms(self, features: StepFeatures) -> float:
        """How much longer the decodes of a mixed step wait for their token because of its prefill chunks."""
        alone = features.decodes_only
        return self.step_ms(features) - self.step_ms(alone) if alone.num_decodes else 0.0

    def prefill_ms(
        self, num_tokens: int, *, start: int = 0, chunk_size: int | None = None, beside: StepFeatures | None = None
    ) -> float:
        """Time to compute ``num_tokens`` prompt tokens behind ``start`` others, one chunk a step.

        ``beside``: the decodes that run in the same steps (taken to stay as they are). ``chunk_size``: None for one
        step. Raises ConfigError for a chunk size below 1.
        """
        return sum(self.step_ms(step) for step in prefill_steps(num_tokens, start, chunk_size, beside))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepTimeModel:
        """Raises ConfigError for a coefficient that is missing, unknown or out of range."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping):
            raise ConfigError(f"a step-time model is a table of {sorted(names)}, got {shown(data)}")
        if strange := sorted(set(data) ^ names):
            raise ConfigError(f"a step-time model has the coefficients {sorted(names)}; missing or unknown: {strange}")
        return cls(**data)


TERMS = (
    "weights and fixed costs",
    "linear layers",
    "prefill attention",
    "decode attention",
    "chunks",
    "waiting for launches",
    "sequences",
)


def prefill_steps(
    num_tokens: int, start: int = 0, chunk_size: int | None = None, beside: StepFeatures | None = None
) -> list[StepFeatures]:
    """The steps that compute ``num_tokens`` prompt tokens behind ``start`` others, one chunk each.

    Raises ConfigError for counts below 0, a chunk size below 1, and what is no int.
    """
    check_count("num_tokens", num_tokens)
    check_count("start", start)
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, least=1)
    beside = beside or StepFeatures()
    steps, end = [], start + num_tokens
    while start < end:
        length = min(chunk_size or num_tokens, end - start)
        steps.append(beside.with_chunk(length, start))
        start += length
    return steps
