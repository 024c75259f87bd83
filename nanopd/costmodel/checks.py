"""Checks of the numbers that models, policies, loads and simulations are made of. No torch.

A bool is no number here, and an int that no float can hold is as bad as an infinity: both are slips of the pen.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, TypeGuard

from nanopd.errors import ConfigError


def is_number(value: Any) -> TypeGuard[float]:
    """An int or float, also NumPy's, that is finite as a float, and no bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits
        return False


def check_number(name: str, value: Any, *, least: float = 0.0, above: float | None = None, unit: str = "") -> None:
    """Raise ConfigError, naming value and limit, unless ``value`` is finite and >= ``least`` (or > ``above``)."""
    if not is_number(value) or (value < least if above is None else value <= above):
        limit = f">= {least:g}" if above is None else f"> {above:g}"
        raise ConfigError(f"{name} must be a finite number {f'of {unit} ' if unit else ''}{limit}, got {shown(value)}")


def check_count(name: str, value: Any, *, least: int = 0, most: int | None = None) -> None:
    """Raise ConfigError, naming value and limit, unless ``value`` is an int in [``least``, ``most``] and no bool."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigError(f"{name} must be an int >= {least}, got {shown(value)}")
    if most is not None and int(value) > most:
        raise ConfigError(f"{name} must be at most {most:,}, got {shown(value)}")


def shown(value: Any) -> str:
    """``repr(value)`` for a message: a value of a thousand digits is cut."""
    try:
        text = repr(value)
    except ValueError:  # an int that Python refuses to write
        text = f"an int of {value.bit_length()} bits"
    return text if len(text) <= 60 else f"{text[:57]}..."
