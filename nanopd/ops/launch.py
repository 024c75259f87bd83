"""Launching a compiled kernel on torch's stream, with as little Python as possible.

A step launches about ten kernels per layer, so overhead counts wherever no CUDA graph removes it. Four things keep it
low: launch configurations and stream objects are built once and kept (wrapping a stream anew costs 7 µs a launch),
tensors are passed as plain addresses, integers are passed as they are (below), and a launch that will be repeated on
other tensors is prepared once (``Kernel.prepare``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopd.errors import CudaUnavailableError, KernelLaunchError, UnsupportedShapeError

Dim = int | tuple[int, ...]

# A launch on the tensors that are passed; None is a null pointer, a tensor map is passed on. Nothing is checked.
Launch = Callable[..., None]

# What a kernel gets without further attributes, static shared memory included. More must be requested per kernel.
_DEFAULT_SHARED_BYTES = 48 * 1024


def no_launch(*tensors: Tensor | None) -> None:
    """The launch of a kernel that has nothing to do."""


def ensure_context(index: int) -> None:
    """Give this thread a CUDA context if it has none: the device's primary one, which torch uses.

    torch makes it current only with its first own call in a thread. A context that is current stays, be it the primary
    one or that of an SM partition.
    """
    from cuda.bindings import driver
    from cuda.core import Device

    status, context = driver.cuCtxGetCurrent()
    if status != driver.CUresult.CUDA_SUCCESS or int(context) == 0:
        Device(index).set_current()


class Kernel:
    """One kernel, loaded on one device.

    ``kernel(grid, block, *args, shared=0, stream=None)`` launches it. Arguments by type:

    * torch tensor: address of its first element. Strides are not passed on, the caller passes those it needs as ints.
    * int: fits ``int`` and ``long long`` parameters alike. It is stored as 8 little-endian bytes, and the driver
      copies as many as the parameter is wide, so the conversion that would tell them apart is not needed.
    * float: ``float``. Use ``np.float64(x)`` for a ``double`` parameter.
    * None: a null pointer.
    * numpy and ctypes scalars, tensor maps: as they are.

    Launches are asynchronous. A launch that the driver refuses raises ``KernelLaunchError``.
    """

    def __init__(self, cubin: bytes, function: str, device: torch.device) -> None:
        from cuda.core import LaunchConfig, ObjectCode, Stream, launch

        if device.type != "cuda" or device.index is None:
            raise CudaUnavailableError(f"a kernel is loaded on a CUDA device with an index, not on {device}")
        self.name = function
        self.device = device
        self._index = device.index
        self._make_config, self._launch, self._wrap_stream = LaunchConfig, launch, Stream.from_handle
        self._configs: dict[tuple[Dim, Dim, int, bool], Any] = {}
        self._streams: dict[int, Any] = {}
        with torch.cuda.device(device):
            ensure_context(self._index)
            self._can_overlap = torch.cuda.get_device_capability(device) >= (9, 0)
            self._code = ObjectCode.from_cubin(cubin, name=function)  # owns the loaded library
            try:
                self._kernel = self._code.get_kernel(function)
            except Exception as error:
                raise KernelLaunchError(f'no extern "C" kernel named {function!r} in this module: {error}') from error
            self._load_now()
            attributes = self._kernel.attributes[self._index]
            self.num_registers: int = attributes.num_regs
            self.local_bytes: int = attributes.local_size_bytes  # per thread; non-zero means registers spill
            self.static_shared_bytes: int = attributes.shared_size_bytes
            self.max_threads_per_block: int = attributes.max_threads_per_block
        self._shared_limit = _DEFAULT_SHARED_BYTES - self.static_shared_bytes
        # torch's private accessor costs 0.05 µs; torch.cuda.current_stream().cuda_stream costs over 1 µs.
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice

    def _load_now(self) -> None:
        """Put the code on the GPU. CUDA would do so at the first launch, which may stand in a graph's capture."""
        from cuda.bindings import driver

        status, function = driver.cuKernelGetFunction(self._kernel.handle)
        if status == driver.CUresult.CUDA_SUCCESS:
            (status,) = driver.cuFuncLoad(function)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelLaunchError(f"kernel {self.name} cannot be loaded on {self.device}: {status.name}")

    def __call__(
        self, grid: Dim, block: Dim, *args: Any, shared: int = 0, stream: Any = None, overlap: bool = False
    ) -> None:
        """Launch on ``stream`` (a torch or cuda.core stream), or on torch's current stream of the kernel's device.

        Args:
            grid, block: int or tuple of up to three.
            shared: bytes of dynamic shared memory. More than 48 KiB is requested from the driver as needed.
            overlap: the kernel may start before the previous one has ended: it waits where it must (csrc/overlap.cuh).
                Has no effect before sm_90.

        Raises:
            KernelLaunchError: the driver refused the launch, or a dimension is out of range.
            UnsupportedShapeError: a tensor that is not on a CUDA device, whose address would crash the kernel.
        """
        config = self._config(grid, block, shared, overlap)
        values = [self._convert(arg) for arg in args]
        if stream is None:
            raw = self._raw_stream(self._index)
        else:
            raw = stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else int(stream.handle)
        self._enqueue(self._stream(raw), config, values)

    def prepare(self, grid: Dim, block: Dim, *scalars: Any, shared: int = 0, overlap: bool = False) -> Launch:
        """Fix everything but the tensors, which are the kernel's first parameters; ``scalars`` are the others.

        Returns: a launch on the stream that is current now. It costs little more than the driver's part. It does not
            look at the tensors: that they are of this device and of the sizes that ``scalars`` say is up to the caller.

        Raises:
            KernelLaunchError: a dimension is out of range. The launch itself raises it if the driver refuses.
        """
        config, stream = self._config(grid, block, shared, overlap), self._stream(self._raw_stream(self._index))
        enqueue, constants = self._enqueue, [self._convert(scalar) for scalar in scalars]

        def launch(*tensors: Any) -> None:
            enqueue(stream, config, [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in tensors] + constants)

        return launch

    def _enqueue(self, stream: Any, config: Any, values: list[Any]) -> None:
        try:
            if self._current_device() == self._index:
                self._launch(stream, config, self._kernel, *values)
            else:
                with torch.cuda.device(self._index):
                    self._launch(stream, config, self._kernel, *values)
        except Exception as error:
            if "INVALID_CONTEXT" in str(error):  # this thread has touched no GPU yet, so it has no context
                self._launch_in_new_thread(stream, config, values)
                return
            raise KernelLaunchError(f"launch of {self.name} with {config}: {error}") from error

    @staticmethod
    def _convert(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            if not arg.is_cuda:
                raise UnsupportedShapeError(f"a kernel argument lies on {arg.device}; a CUDA tensor is needed")
            return arg.data_ptr()
        if type(arg) is float:
            return np.float32(arg)
        return 0 if arg is None else arg

    def _config(self, grid: Dim, block: Dim, shared: int, overlap: bool) -> Any:
        config = self._configs.get((grid, block, shared, overlap))
        return self._new_config(grid, block, shared, overlap) if config is None else config

    def _new_config(self, grid: Dim, block: Dim, shared: int, overlap: bool) -> Any:
        grid_dims = (grid,) if isinstance(grid, int) else tuple(grid)
        block_dims = (block,) if isinstance(block, int) else tuple(block)
        if min(*grid_dims, *block_dims, shared + 1) < 1:
            raise self._launch_error(grid, block, shared, "every dimension must be at least 1")
        threads = int(np.prod(block_dims))
        if threads > self.max_threads_per_block:
            limit = f"a block of {threads} threads exceeds this kernel's limit of {self.max_threads_per_block}"
            raise self._launch_error(grid, block, shared, limit)
        if shared > self._shared_limit:
            self._allow_shared(grid, block, shared)
        try:
            config = self._make_config(
                grid=grid_dims,
                block=block_dims,
                shmem_size=shared,
                programmatic_stream_serialization=overlap and self._can_overlap,
            )
        except Exception as error:
            raise self._launch_error(grid, block, shared, error) from error
        self._configs[(grid, block, shared, overlap)] = config
        return config

    def _allow_shared(self, grid: Dim, block: Dim, shared: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, shared, self._kernel.handle, self._index)
        if status != driver.CUresult.CUDA_SUCCESS:
            properties: Any = torch.cuda.get_device_properties(self.device)
            limit = properties.shared_memory_per_block_optin
            reason = f"{shared} bytes of dynamic shared memory refused ({status.name}); a block may have {limit} in all"
            raise self._launch_error(grid, block, shared, reason)
        self._shared_limit = shared

    def _stream(self, raw: int) -> Any:
        wrapped = self._streams.get(raw)
        return self._new_stream(raw) if wrapped is None else wrapped

    def _new_stream(self, raw: int) -> Any:
        from cuda.core import LEGACY_DEFAULT_STREAM

        # Handle 0 is CUDA's name for the legacy default stream, which cuda.core has as a ready object.
        wrapped = LEGACY_DEFAULT_STREAM if raw == 0 else self._wrap_stream(raw)
        self._streams[raw] = wrapped
        return wrapped

    def _launch_in_new_thread(self, wrapped: Any, config: Any, values: list[Any]) -> None:
        ensure_context(self._index)
        try:
            self._launch(wrapped, config, self._kernel, *values)
        except Exception as error:
            raise KernelLaunchError(f"launch of {self.name} failed: {error}") from error

    def _launch_error(self, grid: Dim, block: Dim, shared: int, reason: object) -> KernelLaunchError:
        return KernelLaunchError(f"launch of {self.name} with grid {grid}, block {block}, shared {shared}: {reason}")

    def __repr__(self) -> str:
        return (
            f"Kernel({self.name} on {self.device}: {self.num_registers} registers, {self.local_bytes} bytes spilled, "
            f"{self.static_shared_bytes} bytes static shared memory)"
        )
