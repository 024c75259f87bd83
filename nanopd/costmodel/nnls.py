"""Least squares with non-negative coefficients.

The active-set method of Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23. A time is a sum of
costs, and a cost below zero has no meaning: without the constraint a fit buys a little accuracy on its points with
terms that turn negative outside of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nnls(matrix: Array, target: Array) -> Array:
    """argmin ‖matrix · x − target‖ over x ≥ 0.

    Args:
        matrix: [m, n] float64. Columns are scaled to unit length inside, so their units do not matter; a column of
            zeros gets 0.
        target: [m] float64.

    Returns: [n] float64.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    a = matrix / scale
    n = a.shape[1]
    x = np.zeros(n)
    free = np.zeros(n, dtype=bool)  # the coefficients that are not held at zero
    tolerance = 1e-12 * max(1.0, float(np.linalg.norm(target)))
    for _ in range(3 * n + 10):  # each round frees one coefficient; the bound only stops rounding from cycling
        gradient = a.T @ (target - a @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        x = _feasible(a, target, x, free)
    return x / scale


def _feasible(a: Array, target: Array, x: Array, free: NDArray[np.bool_]) -> Array:
    """Solve for the ``free`` coefficients; those that come out at or below zero are held there (``free`` changes)."""
    while free.any():
        solution = np.zeros_like(x)
        solution[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
        blocking = free & (solution <= 0)
        if not blocking.any():
            return solution
        # As far as possible from x towards the solution, until the first coefficient reaches zero.
        steps = x[blocking] / np.maximum(x[blocking] - solution[blocking], 1e-300)
        x = x + steps.min() * (solution - x)
        free &= x > 1e-15
        x[~free] = 0.0
    return np.zeros_like(x)
