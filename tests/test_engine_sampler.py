"""The sampler against a float64 oracle that knows none of its tricks (integer weights, batching, one sort)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanopd.engine.sampler import SamplingBatch, greedy_tokens, sample_tokens
from nanopd.engine.uniforms import uniforms


def batch_of(
    rows: list[int],
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    uniform: list[float] | np.ndarray | None = None,
) -> SamplingBatch:
    n = len(rows)
    return SamplingBatch(
        rows=np.array(rows, dtype=np.int64),
        temperature=np.array(temperature, dtype=np.float64),
        top_k=np.array(top_k or [0] * n, dtype=np.int64),
        top_p=np.array(top_p or [1.0] * n, dtype=np.float64),
        uniform=np.array(np.full(n, 0.5) if uniform is None else uniform, dtype=np.float64),
    )


def oracle_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Softmax, then top-k, then top-p, one token at a time, in float64."""
    scaled = logits.astype(np.float64)
    scaled = np.exp((scaled - scaled.max()) / temperature)
    ranked = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    if top_k > 0:
        ranked = ranked[:top_k]
    mass = sum(scaled[token] for token in ranked)
    kept, reached = [], 0.0
    for token in ranked:
        if reached >= top_p * mass and kept:
            break
        kept.append(token)
        reached += scaled[token]
    out = np.zeros(len(logits))
    out[kept] = scaled[kept]
    return out / out.sum()


def oracle_token(probabilities: np.ndarray, u: float) -> tuple[int, float]:
    """The token whose interval holds u, and how far u is from the interval's nearest edge."""
    edges = np.cumsum(probabilities)
    token = int(np.searchsorted(edges, u * edges[-1], side="right"))
    low = edges[token - 1] if token else 0.0
    return token, min(u - low, edges[token] - u)


def random_cases(rng: np.random.Generator, n: int, vocab: int) -> tuple[np.ndarray, SamplingBatch]:
    logits = (rng.standard_normal((n, vocab)) * rng.uniform(0.1, 8, (n, 1))).astype(np.float32)
    temperature = rng.choice([0.3, 0.7, 1.0, 1.7], n)
    top_k = rng.choice([0, 0, 1, 2, 5, vocab - 1, vocab, vocab + 7], n)
    top_p = rng.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.99], n)
    return logits, SamplingBatch(np.arange(n), temperature, top_k, top_p, rng.uniform(size=n))


@pytest.mark.parametrize("vocab", [1, 2, 7, 100, 3001])
def test_tokens_equal_float64_oracle(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    n = 200 if vocab < 1000 else 60
    logits, batch = random_cases(rng, n, vocab)
    tokens = sample_tokens(torch.from_numpy(logits), batch).tolist()
    undecided = 0
    for i, token in enumerate(tokens):
        p = oracle_distribution(logits[i], batch.temperature[i], int(batch.top_k[i]), batch.top_p[i])
        expected, margin = oracle_token(p, batch.uniform[i])
        if margin < 1e-6:  # float32 rounding of exp may move an edge by this much
            undecided += 1
            continue
        assert token == expected, (i, batch.temperature[i], batch.top_k[i], batch.top_p[i], margin)
    assert undecided <= 2  # otherwise the tolerance would have swallowed the test


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.8), (9, 0.9)])
def test_many_draws_follow_the_distribution(top_k: int, top_p: float) -> None:
    """Chi-square over 20,000 draws with hashed uniforms: seeds 0..19,999 for one half, positions for the other."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(16).astype(np.float32) * 2
    p = oracle_distribution(logits, 0.9, top_k, top_p)
    draws = 10_000
    for u in (
        uniforms(range(draws), [0] * draws, [0] * draws),
        uniforms([7] * draws, [3] * draws, range(draws)),
    ):
        batch = batch_of([0] * draws, [0.9] * draws, [top_k] * draws, [top_p] * draws, u)
        counts = np.bincount(sample_tokens(torch.from_numpy(logits[None]), batch).numpy(), minlength=16)
        assert counts[p == 0].sum() == 0
        expected = p[p > 0] * draws
        chi2 = ((counts[p > 0] - expected) ** 2 / expected).sum()
        degrees = (p > 0).sum() - 1
        # Wilson-Hilferty: (chi2 / k)^(1/3) is close to normal. 5 sigma, and the draws are fixed.
        z = ((chi2 / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
        assert abs(z) < 5, (chi2, degrees)


def test_batch_mates_never_change_a_token() -> None:
    """Every row alone, in reverse, doubled, and among rows of the other kinds: bit-identical tokens."""
    rng = np.random.default_rng(3)
    logits, batch = random_cases(rng, 64, 5003)
    batch.temperature[::5] = 0
    tensor = torch.from_numpy(logits)
    together = sample_tokens(tensor, batch)

    def pick(index: list[int]) -> SamplingBatch:
        return SamplingBatch(*(getattr(batch, f)[index] for f in ("rows", "temperature", "top_k", "top_p", "uniform")))

    alone = torch.cat([sample_tokens(tensor, pick([i])) for i in range(64)])
    assert torch.equal(alone, together)
    back = list(range(64))[::-1]
    assert torch.equal(sample_tokens(tensor, pick(back)), together[back])
    twice = [i for i in range(64) for _ in range(2)]
    assert torch.equal(sample_tokens(tensor, pick(twice)), together[twice])


def test_rows_are_worked_through_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    logits, batch = random_cases(rng, 40, 501)
    whole = sample_tokens(torch.from_numpy(logits), batch)
    monkeypatch.setattr("nanopd.engine.sampler._CHUNK_ELEMENTS", 3 * 501)
    assert torch.equal(sample_tokens(torch.from_numpy(logits), batch), whole)


def test_ties_rank_by_token_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    for u, expected in ((0.0, 1), (0.49, 1), (0.51, 2), (0.999999, 2)):
        assert sample_tokens(logits, batch_of([0], [1.0], [2], uniform=[u])).item() == expected
        assert sample_tokens(logits, batch_of([0], [1.0], [4], [0.6], [u])).item() == expected
    assert greedy_tokens(logits).item() == 1
    assert sample_tokens(logits, batch_of([0], [1.0], [1], uniform=[0.99])).item() == 1
    flat = torch.zeros(1, 1000)
    assert sample_tokens(flat, batch_of([0], [1.0], [10], uniform=[0.95])).item() == 9
    assert sample_tokens(flat, batch_of([0], [1.0], uniform=[0.5004])).item() == 500


def test_top_p_reached_exactly_takes_no_further_token() -> None:
    flat = torch.zeros(1, 8)
    for top_p, last in ((0.125, 0), (0.5, 3), (0.50001, 4), (0.75, 5), (1.0, 7)):
        assert sample_tokens(flat, batch_of([0], [1.0], None, [top_p], [0.9999])).item() == last


def test_sums_over_a_large_vocabulary_are_exact() -> None:
    """100,000 equal tokens: u in the middle of interval i draws token i, everywhere."""
    vocab = 100_000
    flat = torch.zeros(1, vocab)
    wanted = [*range(0, vocab, 7919), vocab - 2, vocab - 1]
    u = [(token + 0.5) / vocab for token in wanted]
    for top_k in (0, vocab):
        batch = batch_of([0] * len(u), [1.0] * len(u), [top_k] * len(u), uniform=u)
        assert sample_tokens(flat, batch).tolist() == wanted
    batch = batch_of([0, 0], [1.0] * 2, [0, 90_001], uniform=[1 - 2.0**-53] * 2)
    assert sample_tokens(flat, batch).tolist() == [99_999, 90_000]


@pytest.mark.parametrize("u", [0.0, 0.3, 1 - 2.0**-53])
def test_degenerate_filters_reduce_to_greedy(u: float) -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.standard_normal((8, 777)).astype(np.float32))
    best = greedy_tokens(logits).tolist()
    rows, same = list(range(8)), [u] * 8
    assert sample_tokens(logits, batch_of(rows, [1.0] * 8, [1] * 8, uniform=same)).tolist() == best
    assert sample_tokens(logits, batch_of(rows, [1.0] * 8, None, [1e-9] * 8, same)).tolist() == best
    assert sample_tokens(logits, batch_of(rows, [1.0] * 8, None, [5e-324] * 8, same)).tolist() == best
    for temperature in (1e-6, 1e-38, 1e-45, 5e-324):
        assert sample_tokens(logits, batch_of(rows, [temperature] * 8, uniform=same)).tolist() == best
    # A top-k beyond the vocabulary is no filter.
    free = sample_tokens(logits, batch_of(rows, [1.0] * 8, uniform=same))
    assert torch.equal(sample_tokens(logits, batch_of(rows, [1.0] * 8, [10_000] * 8, uniform=same)), free)


def test_huge_temperature_is_uniform_over_possible_tokens() -> None:
    logits = torch.tensor([[5.0, float("-inf"), -3.0, 80.0, float("-inf")]])
    for temperature in (1e9, 1e38, 1e300):
        tokens = [
            sample_tokens(logits, batch_of([0], [temperature], uniform=[u])).item() for u in (0.0, 0.32, 0.34, 0.7)
        ]
        assert tokens == [0, 0, 2, 3], temperature


def test_extreme_u_stays_on_possible_tokens() -> None:
    """u = 0 must not pick an impossible first token, u just below 1 not an impossible last one."""
    logits = torch.full((1, 1000), -100.0)
    logits[0, 400:600] = torch.linspace(0, 1, 200)
    for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.9)):
        for u in (0.0, 5e-324, 1 - 2.0**-53):
            token = sample_tokens(logits, batch_of([0], [0.5], [top_k], [top_p], [u])).item()
            assert 400 <= token < 600
    assert sample_tokens(logits, batch_of([0], [0.5], uniform=[0.0])).item() == 400
    assert sample_tokens(logits, batch_of([0], [0.5], uniform=[1 - 2.0**-53])).item() == 599


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_finite_maximum_are_marked(bad: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    logits[1, 17] = bad
    logits[3] = float("-inf")
    assert [t == -1 for t in greedy_tokens(logits).tolist()] == [False, True, False, True]
    for top_k in (0, 5):
        tokens = sample_tokens(logits, batch_of([0, 1, 2, 3], [1.0] * 4, [top_k] * 4)).tolist()
        assert [t == -1 for t in tokens] == [False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_equal_their_float32_upcast(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(6)
    logits, batch = random_cases(rng, 50, 300)
    low = torch.from_numpy(logits).to(dtype)
    batch.temperature[::3] = 0
    assert torch.equal(sample_tokens(low, batch), sample_tokens(low.float(), batch))


def test_logits_are_left_alone() -> None:
    logits, batch = random_cases(np.random.default_rng(7), 20, 100)
    tensor = torch.from_numpy(logits.copy())
    sample_tokens(tensor, batch)
    assert np.array_equal(tensor.numpy(), logits)


# --- the uniform numbers ---------------------------------------------------------------------------------------


def splitmix64_reference(state: int) -> int:
    """SplitMix64's output function in plain Python integers."""
    mask = (1 << 64) - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_splitmix64_matches_the_published_stream() -> None:
    """First outputs of SplitMix64 seeded with 1234567, as listed for the reference implementation in C."""
    golden = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64_reference(1234567 + (i + 1) * golden) for i in range(4)] == published


def test_uniforms_equal_plain_integer_arithmetic() -> None:
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    seeds = [0, 1, -1, 2**63, 2**64 + 5, 10**30, 42]
    indices = [0, 0, 1, 2, 3, 4, 1000]
    positions = [0, 5, 7, 0, 100_000, 1, 2]
    expected = []
    for s, i, k in zip(seeds, indices, positions, strict=True):
        start = splitmix64_reference(splitmix64_reference((s & mask) + golden) ^ splitmix64_reference(i * golden))
        expected.append((splitmix64_reference(start + (k + 1) * golden) >> 11) * 2.0**-53)
    assert uniforms(seeds, indices, positions).tolist() == expected


def test_uniforms_do_not_depend_on_their_batch() -> None:
    n = 100
    whole = uniforms(range(n), range(n), range(n))
    assert whole.tolist() == [uniforms([i], [i], [i])[0] for i in range(n)]
    assert len(set(whole.tolist())) == n


@pytest.mark.parametrize("axis", ["seed", "sample", "position"])
def test_neighbours_are_independent(axis: str) -> None:
    """Along each axis: flat in 64 bins, and pairs of neighbours flat in 8 x 8 bins. Fixed draws, 5 sigma."""
    n = 40_000
    fixed, moving = [5] * n, range(n)
    u = uniforms(
        moving if axis == "seed" else fixed,
        moving if axis == "sample" else fixed,
        moving if axis == "position" else fixed,
    )
    assert 0 <= u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1
    singles = np.bincount((u * 64).astype(int), minlength=64)
    pairs = np.bincount((u[:-1] * 8).astype(int) * 8 + (u[1:] * 8).astype(int), minlength=64)
    for counts in (singles, pairs):
        chi2 = ((counts - counts.sum() / 64) ** 2 / (counts.sum() / 64)).sum()
        assert abs(chi2 - 63) < 5 * np.sqrt(2 * 63), chi2
