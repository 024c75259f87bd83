"""The course: exercises with precise checks, progress, translation of the texts, numbers in prose, ``%%cuda``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.course.exercise import CheckResult, Exercise, Mistake, Wrong, expect_close, expect_equal

__all__ = ["CheckResult", "Exercise", "Mistake", "Wrong", "expect_close", "expect_equal"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("nanopd.course.exercise"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nanopd.course``: adds the ``%%cuda`` cell magic."""
    importlib.import_module("nanopd.course.magic").register(shell)
