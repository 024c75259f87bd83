"""Calling what belongs to somebody else: an error in there is his, and must not break the books of all the others."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any


def harmless(name: str, function: Callable[..., object]) -> Callable[..., None]:
    """``function`` without its errors: they become warnings."""

    def call(*args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            complain(name, error)

    return call


def complain(who: str, error: BaseException) -> None:
    try:
        warnings.warn(f"{who} raised {type(error).__name__}: {error}", stacklevel=1)
    except Warning:  # whoever turned warnings into errors gets them where no thread dies of it
        traceback.print_exception(error)
