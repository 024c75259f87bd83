"""Workloads: arrivals with their lengths, generated ahead of a run and from a seed.

The same seed gives every strategy the same arrivals and the same prompts. It also gives every *rate* the same sequence
of lengths and the same arrival pattern, only faster (common random numbers), so that a curve over rates moves because
the rate moves. Token ids differ from rate to rate, or a prefix cache would answer the second run.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from nanopd.bench.lengths import MOST_TOKENS, Fixed, Lengths
from nanopd.costmodel.checks import check_count, check_number, shown
from nanopd.errors import ConfigError

MOST_ARRIVALS = 1_000_000
DOCUMENT_BLOCK = 512  # tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, before it is sent."""

    index: int
    time_s: float  # after the start of the run
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()  # ids of shared blocks: the prompt begins with these, ``prefix_block`` tokens each
    prefix_block: int = 512
    prompt_clipped: bool = False  # it was longer than the maximum
    output_clipped: bool = False

    def clipped(self, max_prompt: int, max_output: int) -> Arrival:
        """With lengths of at most these."""
        return replace(
            self,
            prompt_tokens=min(self.prompt_tokens, max_prompt),
            output_tokens=min(self.output_tokens, max_output),
            prompt_clipped=self.prompt_clipped or self.prompt_tokens > max_prompt,
            output_clipped=self.output_clipped or self.output_tokens > max_output,
        )


@dataclass(frozen=True, slots=True)
class Documents:
    """Long beginnings that requests share: each asks about one of ``count`` documents of ``tokens`` tokens.

    A prefix cache computes a document once; every decode that follows still reads its KV. So documents make KV heavy
    and prefill light. They are the same at every rate. Raises ConfigError below 1 document or 1 token.
    """

    count: int
    tokens: int

    def __post_init__(self) -> None:
        check_count("the number of documents", self.count, least=1, most=MOST_ARRIVALS)
        check_count("tokens of a document", self.tokens, least=1, most=MOST_TOKENS)

    def blocks(self, document: int) -> tuple[int, ...]:
        """Ids of its blocks, below 0: their tokens do not depend on the rate, see `Schedule.prompt`."""
        per_document = -(-self.tokens // DOCUMENT_BLOCK)
        return tuple(-1 - document * per_document - i for i in range(per_document))


@dataclass(frozen=True, slots=True)
class Part:
    """A share of the requests: its weight among the parts, its lengths, and what their prompts begin with.

    ``prompt`` is what comes after the document.
    """

    weight: float
    prompt: Lengths
    output: Lengths
    documents: Documents | None = None


@dataclass(frozen=True)
class Workload:
    """A mix of requests. Longer lengths than the maxima are clipped to them, and counted.

    Raises ConfigError without parts, for weights that are not positive, or maxima below 1.
    """

    name: str
    parts: tuple[Part, ...]
    max_prompt: int = 32_768  # tokens
    max_output: int = 2_048
    source: str = ""  # where the lengths come from

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple) or not self.parts or not all(isinstance(p, Part) for p in self.parts):
            raise ConfigError(f"workload {self.name!r} needs a tuple of parts, got {shown(self.parts)}")
        for part in self.parts:
            check_number(f"the weight of a part of workload {self.name!r}", part.weight, above=0.0)
        for name in ("max_prompt", "max_output"):
            check_count(f"{name} of workload {self.name!r}", getattr(self, name), least=1)

    @classmethod
    def fixed(cls, prompt: int, output: int) -> Workload:
        """Requests that are all alike."""
        part = Part(1.0, Fixed(prompt), Fixed(output))
        return cls(f"fixed-{prompt}-{output}", (part,), prompt, output, "one length")

    def draw(self, rng: random.Random) -> tuple[int, int, tuple[int, ...]]:
        """(prompt tokens, output tokens, shared blocks), not clipped yet."""
        (part,) = rng.choices(self.parts, [part.weight for part in self.parts])
        prompt, output, documents = part.prompt.draw(rng), part.output.draw(rng), part.documents
        if documents is None:
            return prompt, output, ()
        blocks = documents.blocks(rng.randrange(documents.count))
        return len(blocks) * DOCUMENT_BLOCK + prompt, output, blocks

    def scaled(self, factor: float) -> Workload:
        """All lengths and maxima times ``factor``: the same shape for a smaller model."""
        check_number("the scale of a workload", factor, above=0.0)
        parts = tuple(
            replace(p, prompt=p.prompt.scaled(factor), output=p.output.scaled(factor), documents=_scaled(p, factor))
            for p in self.parts
        )
        return replace(
            self,
            name=f"{self.name}*{factor:g}" if factor != 1 else self.name,
            parts=parts,
            max_prompt=max(1, round(min(self.max_prompt * factor, MOST_TOKENS))),
            max_output=max(1, round(min(self.max_output * factor, MOST_TOKENS))),
        )

    def fitting(self, max_model_len: int) -> Workload:
        """Maxima lowered until prompt and output fit into ``max_model_len`` together; outputs keep at most half."""
        check_count("max_model_len, prompt and output together,", max_model_len, least=2)
        output = min(self.max_output, max_model_len // 2)
        return replace(self, max_output=output, max_prompt=min(self.max_prompt, max_model_len - output))


@dataclass(frozen=True)
class Schedule:
    """Arrivals in order of time, and what they were made from. Raises ConfigError for a duration that is none."""

    name: str
    arrivals: tuple[Arrival, ...]
    duration_s: float  # arrivals lie in [0, duration_s)
    seed: int
    note: str = ""  # source of the lengths, what was done to the times
    salt: str = ""  # part of the seed of the token ids

    def __post_init__(self) -> None:
        check_number("the duration of a schedule", self.duration_s, above=0.0, unit="seconds")

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def rate(self) -> float:
        """Requests per second as they really are."""
        return len(self.arrivals) / self.duration_s

    @property
    def num_clipped_prompts(self) -> int:
        return sum(a.prompt_clipped for a in self.arrivals)

    @property
    def num_clipped_outputs(self) -> int:
        return sum(a.output_clipped for a in self.arrivals)

    def prompt(self, arrival: Arrival, vocab_size: int) -> list[int]:
        """Token ids of ``arrival``, uniform in [0, vocab_size), the same in every process and for every strategy.

        Tokens under a shared prefix id depend on that id (below 0: and on no rate), all others on the request.
        """
        check_count("vocab_size", vocab_size, least=1, most=MOST_TOKENS)
        tokens: list[int] = []
        for block in arrival.prefix:
            size = min(arrival.prefix_block, arrival.prompt_tokens - len(tokens))
            if size == 0:  # a clipped prompt
                break
            salt = f"{self.salt}/block" if block >= 0 else "document"
            tokens += _tokens(f"{self.seed}/{salt}/{block}", vocab_size, arrival.prefix_block)[:size]
        own = arrival.prompt_tokens - len(tokens)
        return tokens + _tokens(f"{self.seed}/{self.salt}/request/{arrival.index}", vocab_size, own)

    def at_rate(self, rate: float) -> Schedule:
        """The same requests, times stretched so that ``rate`` of them come per second. Its tokens are others."""
        _check_rate(rate)
        factor = self.rate / rate
        if not 0.0 < self.duration_s * factor < math.inf:
            raise ConfigError(f"{len(self)} requests cannot be stretched to {rate:g} of them per second")
        arrivals = tuple(replace(a, time_s=a.time_s * factor) for a in self.arrivals)
        note = f"{self.note}; times multiplied by {factor:.4g}".lstrip("; ")
        return replace(
            self, arrivals=arrivals, duration_s=self.duration_s * factor, note=note, salt=f"{self.salt}@{rate!r}"
        )

    def until(self, duration_s: float) -> Schedule:
        """What arrives in the first ``duration_s`` seconds; all of it if it is over before."""
        check_number("the duration", duration_s, above=0.0, unit="seconds")
        if duration_s >= self.duration_s:
            return self
        arrivals = tuple(a for a in self.arrivals if a.time_s < duration_s)
        return replace(self, arrivals=arrivals, duration_s=duration_s, note=f"{self.note}; the first {duration_s:g} s")

    def documents(self, vocab_size: int) -> list[list[int]]:
        """Token ids of the shared documents that occur, to be computed once before a run that is to find them."""
        first = {a.prefix: a for a in self.arrivals if a.prefix and a.prefix[0] < 0}
        return [
            self.prompt(replace(a, prompt_tokens=len(a.prefix) * a.prefix_block), vocab_size) for a in first.values()
        ]

    def fingerprint(self) -> str:
        """16 hex digits that two schedules share only if times, lengths, prefixes and token seeds are equal."""
        digest = hashlib.sha256(repr((self.seed, self.salt, self.duration_s)).encode())
        for arrival in self.arrivals:
            digest.update(repr(tuple(asdict(arrival).values())).encode())
        return digest.hexdigest()[:16]


def poisson(workload: Workload, rate: float, duration_s: float, seed: int = 0) -> Schedule:
    """Poisson arrivals: independent exponential gaps of mean 1/``rate`` seconds, for ``duration_s`` seconds.

    Raises ConfigError for a rate or duration that is not positive, or for more than a million arrivals.
    """
    _check_rate(rate)
    check_number("the duration", duration_s, above=0.0, unit="seconds")
    if rate * duration_s > MOST_ARRIVALS:
        raise ConfigError(f"rate {rate:g} for {duration_s:g} s makes over {MOST_ARRIVALS:,} arrivals")
    gaps, lengths = random.Random(f"{seed}/gaps"), random.Random(f"{seed}/lengths")
    arrivals = tuple(
        Arrival(index, time_s, *workload.draw(lengths), prefix_block=DOCUMENT_BLOCK).clipped(
            workload.max_prompt, workload.max_output
        )
        for index, time_s in enumerate(_times(gaps, rate, duration_s))
    )
    note = f"Poisson arrivals at {rate:g}/s; lengths: {workload.source or 'as given'}"
    return Schedule(workload.name, arrivals, duration_s, seed, note, f"{rate!r}")


def chain(name: str, parts: Sequence[Schedule]) -> Schedule:
    """One after the other: a load that changes. They must share a seed; their tokens become others."""
    if not parts or len({part.seed for part in parts}) != 1:
        raise ConfigError(f"schedule {name!r} needs parts of one seed, got seeds {[part.seed for part in parts]}")
    arrivals: list[Arrival] = []
    begin = 0.0
    for part in parts:
        arrivals += [replace(a, index=len(arrivals) + i, time_s=begin + a.time_s) for i, a in enumerate(part.arrivals)]
        begin += part.duration_s
    note = "one after the other: " + "; ".join(f"{p.name} for {p.duration_s:g} s at {p.rate:.3g}/s" for p in parts)
    return Schedule(name, tuple(arrivals), begin, parts[0].seed, note, "/".join(part.salt for part in parts))


def schedules(workload: Workload, duration_s: float, seed: int = 0) -> Callable[[float], Schedule]:
    """rate -> Poisson schedule, as `compare_strategies` takes it."""
    return lambda rate: poisson(workload, rate, duration_s, seed)


def _times(rng: random.Random, rate: float, duration_s: float) -> Iterator[float]:
    time_s = rng.expovariate(1.0) / rate
    while time_s < duration_s:
        yield time_s
        time_s += rng.expovariate(1.0) / rate


def _tokens(seed: str, vocab_size: int, count: int) -> list[int]:
    """``choices`` takes one float per token: ten times as fast as ``randrange``, and as stable between versions."""
    return random.Random(seed).choices(range(vocab_size), k=count) if count > 0 else []


def _scaled(part: Part, factor: float) -> Documents | None:
    documents = part.documents
    return documents and replace(documents, tokens=max(1, round(documents.tokens * factor)))


def _check_rate(rate: float) -> None:
    check_number("the rate", rate, above=0.0, unit="requests per second")


def total_tokens(arrivals: Sequence[Arrival]) -> tuple[int, int]:
    """(prompt tokens, output tokens) of all arrivals."""
    return sum(a.prompt_tokens for a in arrivals), sum(a.output_tokens for a in arrivals)
