"""ModelConfig: the numbers that define a decoder-only transformer, read from a Hugging Face ``config.json``.

Plain Python without torch, so that the cost model and the simulator can use it. Llama, Qwen2 and Qwen3 share one
architecture (pre-norm, RoPE, grouped-query attention, SwiGLU) and differ in two switches: Qwen2 adds a bias to the
q, k, v projections, Qwen3 normalises each query and key head.

Whatever would change the result and is not implemented (other rope types, sliding windows, quantised weights …) is
refused with ``ModelLoadError``: a model that loads computes what its authors meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from nanopd.errors import ModelLoadError

# architectures[0] of config.json -> our name
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
ROPE_TYPES = ("default", "linear", "llama3")
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "max_position_embeddings",
)  # fmt: skip

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to reach past the length of pre-training.

    ``linear`` divides every frequency by ``factor`` (position interpolation, Chen et al. 2023). ``llama3`` divides
    the low ones, keeps the high ones and blends between (Llama 3.1); only it uses the last three fields.
    """

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. Sizes are counts of elements, not bytes.

    Query head ``h`` reads key/value head ``h // (num_heads // num_kv_heads)``; ``num_heads * head_dim`` need not
    equal ``hidden_size`` (in Qwen3-0.6B it is twice as large).
    """

    name: str
    architecture: str  # "llama" | "qwen2" | "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in _SIZES:
            if getattr(self, field) < 1:
                raise ModelLoadError(f"{self.name}: {field} is {getattr(self, field)}, must be at least 1")
        for field in ("rms_norm_eps", "rope_theta"):
            if not 0 < getattr(self, field) < math.inf:
                raise ModelLoadError(f"{self.name}: {field} is {getattr(self, field)}, must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.name}: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelLoadError(f"{self.name}: head_dim {self.head_dim} must be even, rotary embedding pairs halves")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "model") -> ModelConfig:
        """Read a ``config.json`` of transformers 4 (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``).

        Raises:
            ModelLoadError: architecture, activation, rope type or another feature that is not implemented, or a
                missing field; the message names it.
        """
        architecture = _architecture(config, name)
        _refuse_unsupported(config, name)
        theta, scaling = _rope(config, name)
        hidden, heads = _int(config, "hidden_size", name), _int(config, "num_attention_heads", name)
        if heads < 1:
            raise ModelLoadError(f"{name}: num_attention_heads is {heads}, must be at least 1")
        return cls(
            name=name,
            architecture=architecture,
            vocab_size=_int(config, "vocab_size", name),
            hidden_size=hidden,
            intermediate_size=_int(config, "intermediate_size", name),
            num_layers=_int(config, "num_hidden_layers", name),
            num_heads=heads,
            num_kv_heads=_int(config, "num_key_value_heads", name, heads),
            head_dim=_int(config, "head_dim", name, 128 if architecture == "qwen3" else hidden // heads),
            rms_norm_eps=_float(config, "rms_norm_eps", name, 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=_int(config, "max_position_embeddings", name),
            tie_word_embeddings=_bool(config, "tie_word_embeddings", name),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            eos_token_ids=token_ids(config.get("eos_token_id"), name),
        )

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, equal to that of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Distinct weights; tied embeddings count once."""
        qkv = self.q_size + 2 * self.kv_size
        attention = qkv * self.hidden_size + self.hidden_size * self.q_size
        extras = (qkv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + extras + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @property
    def num_step_parameters(self) -> int:
        """Weights every step reads in full: all but an untied embedding table, of which a step reads a few rows."""
        table = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_parameters - table

    def weight_bytes(self, dtype_bytes: int = 2) -> int:
        """Memory of the weights, in bytes."""
        return self.num_parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes of KV cache one token takes over all layers: a key and a value per layer and key/value head."""
        return 2 * self.num_layers * self.kv_size * dtype_bytes

    def flops_per_token(self, context_len: int = 0, *, logits: bool = True) -> int:
        """Floating point operations of one token's forward pass (a multiply-add counts two).

        Matrices cost 2 per weight; attention costs 2 per element of q·k and of p·v, for each of ``context_len``
        tokens attended to. Norms, rotary embedding and activation (under 1 %) are left out.

        Args:
            context_len: tokens attended to, this one included. The mean over a whole causal prompt of n is (n + 1)/2.
            logits: whether the token is projected to the vocabulary (in a prefill chunk at most the last one is).
        """
        layer = 2 * self.hidden_size * (self.q_size + self.kv_size) + 3 * self.hidden_size * self.intermediate_size
        head = self.vocab_size * self.hidden_size if logits else 0
        attention = 4 * self.num_layers * self.q_size * context_len
        return 2 * (self.num_layers * layer + head) + attention


def token_ids(value: Any, name: str = "model") -> tuple[int, ...]:
    """``eos_token_id`` of a Hugging Face file, which is an int, a list or null, as a tuple.

    Raises ModelLoadError if it is something else.
    """
    if value is None:
        return ()
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_number(v, int, "eos_token_id", name) for v in values)


def _field(config: Mapping[str, Any], key: str, name: str) -> Any:
    if config.get(key) is None:
        raise ModelLoadError(f"{name}: config.json has no {key!r}")
    return config[key]


def _number(value: Any, kind: Callable[[Any], N], key: str, name: str) -> N:
    """``kind(value)``, int or float, unless that loses something: 1.5 is no int."""
    try:
        number = kind(value)
        if isinstance(value, bool) or (isinstance(value, float) and number != value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        wanted = "an integer" if kind is int else "a number"
        raise ModelLoadError(f"{name}: {key} must be {wanted}, got {value!r:.60}") from None
    return number


def _int(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    if default is not None and config.get(key) is None:
        return default
    return _number(_field(config, key, name), int, key, name)


def _float(config: Mapping[str, Any], key: str, name: str, default: float | None = None) -> float:
    if default is not None and config.get(key) is None:
        return default
    return _number(_field(config, key, name), float, key, name)


def _bool(config: Mapping[str, Any], key: str, name: str) -> bool:
    value = config.get(key, False)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"{name}: {key} must be true or false, got {value!r:.60}")
    return bool(value)


def _architecture(config: Mapping[str, Any], name: str) -> str:
    listed = config.get("architectures") or []
    if not isinstance(listed, list):
        raise ModelLoadError(f"{name}: architectures must be a list, got {listed!r:.60}")
    for hf_name in listed:
        if hf_name in ARCHITECTURES:
            return ARCHITECTURES[hf_name]
    if not listed and config.get("model_type") in ARCHITECTURES.values():
        return str(config["model_type"])
    found = listed or config.get("model_type")
    raise ModelLoadError(f"{name}: architecture {found!r} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(config: Mapping[str, Any], name: str) -> None:
    """Raise for whatever would change the result but is not implemented."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"{name}: activation {activation!r} is not supported, only 'silu' is")
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(key):
            raise ModelLoadError(f"{name}: {key}={config[key]!r} is not supported")
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return
    window = _int(config, "sliding_window", name)
    if window >= _int(config, "max_position_embeddings", name):
        return
    layer_types = config.get("layer_types")
    first_sliding = _int(config, "max_window_layers", name, 28)
    slides = (
        "sliding_attention" in layer_types if layer_types else first_sliding < _int(config, "num_hidden_layers", name)
    )
    if slides:
        raise ModelLoadError(f"{name}: sliding window attention (window {window}) is not supported")


def _rope(config: Mapping[str, Any], name: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (4)."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = config.get(key) or {}
        if not isinstance(part, Mapping):
            raise ModelLoadError(f"{name}: {key} must be an object, got {part!r:.60}")
        rope.update(part)
    theta = _float(rope if rope.get("rope_theta") is not None else config, "rope_theta", name, 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelLoadError(f"{name}: rope parameters per layer type are not supported: {sorted(rope)}")
    if kind not in ROPE_TYPES:
        raise ModelLoadError(f"{name}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelLoadError(f"{name}: partial_rotary_factor {partial} is not supported, only 1 is")
    if kind == "default":
        return theta, None
    where = f"{name} (rope scaling)"
    factor = _float(rope, "factor", where)
    if not 0 < factor < math.inf:
        raise ModelLoadError(f"{where}: factor is {factor}, must be positive")
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    return theta, RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=_float(rope, "low_freq_factor", where),
        high_freq_factor=_float(rope, "high_freq_factor", where),
        original_max_position_embeddings=_int(
            rope, "original_max_position_embeddings", where, _int(config, "max_position_embeddings", name)
        ),
    )
