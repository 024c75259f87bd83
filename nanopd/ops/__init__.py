"""Kernels behind one interface: a PyTorch reference and CUDA kernels compiled at run time.

Importing this package imports nothing heavy; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.ops.compiler import Kernel, KernelLibrary, compile_source
    from nanopd.ops.interface import Ops
    from nanopd.ops.reference import ReferenceOps
    from nanopd.ops.select import get_ops

__all__ = ["Kernel", "KernelLibrary", "Ops", "ReferenceOps", "compile_source", "get_ops"]

_HOME = {
    "Kernel": "compiler",
    "KernelLibrary": "compiler",
    "Ops": "interface",
    "ReferenceOps": "reference",
    "compile_source": "compiler",
    "get_ops": "select",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
