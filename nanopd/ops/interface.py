"""What every implementation of the kernels offers.

Shapes: T tokens of this step, B sequences, Hq query heads, Hkv key/value heads (Hq is a multiple of Hkv), D head
dimension. One layer of the cache is ``k_cache``, ``v_cache`` ``[num_blocks, block_size, Hkv, D]``; the whole cache is
``kv_cache`` ``[num_layers, 2, num_blocks, block_size, Hkv, D]``. Slot ``s`` means block ``s // block_size``, offset
``s % block_size``.

Dtypes: bfloat16 and float16 on CUDA; the reference also takes float32 and float64. Sums are accumulated in float32
(float64 for float64 inputs).

Strides: token rows of ``q``, ``k``, ``v`` may be views into a fused qkv matrix: the last two dimensions ``[H, D]`` must
be contiguous, the token stride is free. Cache tensors of one layer are contiguous.

Every op validates its arguments before it launches and raises ``UnsupportedShapeError``; a launch that fails raises
``KernelLaunchError``. No op waits for the device, and all of them can be captured into a CUDA graph once a call with
the same shapes has compiled and loaded what they need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, overload

from torch import Tensor


class Ops(Protocol):
    """The kernels of one device. See the module's docstring for shapes and dtypes."""

    name: str  # "reference" | "cuda"

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write each token's key and value to its slot of the cache.

        Args:
            k, v: [T, Hkv, D], token rows may be strided.
            k_cache, v_cache: [num_blocks, block_size, Hkv, D], written in place.
            slot_mapping: [T] int64; distinct, except that -1 (padding) is skipped and may repeat.
        """
        ...

    def paged_decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """One query per sequence against all its cached keys and values (PagedAttention, Kwon et al. 2023).

        Args:
            q: [B, Hq, D], rows may be strided. Query head h reads key/value head h // (Hq // Hkv).
            block_tables: [B, max_blocks] int32; entries past the context are never read.
            context_lens: [B] int32 tokens to attend to, this step's included. 0 gives zeros.
            scale: multiplies q·k, usually D ** -0.5.
            out: [B, Hq, D] contiguous, written if given.

        Returns: [B, Hq, D] in q's dtype.
        """
        ...

    def paged_prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        max_seqlen_q: int,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """A chunk of queries per sequence, causal over the cached prefix and the chunk itself.

        The chunk's own keys and values are already in the cache (``store_kv`` ran before). With ``n`` queries and
        context length ``c``, query ``i`` stands at position ``c - n + i`` and attends to positions ``<=`` that.

        Args:
            q: [T, Hq, D], rows may be strided; sequence s owns rows ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]``.
            block_tables: [B, max_blocks] int32.
            cu_seqlens_q: [B + 1] int32, ascending.
            context_lens: [B] int32, chunk included. 0 gives zeros.
            max_seqlen_q: longest chunk, known to the host (it sets the grid).
            out: [T, Hq, D] contiguous, written if given.

        Returns: [T, Hq, D] in q's dtype.
        """
        ...

    def copy_blocks(self, kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
        """Copy whole blocks inside the cache, all layers, keys and values: block ``dst[i]`` becomes ``src[i]``.

        Args:
            src, dst: [N] int64 on the cache's device. ``dst`` holds distinct ids, and none of ``src`` but as its own
                source.
        """
        ...

    def transfer_blocks(
        self, source: Tensor, destination: Tensor, source_blocks: Tensor, destination_blocks: Tensor
    ) -> None:
        """Copy whole blocks of one cache straight into another: block ``destination_blocks[i]`` of ``destination``
        becomes block ``source_blocks[i]`` of ``source``, all layers, keys and values, in one pass.

        Args:
            source, destination: two caches on one device, alike in dtype and in every size but ``num_blocks``.
            source_blocks, destination_blocks: [N] int64 on that device; the latter distinct.
        """
        ...

    def prepare_transfer_blocks(
        self, source: Tensor, destination: Tensor, source_blocks: Tensor, destination_blocks: Tensor
    ) -> Callable[[], object]:
        """``transfer_blocks`` in two parts: all that the host checks and plans now, the copy when the result is called.

        To be called on the stream that is current now.
        """
        ...

    def gather_blocks(self, kv_cache: Tensor, block_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Collect scattered blocks into contiguous memory, ready for one large transfer.

        Args:
            block_ids: [N] int64 on the cache's device.
            out: [num_layers, 2, N, block_size, Hkv, D] contiguous, written if given.

        Returns: [num_layers, 2, N, block_size, Hkv, D].
        """
        ...

    def scatter_blocks(self, staging: Tensor, kv_cache: Tensor, block_ids: Tensor) -> None:
        """Inverse of ``gather_blocks``: ``kv_cache[:, :, block_ids[i]] = staging[:, :, i]``. Ids are distinct."""
        ...

    @overload
    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: None = None, *, out: Tensor | None = None
    ) -> Tensor: ...

    @overload
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor,
        *,
        out: Tensor | None = None,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        *,
        out: Tensor | None = None,
        total: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``h / sqrt(mean(h²) + eps) * weight`` over the last dimension (Zhang & Sennrich 2019).

        Without ``residual``, h = x and the normed tensor is returned. With it, h = x + residual, rounded to the input
        dtype as it is stored, and ``(normed, h)`` is returned. The mean is taken in float32.

        Args:
            x: [..., D]. The last dimension is contiguous; with [T, H, D] the token rows may be strided.
            weight: [D].
            residual: like x, contiguous.
            out: like x, contiguous, takes the normed values if given.
            total: like x, contiguous, takes h if given; may be ``residual`` itself.
        """
        ...

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotary position embedding, in place (Su et al. 2021), the halves paired as in GPT-NeoX and Llama.

        Elements i and i + D/2 of a head are rotated by the angle of its position.

        Args:
            q: [T, Hq, D], k: [T, Hkv, D], token rows may be strided.
            positions: [T] int64.
            cos_sin: [max_position, D] float32: cosines in [:D/2], sines in [D/2:].
        """
        ...

    def norm_rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """All that lies between the qkv projection and attention: ``rms_norm`` of each head, ``rope``, ``store_kv``.

        Args:
            q: [T, Hq, D], k, v: [T, Hkv, D], token rows may be strided. q is overwritten, k may be.
            q_norm, k_norm: [D] weights of the norms, or None for both: no norm.
            positions, cos_sin: as for ``rope``. k_cache, v_cache, slot_mapping: as for ``store_kv``.
                Positions and slots may be read while q, k and v are still computed: they must be complete before that.

        Returns: ``q``, normed and rotated.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias. x [T, K], weight [N, K], bias [N]. Returns [T, N], ``out`` if given."""
        ...

    def gated_linear(self, x: Tensor, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``silu_mul(linear(x, gate_up))``. x [T, K], gate_up [2F, K]. Returns [T, F], ``out`` if given."""
        ...

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """``linear(rms_norm(x, norm, eps), weight, bias)``. x [T, K], norm [K]. Returns [T, N], ``out`` if given."""
        ...

    def norm_gated_linear(
        self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """``gated_linear(rms_norm(x, norm, eps), gate_up)``. Returns [T, F], ``out`` if given."""
        ...

    def add_linear(self, total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """``total += linear(x, weight)``, in place; total [T, N] is contiguous. The product may be added unrounded.

        Returns: ``total``.
        """
        ...

    def silu_mul(self, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``silu(gate) * up`` of a fused [T, 2F] projection: gate in [:, :F], up in [:, F:].

        Returns: [T, F], ``out`` if given.
        """
        ...
