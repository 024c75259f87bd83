"""A GGUF file (llama.cpp's format) of a Llama model, rewritten as an ordinary Hugging Face folder.

Weights are expanded to float32, in which each is exactly what the quantised block means: ``scale * q + minimum``
with 16-bit scale and minimum. Half precision would round some of them. Written without torch, one tensor at a time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanopd.errors import ModelLoadError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor

# llama.cpp's tensor names -> Hugging Face's
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def convert_gguf(source: Path, target: Path, *, progress: bool = True) -> None:
    """Write config, tokenizer and weights of ``source`` into the existing folder ``target``.

    Raises:
        ModelLoadError: not a GGUF file, or one of another architecture or tokenizer than handled here.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, IndexError) as error:
        raise ModelLoadError(f"cannot read {source} as GGUF: {error}") from error
    meta = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    if (meta["general.architecture"], meta["tokenizer.ggml.model"]) != ("llama", "gpt2"):
        raise ModelLoadError(
            f"{source}: only architecture 'llama' with tokenizer 'gpt2' is converted, this is "
            f"{meta['general.architecture']!r} with {meta['tokenizer.ggml.model']!r}"
        )
    _write_json(target / "config.json", _config(meta, tied=all(t.name != "output.weight" for t in reader.tensors)))
    _write_tokenizer(meta, target)
    _write_weights(reader, meta, target / "model.safetensors", progress)


def _config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    """``config.json`` from GGUF metadata."""
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "max_position_embeddings": meta["llama.context_length"],
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
    }


def _write_tokenizer(meta: dict[str, Any], target: Path) -> None:
    """``tokenizer.json`` (byte-level BPE, each digit a token of its own), its config and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))

    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {
        name: tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in names.items()
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    _write_json(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    if "tokenizer.chat_template" in meta:
        (target / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")


def _write_weights(reader: GGUFReader, meta: dict[str, Any], file: Path, progress: bool) -> None:
    """One safetensors file: header length (8 bytes), JSON header with names, shapes and offsets, then the data."""
    from tqdm.auto import tqdm

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in reader.tensors:
        end = offset + 4 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest dimension first
        header[_hugging_face_name(tensor.name)] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # data starts aligned
    bar = tqdm(total=offset, unit="B", unit_scale=True, desc="Converting weights to safetensors", disable=not progress)
    with bar, open(file, "wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in reader.tensors:
            data = _expand(tensor, meta)
            out.write(data.data)
            bar.update(data.nbytes)


def _hugging_face_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in _NAMES:
        raise ModelLoadError(f"GGUF tensor {name!r} has no counterpart in a Llama model")
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{_NAMES[match[2]]}.weight"


def _expand(tensor: ReaderTensor, meta: dict[str, Any]) -> np.ndarray:
    """A tensor as contiguous float32, query and key rows in Hugging Face's order.

    llama.cpp rotates neighbours (0, 1), (2, 3) …, Hugging Face the halves (0, D/2), (1, D/2 + 1) …; the converter to
    GGUF reordered the rows of each head to suit, which is undone here.
    """
    import numpy as np
    from gguf import dequantize

    data = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
        head_dim = meta["llama.rope.dimension_count"]
        data = data.reshape(-1, head_dim // 2, 2, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
    return np.ascontiguousarray(data)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
