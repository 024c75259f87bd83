"""Cost of a request on the step-time model: its own wait, and what it does to others as terms of their own."""

from __future__ import annotations

from dataclasses import dataclass

from nanopd.costmodel.analytical import transfer_ms
from nanopd.costmodel.checks import check_count, check_number
from nanopd.costmodel.cost_model import LoadState, RequestSize
from nanopd.costmodel.estimate import Estimate
from nanopd.costmodel.features import StepFeatures
from nanopd.costmodel.step_time import StepTimeModel, prefill_steps


@dataclass(frozen=True, slots=True)
class StepTimeCost:
    """Both paths, each on the step-time model of the place where it runs.

    ``chunk_size``: prompt tokens per step; None for whole prompts. ``bandwidth_gb_s``: of the link between prefill and
    decode; None where both use one pool. Raises ConfigError for values out of range.
    """

    whole: StepTimeModel
    prefill: StepTimeModel
    decode: StepTimeModel
    kv_bytes_per_token: int
    bandwidth_gb_s: float | None = None
    chunk_size: int | None = 512

    def __post_init__(self) -> None:
        check_count("kv_bytes_per_token", self.kv_bytes_per_token)
        if self.bandwidth_gb_s is not None:
            check_number("bandwidth_gb_s", self.bandwidth_gb_s, above=0.0, unit="GB/s")
        if self.chunk_size is not None:
            check_count("chunk_size", self.chunk_size, least=1)

    def collocated(self, request: RequestSize, load: LoadState) -> Estimate:
        """Prompt chunks share their steps with the decodes, which wait for them."""
        beside = StepFeatures.decode(round(load.num_decodes), load.kv_tokens)
        chunks = prefill_steps(request.new_tokens, request.cached_tokens, self.chunk_size, beside)
        prefill = sum(map(self.whole.step_ms, chunks))
        return Estimate(
            {
                "queue": prefill * load.waiting_tokens / request.new_tokens,
                "prefill": prefill,
                **self._decode_terms(self.whole, request, load),
                "others wait for the prefill": load.num_decodes * sum(map(self.whole.interference_ms, chunks)),
            }
        )

    def disaggregated(self, request: RequestSize, load: LoadState) -> Estimate:
        """The prefill has its own place; then the KV moves, behind what the link has to move before."""
        prefill = self.prefill.prefill_ms(request.new_tokens, start=request.cached_tokens, chunk_size=self.chunk_size)
        return Estimate(
            {
                "queue": prefill * load.waiting_tokens / request.new_tokens,
                "prefill": prefill,
                "link queue": transfer_ms(load.link_bytes, self.bandwidth_gb_s),
                "transfer": transfer_ms(request.prompt_tokens * self.kv_bytes_per_token, self.bandwidth_gb_s),
                **self._decode_terms(self.decode, request, load),
            }
        )

    def _decode_terms(self, model: StepTimeModel, request: RequestSize, load: LoadState) -> dict[str, float]:
        """Steps after the first token, with the request in the batch, half-way through its output: KV grows evenly."""
        steps = max(0.0, request.output_tokens - 1)
        batch = round(load.num_decodes)
        grown = load.kv_tokens + batch * steps / 2
        before = StepFeatures.decode(batch, grown)
        joined = StepFeatures.decode(batch + 1, grown + request.prompt_tokens + steps / 2)
        with_it = model.step_ms(joined)
        slower = with_it - model.step_ms(before) if batch else 0.0
        return {"decode": with_it * steps, "others decode in a larger batch": slower * steps * batch}
