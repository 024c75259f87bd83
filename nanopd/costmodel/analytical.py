"""The analytical model that this project started from: four measured numbers, two formulas and one rule.

With α ms per prompt token, d(b) = β · max(1, b / B*) ms per decode step at batch b, γ ms of delay per prompt token and
``transfer_rate`` ms per token moved:

    T_collocated = αL + d(load)·O + γL · min(load, B*) / B*
    T_disagg     = αL + L · transfer_rate + d(batch + 1)·O

Without the decode terms both sides are proportional to L, and what is left is a rule in which neither the prompt nor
the output occurs: disaggregate iff γ / transfer_rate > B* / load. That is its weakness, and notebook 08 shows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanopd.costmodel.cost_model import LoadState, RequestSize
from nanopd.costmodel.estimate import Estimate
from nanopd.costmodel.hardware_profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class AnalyticalModel:
    """The model on one machine's numbers. ``load`` is the number of sequences that decode."""

    profile: HardwareProfile

    @property
    def transfer_rate_ms_per_token(self) -> float:
        """Time to move one token's KV. 0 where prefill and decode share a pool."""
        return transfer_ms(self.profile.kv_bytes_per_token, self.profile.bandwidth_gb_s)

    @property
    def ratio(self) -> float:
        """γ / transfer_rate: interference avoided per cost of the transfer. Infinite without a transfer."""
        rate = self.transfer_rate_ms_per_token
        return self.profile.gamma_ms_per_token / rate if rate else math.inf

    @property
    def threshold_load(self) -> float:
        """The load above which the rule disaggregates: B* / ratio."""
        return self.profile.batch_thresh / self.ratio if self.ratio else math.inf

    def decode_step_ms(self, batch: float) -> float:
        """d(b) = β · max(1, b / B*)."""
        return self.profile.beta_ms * max(1.0, batch / self.profile.batch_thresh)

    def prefers_disaggregation(self, load: float) -> bool:
        """The rule: γ / transfer_rate > B* / load."""
        return load > self.threshold_load

    def collocated(self, request: RequestSize, load: LoadState) -> Estimate:
        """Terms: prefill, decode, interference."""
        p, busy = self.profile, min(load.num_decodes, self.profile.batch_thresh)
        return Estimate(
            {
                "prefill": p.alpha_ms_per_token * request.prompt_tokens,
                "decode": self.decode_step_ms(load.num_decodes) * request.output_tokens,
                "interference": p.gamma_ms_per_token * request.prompt_tokens * busy / p.batch_thresh,
            }
        )

    def disaggregated(self, request: RequestSize, load: LoadState) -> Estimate:
        """Terms: prefill, transfer, decode. ``load.num_decodes`` is the batch that the request joins."""
        return Estimate(
            {
                "prefill": self.profile.alpha_ms_per_token * request.prompt_tokens,
                "transfer": self.transfer_rate_ms_per_token * request.prompt_tokens,
                "decode": self.decode_step_ms(load.num_decodes + 1) * request.output_tokens,
            }
        )


def transfer_ms(num_bytes: float, bandwidth_gb_s: float | None) -> float:
    """Time for ``num_bytes`` at 1e9 bytes per GB; 0 without a link, since nothing has to be moved then."""
    return 0.0 if bandwidth_gb_s is None else num_bytes / bandwidth_gb_s / 1e6
