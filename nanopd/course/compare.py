"""Comparisons that say what is wrong: the first differing place, what was expected there, what was found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class Wrong(Exception):
    """A check found a wrong answer; the message is written for the learner."""


def as_array(value: Any) -> np.ndarray:
    """A NumPy copy of a torch tensor (any dtype, any device), an array, a number or a nested list."""
    if hasattr(value, "detach"):  # a torch tensor; NumPy has no bfloat16, and float64 holds every float exactly
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
        value = value.numpy()
    try:
        return np.asarray(value)
    except ValueError as error:
        raise Wrong(f"expected numbers in a regular shape, got {describe(value)} ({error})") from None


def describe(value: Any) -> str:
    """A short account of a value: its type and shape, or the value itself when it is small."""
    if value is None:
        return "None (is a `return` missing?)"
    if hasattr(value, "shape") and len(value.shape) > 0:
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__}: {text[:57]}..."


def expect_equal(got: Any, want: Any, where: str) -> None:
    """Exact equality of integers, strings, lists, or arrays of integers. ``where`` names the case in words.

    Raises:
        Wrong: with the first differing index.
    """
    if isinstance(want, list | tuple) and not _is_numeric(want):
        _expect_equal_items(got, want, where)
    elif isinstance(want, str | bytes | bool | None | dict | set):
        if got != want:
            raise Wrong(f"{where}: expected {want!r}, got {describe(got)}")
    else:
        expect_close(got, want, where, atol=0.0, rtol=0.0)


def expect_close(got: Any, want: Any, where: str, *, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    """Equality of shape, and of each element within ``atol + rtol * |want|``. NaN and infinity must match.

    Raises:
        Wrong: with the shapes when they differ, else the first differing index, and how many differ in all.
    """
    if got is None or got is Ellipsis or isinstance(got, str):
        raise Wrong(f"{where}: expected {describe(want)}, got {describe(got)}")
    expected, found = as_array(want), as_array(got)
    if found.dtype == object:
        raise Wrong(f"{where}: expected numbers, got {describe(got)}")
    if expected.shape != found.shape:
        raise Wrong(f"{where}: expected shape {expected.shape}, got {found.shape}")
    close = np.isclose(found.astype(float), expected.astype(float), atol=atol, rtol=rtol, equal_nan=True)
    if close.all():
        return
    index = tuple(int(i) for i in np.argwhere(~close)[0])
    at = f"first difference at index {index if len(index) != 1 else index[0]}, " if index else ""
    expected_text, found_text = _number(expected[index]), _number(found[index])
    count = f" ({int((~close).sum())} of {close.size} elements differ)" if close.size > 1 else ""
    raise Wrong(
        f"{where}: {at}expected {expected_text}, got {found_text}{count}{_ratio(expected[index], found[index])}"
    )


def _expect_equal_items(got: Any, want: list | tuple, where: str) -> None:
    if not isinstance(got, list | tuple):
        raise Wrong(f"{where}: expected a {type(want).__name__} of {len(want)} items, got {describe(got)}")
    for index, (found, expected) in enumerate(zip(got, want, strict=False)):
        if found != expected:
            raise Wrong(f"{where}: first difference at index {index}, expected {expected!r}, got {found!r}")
    if len(got) != len(want):
        raise Wrong(f"{where}: expected {len(want)} items, got {len(got)}; the first {min(len(got), len(want))} agree")


def _is_numeric(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "iufb"
    except ValueError:
        return False


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)


def _ratio(expected: Any, found: Any) -> str:
    """A factor of exactly 2, 1/2, 1000... is the best hint there is: a forgotten byte count, head count or unit."""
    if not (np.isfinite(expected) and np.isfinite(found)) or expected == 0 or found == 0:
        return ""
    ratio = float(found) / float(expected)
    for factor in (2, 3, 4, 8, 1000, 1024, 1e6):
        if math.isclose(ratio, factor, rel_tol=1e-6):
            return f"; that is {factor:g} times too much"
        if math.isclose(ratio, 1 / factor, rel_tol=1e-6):
            return f"; that is {factor:g} times too little"
    return "; the sign is wrong" if math.isclose(ratio, -1, rel_tol=1e-6) else ""
