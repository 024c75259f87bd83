"""Student's t distribution in plain Python: what a posterior predictive needs, without scipy."""

from __future__ import annotations

import math
from statistics import NormalDist

from nanopd.costmodel.checks import is_number, shown
from nanopd.errors import ConfigError

_NORMAL = NormalDist()
_FRACTION_TERMS = 400  # the continued fraction takes some sqrt(dof) terms; this only bounds a loop
_NEARLY_NORMAL = 1e4  # degrees of freedom from which the normal approximation is right to 1e-8


def t_pdf(x: float, dof: float) -> float:
    """Density at ``x`` with ``dof`` > 0 degrees of freedom."""
    log_norm = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    return math.exp(log_norm - (dof + 1) / 2 * math.log1p(x * x / dof))


def t_cdf(x: float, dof: float) -> float:
    """P(T <= x): through the incomplete beta function, I_{dof/(dof+x²)}(dof/2, 1/2) / 2 in the tail.

    From 10,000 degrees of freedom on by the normal approximation 26.7.8 of Abramowitz & Stegun.
    """
    if dof >= _NEARLY_NORMAL:
        return _NORMAL.cdf(x * (1 - 0.25 / dof) / math.sqrt(1 + x * x / (2 * dof)))
    tail = 0.5 * _incomplete_beta(dof / 2, 0.5, dof / (dof + x * x))
    return 1.0 - tail if x > 0 else tail


def t_quantile(p: float, dof: float) -> float:
    """The x with P(T <= x) = ``p``.

    Starts at Cornish and Fisher's expansion around the normal quantile (Abramowitz & Stegun 26.7.5) and refines by
    Newton steps that a bracket keeps from running away. Raises ConfigError unless 0 < p < 1 and dof > 0.
    """
    if not (is_number(p) and 0.0 < p < 1.0):
        raise ConfigError(f"a quantile's probability must be in (0, 1), got {shown(p)}")
    if not dof > 0.0:
        raise ConfigError(f"degrees of freedom must be positive, got {dof!r}")
    if p < 0.5:
        return -t_quantile(1.0 - p, dof)
    if p == 0.5:
        return 0.0
    low, high = 0.0, _bracket(p, dof)
    x = min(max(_cornish_fisher(_NORMAL.inv_cdf(p), dof), low), high)
    for _ in range(100):
        error = t_cdf(x, dof) - p
        low, high = (x, high) if error < 0 else (low, x)
        step = x - error / t_pdf(x, dof)
        new = step if low < step < high else (low + high) / 2
        if abs(new - x) <= 1e-12 * (1.0 + abs(x)):
            return new
        x = new
    return x


def _bracket(p: float, dof: float) -> float:
    high = 2.0
    while t_cdf(high, dof) < p:
        high *= 4
    return high


def _cornish_fisher(z: float, dof: float) -> float:
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / dof + second / dof**2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised I_x(a, b), by the continued fraction of DLMF 8.17.22 on the side where it converges fast."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) / a * _continued_fraction(a, b, x)


def _continued_fraction(a: float, b: float, x: float) -> float:
    """1 / (1 + d1/(1 + d2/(1 + ...))), evaluated forwards (the modified Lentz method)."""
    tiny = 1e-300
    value = c = 1.0
    d = 0.0
    for k in range(_FRACTION_TERMS):
        m = k // 2
        if k == 0:
            numerator = 1.0
        elif k % 2:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / ((1.0 + numerator * d) or tiny)
        c = (1.0 + numerator / c) or tiny
        value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value - 1.0
