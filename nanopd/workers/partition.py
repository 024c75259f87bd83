"""SM partitions: one GPU cut into parts that run side by side, each on multiprocessors of its own.

CUDA calls such a part a green context. A kernel runs where its *stream* belongs, whatever context the launching thread
has, so a worker needs nothing but the partition's stream: ``with torch.cuda.stream(partition.stream)`` in its thread.
CUDA graphs captured on that stream keep its SMs. Memory is the device's: all partitions see all tensors.

One call makes all partitions of a device: the driver splits the SMs once, into disjoint groups.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

from nanopd.errors import ConfigError, CudaUnavailableError
from nanopd.ops.compiler import require_cuda_core
from nanopd.ops.launch import ensure_context

# Whom to tell cuBLAS their number of SMs. On an H200, products on 32, 48 and 64 SMs gain 5 to 20 % by it, but on 68, 84
# and 100 they lose 5 to 30 %: cuBLAS then rounds down to what its clusters divide. A prefill that is slowed down so
# leaves more of the memory's bandwidth to the decodes beside it, whose worst gaps then stay nearer to their best ones,
# and that is what partitions are for: hence "always" unless told otherwise.
BlasHint = Literal["always", "groups", "never"]
BLAS_GROUP = 8  # SMs
Made = tuple[Any, Any]  # green context and stream


class Retired:
    """Contexts and streams of closed partitions, whole splits of one device, for reuse.

    The one piece of state that outlives its owners in this package, for the reason that ``SmPartition.close`` gives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._splits: dict[tuple[int, tuple[int, ...]], list[list[Made]]] = {}

    def take(self, index: int, counts: Sequence[int]) -> list[Made] | None:
        with self._lock:
            splits = self._splits.get((index, tuple(counts)))
            return splits.pop() if splits else None

    def collector(self, index: int, counts: Sequence[int]) -> Callable[[int, Made], None]:
        """Gets partition number i of a split when it is closed; when all are closed the split can be taken again."""
        returned: dict[int, Made] = {}

        def collect(number: int, made: Made) -> None:
            with self._lock:
                returned[number] = made
                if len(returned) == len(counts):
                    whole = [returned[i] for i in range(len(counts))]
                    self._splits.setdefault((index, tuple(counts)), []).append(whole)

        return collect


_retired = Retired()


class SmPartition:
    """Some of a GPU's SMs, and a stream whose work runs on these only.

    Attributes:
        device: the GPU.
        num_sms: how many SMs.
        stream: non-blocking; usable wherever torch takes a stream. ``torch.cuda.synchronize`` waits for torch's own
            context and not for it: ``stream.synchronize()`` does.
        blas_hint: see ``BlasHint``.
    """

    def __init__(
        self,
        device: torch.device,
        num_sms: int,
        context: Any,
        stream: Any,
        on_close: Callable[[Made], None],
        blas_hint: BlasHint = "always",
    ) -> None:
        """``context``, ``stream``: a cuda.core green context and a stream of it; ``on_close`` gets them back."""
        self.device = device
        self.num_sms = num_sms
        self._context: Any = context
        self._stream: Any = stream  # torch only borrows the handle
        self._on_close = on_close
        self.blas_hint = blas_hint
        self.stream = torch.cuda.ExternalStream(int(stream.handle), device=device)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """What a worker's thread does first: make the stream current, and tell cuBLAS how many SMs it will find."""
        told = self.blas_hint == "always" or (self.blas_hint == "groups" and self.num_sms % BLAS_GROUP == 0)
        with torch.cuda.stream(self.stream), blas_sms(self.num_sms) if told else nullcontext():
            yield

    def close(self) -> None:
        """Wait for the stream's work and leave the SMs to others. Idempotent; graphs captured on it end with it.

        Context and stream are not destroyed but kept for the next partition of this size: torch's caches of pinned and
        device memory remember each stream that used a piece of it, and ask that stream when the piece is freed,
        maybe much later. (So torch does not destroy its own streams either.)
        """
        if self._context is None:
            return
        self.stream.synchronize()
        kept, self._context, self._stream = (self._context, self._stream), None, None
        self._on_close(kept)

    def __repr__(self) -> str:
        return f"SmPartition({self.num_sms} SMs of {self.device}{'' if self._context is not None else ', closed'})"


def partition_device(
    device: torch.device | str, counts: Sequence[int], *, blas_hint: BlasHint = "always"
) -> list[SmPartition]:
    """Cut a GPU into partitions of ``counts`` SMs, in this order. SMs that nobody asked for stay idle.

    The driver hands SMs out in groups (8 on sm_90, 2 before): every count but one must be a multiple of that. The one
    that is not gets what is left over by groups, so it must differ from all SMs of the device by whole groups.

    Raises:
        ConfigError: counts that are impossible on this GPU; the message names possible ones.
        CudaUnavailableError: no such GPU, no cuda-core, or a driver without green contexts (older than 12.4).
    """
    device = _resolve(device)
    core = require_cuda_core()
    made: list[Made] = []
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # creates torch's context
        again = _retired.take(device.index, counts)
        if again is not None:
            return _partitions(device, counts, again, blas_hint)
        gpu = core.Device(device.index)
        gpu.set_current()
        try:
            whole = gpu.resources.sm
            plan = plan_split(counts, whole.sm_count, whole.coscheduled_alignment, whole.min_partition_size)
            resources = split_sms(whole, plan, core.SMResourceOptions)[: len(counts)]  # the last may be set aside
            for wanted, parts in zip(counts, resources, strict=True):
                if sum(part.sm_count for part in parts) != wanted:
                    got = [sum(part.sm_count for part in parts) for parts in resources]
                    raise ConfigError(f"{list(counts)} SMs of {device}: the driver's nearest split is {got}")
            for parts in resources:
                context = gpu.create_context(core.ContextOptions(resources=parts))
                made.append((context, context.create_stream()))
            return _partitions(device, counts, made, blas_hint)
        except ConfigError:
            raise
        except Exception as error:  # NotImplementedError of an old driver, or one of several CUDA error types
            for context, stream in made:  # torch has not seen these
                stream.close()
                context.close()
            raise CudaUnavailableError(
                f"cannot cut {device} into partitions of {list(counts)} SMs: {type(error).__name__}: {error}"
            ) from error


def plan_split(counts: Sequence[int], total: int, group: int, least: int) -> list[int | None]:
    """Which partitions are made of whole groups: the counts, with None for the one that gets the rest of the device.

    The result may end with an extra count: SMs to be set aside so that the rest comes out right.

    Args:
        total: SMs of the device.
        group: SMs per group; ``least``: SMs that a partition has at least.

    Raises ConfigError.
    """
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"a partition has at least 1 SM, got {count!r}")
    possible = _possible(total, group, least)
    if sum(counts) > total:
        raise ConfigError(f"{' + '.join(map(str, counts))} SMs were asked for, the device has {total}; {possible}")
    odd = [count for count in counts if count % group]
    spare = total - sum(counts)
    if min(counts, default=least) < least or len(odd) > 1 or (odd and spare % group):
        raise ConfigError(f"partitions of {', '.join(map(str, counts))} SMs are not possible; {possible}")
    if not odd:
        return list(counts)
    return [None if count % group else count for count in counts] + ([spare] if spare else [])


@contextmanager
def blas_sms(num_sms: int) -> Iterator[bool]:
    """Let cuBLAS plan this thread's matrix products for ``num_sms`` SMs instead of all of the device's.

    cuBLAS asks the device and not the stream, and a kernel laid out for 132 SMs takes two unequal rounds on 84. torch
    has a setting for the whole process only (``torch._C._set_sm_carveout_experimental``), but each of its threads has
    a cuBLAS handle of its own, and the target belongs to the handle. CUDA graphs keep the kernels chosen at capture.

    Yields whether cuBLAS was found and took it; it is a hint, and results do not depend on it.
    """
    ensure_context(torch.cuda.current_device())  # a thread that has done nothing yet has none, and torch would warn
    handle, blas = torch.cuda.current_blas_handle(), _cublas()
    done = blas is not None and blas.cublasSetSmCountTarget(ctypes.c_void_p(handle), num_sms) == 0
    try:
        yield done
    finally:
        if done and blas is not None:
            blas.cublasSetSmCountTarget(ctypes.c_void_p(handle), 0)  # the handle goes to another thread after this one


def _cublas() -> ctypes.CDLL | None:
    """The library that torch has loaded: the loader finds it by its name."""
    major = (torch.version.cuda or "").partition(".")[0]
    for name in (f"libcublas.so.{major}", f"cublas64_{major}.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def split_sms(whole: Any, plan: Sequence[int | None], options: Any) -> list[list[Any]]:
    """SM resources for each entry of the plan, all from one split: a green context takes several of such.

    Args:
        whole: all of the device (``cuda.core.SMResource``).
        plan: see ``plan_split``.
        options: makes the split's options (``cuda.core.SMResourceOptions``).

    Raises ConfigError if the driver makes fewer groups.
    """
    sizes = [size for size in plan if size is not None]
    if not sizes:
        return [[whole]]
    try:
        groups, rest = whole.split(options(count=sizes))
        taken = [[group] for group in groups]
    except (NotImplementedError, RuntimeError):  # before CUDA 13.1 groups are of one size: small ones, several each
        unit = math.gcd(*sizes)
        groups, rest = whole.split(options(count=[unit] * (sum(sizes) // unit)))
        if len(groups) * unit < sum(sizes):
            raise ConfigError(f"the driver makes only {len(groups)} groups of {unit} SMs, for {sizes}") from None
        spare = iter(groups)
        taken = [[next(spare) for _ in range(size // unit)] for size in sizes]
    if len(taken) < len(sizes):
        raise ConfigError(f"the driver makes only {len(taken)} partitions of {sizes[0]} SMs, not {len(sizes)}")
    given = iter(taken)
    return [[rest] if size is None else next(given) for size in plan]


def _partitions(
    device: torch.device, counts: Sequence[int], made: Sequence[Made], blas_hint: BlasHint
) -> list[SmPartition]:
    collect = _retired.collector(device.index, counts)
    return [
        SmPartition(device, count, *one, partial(collect, number), blas_hint)
        for number, (count, one) in enumerate(zip(counts, made, strict=True))
    ]


def _possible(total: int, group: int, least: int) -> str:
    first = -(-least // group) * group
    rest = "" if total % group == 0 else f", and for one of them the rest: {total} less a multiple of {group}"
    return f"possible counts are {first}, {first + group}, {first + 2 * group}, … (multiples of {group}){rest}"


def _resolve(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type != "cuda":
        raise ConfigError(f"only a GPU has SMs to divide, {device} is none")
    if not torch.cuda.is_available():
        raise CudaUnavailableError(f"{device} was to be divided, but torch {torch.__version__} sees no CUDA GPU")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise CudaUnavailableError(f"device {device} was asked for, and there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)
