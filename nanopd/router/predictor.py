"""OutputLengthPredictor: how many tokens will this request produce? Bayesian, online, no torch.

Model: within a bucket of prompt lengths (powers of two) the logarithm of the output length is Normal(mu, sigma²), both
unknown, with the conjugate Normal-Inverse-Gamma prior. A new length is then log-Student-t (Murphy, "Conjugate Bayesian
analysis of the Gaussian distribution", 2007, sections 3 and 3.5).

The buckets share what they know: the prior of a bucket is centred on the posterior of all lengths together, and weighs
as much as ``prior_strength`` observations, or as what all other buckets have seen if that is less. So an empty bucket
predicts what is known globally, and its own observations take over smoothly (empirical Bayes; Gelman et al., "Bayesian
Data Analysis", chapter 5).

Lengths that were cut (``max_tokens`` reached, aborted, failed) are only known to be *longer*. Dropping them, or taking
them as they are, would bias the prediction towards short outputs. They are kept as thresholds; each observation imputes
their first two moments from the present posterior, which is one step of EM for the Tobit model (Dempster, Laird and
Rubin 1977; incremental: Neal and Hinton 1998). That assumes that the cut is independent of the length it hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import NormalDist

from nanopd.costmodel.checks import check_count, check_number, is_number, shown
from nanopd.engine.request import FinishReason, Request
from nanopd.errors import ConfigError
from nanopd.router.conjugate import Moments, NormalInverseGamma
from nanopd.router.student_t import t_pdf, t_quantile

_STANDARD = NormalDist()
_NOTHING = Moments()
_VAGUE = NormalInverseGamma(mean=math.log(128), kappa=0.5, shape=1.0, rate=1.0)  # 128 tokens, give or take a factor e
_ENDLESS = 1 << 53  # tokens: no limit, and floats still hold it
_CUTS_PER_OCTAVE = 8  # thresholds are rounded to 2^(1/8), so that a bucket holds few of them


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """Output length in tokens, cut at ``max_tokens``: log length ~ location + scale * Student t with ``dof``."""

    location: float
    scale: float
    dof: float
    max_tokens: int

    @property
    def median(self) -> float:
        return self._tokens(self.location)

    @property
    def mean(self) -> float:
        """E[min(length, max_tokens)]. Without the cut a log-t has no mean at any number of degrees of freedom.

        The trapezoidal rule in u with t = sinh(u), which reaches far into heavy tails with few points.
        """
        step, reach = 0.125, 96
        total = 0.0
        for k in range(-reach, reach + 1):
            t = math.sinh(k * step)
            total += t_pdf(t, self.dof) * math.cosh(k * step) * self._tokens(self.location + self.scale * t)
        return min(total * step, float(self.max_tokens))

    def quantile(self, p: float) -> float:
        """The length that a share ``p`` of outputs does not exceed. Raises ConfigError unless 0 < p < 1."""
        return self._tokens(self.location + self.scale * t_quantile(p, self.dof))

    def interval(self, coverage: float) -> tuple[float, float]:
        """The central interval that holds a share ``coverage`` of lengths. Raises ConfigError unless in (0, 1)."""
        if not (is_number(coverage) and 0.0 < coverage < 1.0):
            raise ConfigError(f"coverage must be in (0, 1), got {shown(coverage)}")
        tail = (1 - coverage) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def _tokens(self, log_length: float) -> float:
        if self.max_tokens < 1 or log_length >= math.log(self.max_tokens):  # the exponential could overflow
            return float(self.max_tokens)
        return math.exp(max(log_length, 0.0))


@dataclass(frozen=True, slots=True)
class BucketSummary:
    """What is known of prompts with ``low`` <= tokens < ``high``, for tables and pictures."""

    low: int
    high: int
    observed: float  # weights: counts, faded if there is forgetting
    cut: float
    posterior: NormalInverseGamma


@dataclass(slots=True)
class _Bucket:
    seen: Moments = _NOTHING  # of log lengths
    cuts: dict[int, float] = field(default_factory=dict)  # threshold in eighths of an octave -> weight
    imputed: Moments = _NOTHING  # what the cuts stand for, by the posterior of the last observation

    @property
    def moments(self) -> Moments:
        return self.seen.merge(self.imputed)

    def fade(self, factor: float) -> None:
        self.seen = self.seen.fade(factor)
        self.cuts = {cut: weight * factor for cut, weight in self.cuts.items() if weight * factor > 1e-6}


class OutputLengthPredictor:
    """Learns from every finished request, whatever path served it.

    Args:
        prior_strength: how many observations of its own outweigh what a bucket takes from the others.
        forgetting: weight that a bucket's past keeps at each of its new observations; 1 never forgets, 0.99
            remembers about the last hundred.
        prior: of log lengths, before anything was seen.

    Not thread-safe. Raises ConfigError.
    """

    def __init__(
        self,
        *,
        prior_strength: float = 8.0,
        forgetting: float = 1.0,
        prior: NormalInverseGamma = _VAGUE,
    ) -> None:
        check_number("prior_strength", prior_strength, above=0.0)
        if not (is_number(forgetting) and 0.0 < forgetting <= 1.0):
            raise ConfigError(f"forgetting must be in (0, 1], got {shown(forgetting)}")
        if not isinstance(prior, NormalInverseGamma):
            raise ConfigError(f"prior must be a NormalInverseGamma, got {shown(prior)}")
        check_number("mean of the prior", prior.mean, least=-math.inf)
        for name in ("kappa", "shape", "rate"):
            check_number(f"{name} of the prior", getattr(prior, name), above=0.0)
        self.prior_strength = prior_strength
        self.forgetting = forgetting
        self.prior = prior
        self._buckets: dict[int, _Bucket] = {}

    # --- learning --------------------------------------------------------------------------------------------

    def observe(self, request: Request) -> None:
        """Learn from a finished request.

        A stop (end-of-sequence, stop token or string) shows the whole length. So does a request with ``ignore_eos``
        that reached its limit: its client chose the length. Anything else was cut.
        """
        chosen = request.params.ignore_eos and request.finish_reason is FinishReason.LENGTH
        cut = request.finish_reason is not FinishReason.STOP and not chosen
        self.learn(request.num_prompt_tokens, request.num_output_tokens, cut=cut)

    def learn(self, prompt_tokens: int, output_tokens: int, *, cut: bool = False) -> None:
        """One output of ``output_tokens``; with ``cut`` it would have been longer. No output says nothing.

        Raises ConfigError for counts that are no ints, or below 0; then nothing was learned.
        """
        check_count("output_tokens", output_tokens)
        if output_tokens == 0:
            return
        bucket = self._buckets.setdefault(bucket_of(prompt_tokens), _Bucket())
        if self.forgetting < 1.0:
            bucket.fade(self.forgetting)
        if cut:
            threshold = round(math.log2(output_tokens) * _CUTS_PER_OCTAVE)
            bucket.cuts[threshold] = bucket.cuts.get(threshold, 0.0) + 1.0
        else:
            bucket.seen = bucket.seen.merge(Moments(1.0, math.log(output_tokens)))
        if bucket.cuts:
            posterior = self._posterior(bucket)
            bucket.imputed = _impute(bucket.cuts, posterior.mean, posterior.sigma)

    # --- predicting ------------------------------------------------------------------------------------------

    def predict(self, request: Request) -> float:
        """Expected output tokens of a request, its ``max_tokens`` considered."""
        return self.distribution(request.num_prompt_tokens, request.params.max_tokens).mean

    def distribution(self, prompt_tokens: int, max_tokens: int) -> LengthPrediction:
        """The posterior predictive for a prompt of this length. Raises ConfigError for counts out of range."""
        check_count("max_tokens", max_tokens)
        max_tokens = min(max_tokens, _ENDLESS)
        posterior = self._posterior(self._buckets.get(bucket_of(prompt_tokens), _Bucket()))
        return LengthPrediction(posterior.mean, posterior.predictive_scale, 2 * posterior.shape, max_tokens)

    @property
    def global_posterior(self) -> NormalInverseGamma:
        """Of all lengths together, as if there were one bucket."""
        return self.prior.update(_merged(bucket.moments for bucket in self._buckets.values()))

    def buckets(self) -> list[BucketSummary]:
        """Every bucket that has seen something, shortest prompts first."""
        return [
            BucketSummary(*bucket_span(index), bucket.seen.weight, sum(bucket.cuts.values()), self._posterior(bucket))
            for index, bucket in sorted(self._buckets.items())
        ]

    def _posterior(self, bucket: _Bucket) -> NormalInverseGamma:
        own = bucket.moments
        return self._bucket_prior(own).update(own)

    def _bucket_prior(self, own: Moments) -> NormalInverseGamma:
        """Centred on the global posterior; with it alone, the bucket predicts with the global mean and scale.

        Its weight is at most that of the others' observations: a bucket must not count its own twice.
        """
        everything = self.global_posterior
        others = max(everything.kappa - self.prior.kappa - own.weight, 0.0)
        weight = min(self.prior_strength, others)
        kappa, shape = self.prior.kappa + weight, self.prior.shape + weight / 2
        return NormalInverseGamma(
            mean=everything.mean,
            kappa=kappa,
            shape=shape,
            rate=shape * everything.predictive_scale**2 * kappa / (kappa + 1),
        )


def bucket_of(prompt_tokens: int) -> int:
    """Index of the bucket [2^i, 2^(i+1)). Raises ConfigError for an empty prompt."""
    check_count("prompt_tokens", prompt_tokens, least=1)
    return int(prompt_tokens).bit_length() - 1


def bucket_span(index: int) -> tuple[int, int]:
    return 2**index, 2 ** (index + 1)


def _merged(parts: Iterable[Moments]) -> Moments:
    total = _NOTHING
    for part in parts:
        total = total.merge(part)
    return total


def _impute(cuts: dict[int, float], mean: float, sigma: float) -> Moments:
    """Moments of Normal(mean, sigma²) variables of which only ``x > threshold`` is known (the E step of EM)."""
    return _merged(_tail(cut, weight, mean, sigma) for cut, weight in cuts.items())


def _tail(cut: int, weight: float, mean: float, sigma: float) -> Moments:
    """E[x | x > c] = mean + sigma*h and Var = sigma² (1 + z h - h²), with the hazard h(z) = pdf(z) / (1 - cdf(z))."""
    z = (cut * math.log(2) / _CUTS_PER_OCTAVE - mean) / sigma
    above = _STANDARD.cdf(-z)
    if z > 6.0:  # the ratio of two tiny numbers: by its asymptotic series
        hazard = z + 1 / z - 2 / z**3
    else:
        hazard = _STANDARD.pdf(z) / above
    variance = min(max(1 + z * hazard - hazard**2, 0.0), 1.0)
    return Moments(weight, mean + sigma * hazard, weight * sigma**2 * variance)
