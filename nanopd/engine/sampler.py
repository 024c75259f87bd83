"""From logits to one token per sequence: greedy, temperature, top-k, top-p.

A token is drawn by inverse transform: filter the distribution, lay the kept probabilities end to end *in vocabulary
order*, and take the token in whose interval the request's uniform number falls. The number comes from
``nanopd.engine.uniforms``, so a token depends on the row's logits, the sampling parameters and (seed, sample,
position).

For that to hold to the last bit, a row must not notice its neighbours. Floating-point prefix sums do notice: a GPU
associates them differently for other shapes, and two adjacent sums may even fall out of order, which lets a token of
probability zero be drawn. So probabilities become integers first: ``floor(exp((l - max) / T) * 2**40)`` in int64.
Integer sums are exact in any order. A token below 2**-40 of the likeliest counts as impossible; for a vocabulary of
150,000 that moves less than 2e-7 of probability. What remains device dependent is the last bit of the logits and of
``exp``.

The filters, in this order: ``top_k`` keeps the k largest logits, then ``top_p`` (nucleus sampling, Holtzman et al.
2020) keeps the shortest prefix, by falling probability, that reaches ``top_p`` of what top-k left. Equal logits rank
by token id, lowest first, so exactly k tokens stay. At least one token always stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_WEIGHT_ONE = float(1 << 40)  # integer weight of the likeliest token; 2**23 tokens of it still fit an int64
_CHUNK_ELEMENTS = 1 << 22  # logits worked on at a time: at about 60 bytes of scratch each, 250 MB
_TEMPERATURE_RANGE = (1e-30, 1e30)  # outside, 1/T is not a normal float32: 0 * inf and inf * 0 would give NaN


@dataclass
class SamplingBatch:
    """Who draws a token, from which row of the logits, and how. All arrays [N], on the host.

    Several entries may name the same row: the n samples of one prompt draw their first tokens from it.
    """

    rows: np.ndarray  # int64, row of the logits
    temperature: np.ndarray  # float64, 0 = greedy
    top_k: np.ndarray  # int64, 0 = off
    top_p: np.ndarray  # float64 in (0, 1], 1 = off
    uniform: np.ndarray  # float64 in [0, 1), ignored by greedy entries

    def __len__(self) -> int:
        return len(self.rows)


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id among equals; -1 where the row's maximum is not finite.

    Args:
        logits: [N, vocab], any floating dtype.

    Returns: [N] int64.
    """
    best = torch.max(logits, dim=-1)  # NaN wins every comparison, so one NaN in the row shows in its maximum
    # Not torch.where(…, -1): it would copy the -1 to the device, which a CUDA graph's capture forbids.
    return best.indices.masked_fill(~torch.isfinite(best.values), -1)


def sample_tokens(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """One token for each entry of ``batch``.

    Args:
        logits: [R, vocab], any floating dtype, on any device. Not modified. Computed in float32.
        batch: N entries that name rows of ``logits``.

    Returns: [N] int64 on the logits' device, in the order of ``batch``. -1 where the row's maximum is NaN or infinite;
        the runner turns that into ``NonFiniteLogitsError`` once the tokens are on the host.
    """
    is_greedy = batch.temperature == 0
    has_filter = (batch.top_k > 0) | (batch.top_p < 1)
    greedy = np.flatnonzero(is_greedy)
    plain = np.flatnonzero(~is_greedy & ~has_filter)
    filtered = np.flatnonzero(~is_greedy & has_filter)
    order = np.concatenate([greedy, plain, filtered])

    device_batch = _to_device(batch, order, logits.device)
    parts = []
    if len(greedy):
        rows = device_batch.rows[: len(greedy)]
        whole = len(greedy) == len(batch) == logits.shape[0] and np.array_equal(batch.rows, np.arange(len(batch)))
        parts.append(greedy_tokens(logits if whole else logits.index_select(0, rows)))
    middle = len(greedy) + len(plain)
    chunk = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for first, last, use_filter in ((len(greedy), middle, False), (middle, len(batch), True)):
        for start in range(first, last, chunk):
            stop = min(start + chunk, last)
            parts.append(_draw(logits, device_batch.part(start, stop), use_filter))
    tokens = torch.cat(parts)
    return tokens if len(parts) == 1 else tokens.index_select(0, device_batch.inverse)


@dataclass
class _DeviceBatch:
    """``SamplingBatch`` on the logits' device, sorted into greedy, plain and filtered entries. All [N]."""

    rows: Tensor  # int64
    inverse_temperature: Tensor  # float32
    top_k: Tensor  # int64, never 0
    top_p: Tensor  # float64
    uniform: Tensor  # float64
    inverse: Tensor  # int64, where each entry of the original order went

    def part(self, start: int, stop: int) -> _DeviceBatch:
        names = ("rows", "inverse_temperature", "top_k", "top_p", "uniform", "inverse")
        return _DeviceBatch(*(getattr(self, name)[start:stop] for name in names))


def _to_device(batch: SamplingBatch, order: np.ndarray, device: torch.device) -> _DeviceBatch:
    """One copy to the device for all columns: integers up to 2**53 travel exactly as float64."""
    temperature = np.clip(batch.temperature, *_TEMPERATURE_RANGE)
    top_k = np.where(batch.top_k > 0, batch.top_k, np.iinfo(np.int32).max)
    columns = np.stack([batch.rows, 1.0 / temperature, top_k, batch.top_p, batch.uniform])[:, order]
    inverse = np.empty(len(order))
    inverse[order] = np.arange(len(order))
    host = torch.from_numpy(np.concatenate([columns, inverse[None]]))
    if device.type == "cuda":
        host = host.pin_memory()
    rows, inverse_temperature, top_k_, top_p, uniform, inverse_ = host.to(device, non_blocking=True)
    return _DeviceBatch(rows.long(), inverse_temperature.float(), top_k_.long(), top_p, uniform, inverse_.long())


def _draw(logits: Tensor, batch: _DeviceBatch, use_filter: bool) -> Tensor:
    """Inverse transform sampling for a handful of rows. Returns [n] int64, -1 for rows without a finite maximum."""
    rows = logits.index_select(0, batch.rows).float()
    best = rows.amax(dim=-1, keepdim=True)
    # Subtract before dividing: a tiny temperature then sends every other token to -inf and leaves the maximum at 0.
    scaled = (rows - best) * batch.inverse_temperature[:, None]
    weights = (scaled.exp_() * _WEIGHT_ONE).long()
    if use_filter:
        weights = weights * _kept(rows, weights, batch.top_k, batch.top_p)
    sums = weights.cumsum(dim=-1)
    # The largest u is 1 - 2**-53, and then u * total still rounds to less than total: a token is always found.
    target = (batch.uniform[:, None] * sums[:, -1:]).long()
    tokens = torch.searchsorted(sums, target, right=True).squeeze(1)
    return tokens.masked_fill(~torch.isfinite(best.squeeze(1)), -1)


def _kept(rows: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens survive top-k and top-p: [n, vocab] bool, in vocabulary order."""
    order = torch.sort(rows, dim=-1, descending=True, stable=True).indices
    by_rank = weights.gather(1, order).cumsum(dim=-1)
    before = by_rank - weights.gather(1, order)  # weight of all tokens that rank higher
    # Weight of the first k. With top_p = 1 the comparison below is top-k itself: token k + 1 has all of it before it.
    total = by_rank.gather(1, (top_k.clamp(max=rows.shape[1]) - 1)[:, None])
    kept = before < top_p[:, None] * total
    return torch.empty_like(kept).scatter_(1, order, kept)
