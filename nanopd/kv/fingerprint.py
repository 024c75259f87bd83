"""LayoutFingerprint: what two KV caches must have in common before a byte moves between them."""

from __future__ import annotations

from dataclasses import dataclass, fields

# The dimensions of KVCache.tensor, outermost first. Part of the fingerprint: the same sizes in another order are
# another layout, and a copy between the two would run without an error.
DIMENSION_ORDER = "layer,key/value,block,slot,head,dim"


@dataclass(frozen=True, slots=True)
class LayoutFingerprint:
    """Equal fingerprints mean that a block of one cache can be copied byte for byte into the other."""

    model: str
    dtype: str  # torch's name without "torch.", such as "bfloat16"
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    order: str = DIMENSION_ORDER

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        item = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item

    def differences(self, other: LayoutFingerprint) -> list[str]:
        """One line per field that differs, such as ``"block_size: 16 and 32"``; empty if the layouts are equal."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [f"{name}: {mine} and {theirs}" for name, mine, theirs in pairs if mine != theirs]
