"""Binding a worker's thread to CPU cores: on the CPU what an SM partition is on a GPU.

Linux binds each thread on its own, and threads that PyTorch starts for its operators inherit the cores of the thread
that starts them. macOS has no such call, and Windows none in Python: there only the number of threads is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from nanopd.errors import ConfigError
from nanopd.workers.spec import DeviceSpec


def can_bind() -> bool:
    """Whether this system binds a thread to cores."""
    return hasattr(os, "sched_setaffinity")


def usable_cores() -> frozenset[int] | None:
    """Cores that the calling thread may use; None where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if can_bind() else None


@contextmanager
def apply(spec: DeviceSpec) -> Iterator[None]:
    """Bind the calling thread to ``spec.cores``, and let torch's operators use no more threads than there are cores.

    Call it in the worker's own thread, before torch computes anything there: OpenMP keeps the number of threads per
    calling thread, so workers do not disturb each other. Nothing happens without cores. Cores and number of threads
    are as before afterwards.

    Raises ConfigError if the system refuses: such a core does not exist, or this process may not use it.
    """
    if spec.cores is None:
        yield
        return
    import torch

    before, num_threads = usable_cores(), torch.get_num_threads()
    if can_bind():
        try:
            os.sched_setaffinity(0, spec.cores)  # 0: this thread, not the whole process
        except OSError as error:
            raise ConfigError(f"cannot bind a worker to the cores of {spec}: {error}") from error
    torch.set_num_threads(min(len(spec.cores), num_threads))  # fewer still if the user said so (OMP_NUM_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        if before is not None:
            os.sched_setaffinity(0, before)
