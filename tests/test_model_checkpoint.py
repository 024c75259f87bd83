"""Loading by name: folders (sharded, tied, damaged), the hub, random weights, and the errors of each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from model_cases import Pager, hf_logits, random_hf_model, random_tokens, save
from safetensors.torch import load_file, save_file

from nanopd.errors import ConfigError, CudaUnavailableError, ModelLoadError
from nanopd.model import hub, load_model
from nanopd.model.checkpoint import read_config, weight_files
from nanopd.model.loader import check_memory, resolve_device
from nanopd.model.presets import preset
from nanopd.model.weights import checkpoint_slots


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(transformers model, its folder): untied Qwen3, one file."""
    hf_model = random_hf_model("qwen3")
    return hf_model, save(hf_model, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def folder(source, tmp_path):
    """A copy to damage, in the simplest layout."""
    _, original = source
    state = load_file(original / "model.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_bytes((original / "config.json").read_bytes())
    save_file(state, copy / "model.safetensors")
    return copy


def rewrite(folder: Path, change) -> None:
    """Apply ``change`` to the dict of tensors in the folder's single file."""
    file = folder / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(state)
    save_file(state, file)


def same_logits(name: Path | str, hf_model, **options) -> None:
    loaded = load_model(str(name), device="cpu", **options)
    tokens = random_tokens(50, seed=9)
    pager = Pager(loaded)
    (got,) = pager.step([(pager.sequence(tokens), 50)])
    torch.testing.assert_close(got, hf_logits(hf_model, tokens), rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", ["llama", "llama-mha-tied", "llama-llama3", "qwen2", "qwen2-tied", "qwen3-tied"])
def test_folder_written_by_transformers(case, tmp_path):
    hf_model = random_hf_model(case)
    same_logits(save(hf_model, tmp_path / "model"), hf_model)


def test_sharded_folder(source, tmp_path):
    hf_model, _ = source
    folder = save(hf_model, tmp_path / "sharded", max_shard_size="100KB")
    assert len(weight_files(folder)) > 2
    same_logits(folder, hf_model)


def test_files_that_the_index_does_not_name_are_ignored(source, tmp_path):
    hf_model, _ = source
    folder = save(hf_model, tmp_path / "sharded", max_shard_size="100KB")
    save_file({"junk": torch.zeros(1)}, folder / "consolidated.safetensors")
    same_logits(folder, hf_model)


def test_dtype_is_converted_on_the_way(source):
    hf_model, folder = source
    loaded = load_model(str(folder), device="cpu", dtype=torch.bfloat16)
    slots = checkpoint_slots(loaded.config, loaded.model.weights)
    state = hf_model.state_dict()
    assert set(slots) == set(state)
    for name, slot in slots.items():
        assert slot.dtype is torch.bfloat16
        assert torch.equal(slot, state[name].bfloat16())


def test_name_tokenizer_and_default_dtype_of_a_folder(source):
    _, folder = source
    loaded = load_model(str(folder), device="cpu")
    assert loaded.config.name == folder.name
    assert loaded.tokenizer is None
    assert loaded.model.dtype is torch.float32


def test_generation_config_adds_end_of_sequence_tokens(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    assert read_config(folder, "m").eos_token_ids == (5,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert read_config(folder, "m").eos_token_ids == (5, 7)


def test_redundant_tensors_are_skipped(tmp_path):
    hf_model = random_hf_model("qwen2-tied")
    folder = save(hf_model, tmp_path / "model")

    def add(state):
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(folder, add)
    same_logits(folder, hf_model)


def test_missing_and_unexpected_tensors_are_named(folder):
    def change(state):
        state["model.layers.1.mlp.up.weight"] = state.pop("model.layers.1.mlp.up_proj.weight")

    rewrite(folder, change)
    with pytest.raises(ModelLoadError, match=r"missing model.layers.1.mlp.up_proj.weight; unexpected model.*mlp.up.w"):
        load_model(str(folder), device="cpu")


def test_a_tensor_too_many_is_an_error_even_if_none_is_missing(folder):
    """A bias that the architecture does not add: ignoring it would give another model's answers."""
    rewrite(folder, lambda state: state.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(384)}))
    with pytest.raises(ModelLoadError, match=r"missing none; unexpected model.layers.0.self_attn.q_proj.bias"):
        load_model(str(folder), device="cpu")


def test_long_lists_of_names_are_cut(folder):
    rewrite(folder, lambda state: [state.pop(name) for name in list(state) if "layers.2" in name])
    with pytest.raises(ModelLoadError, match=r"missing (model\S+, ){5}model\S+ and 5 more; unexpected none"):
        load_model(str(folder), device="cpu")


def test_wrong_shape_is_named(folder):
    rewrite(folder, lambda state: state.update({"model.norm.weight": torch.ones(95)}))
    with pytest.raises(ModelLoadError, match=r"model.norm.weight has shape \[95\], config.json implies \[96\]"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("keep", [0, 4, 200, 100_000])
def test_truncated_weights(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model.safetensors is damaged"):
        load_model(str(folder), device="cpu")


def test_missing_shard_is_named(source, tmp_path):
    folder = save(source[0], tmp_path / "sharded", max_shard_size="100KB")
    lost = weight_files(folder)[1]
    lost.unlink()
    with pytest.raises(ModelLoadError, match=lost.name):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}, {"a": ["x"]}])
def test_an_index_that_maps_no_names_is_refused(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match="weight_map must map"):
        load_model(str(folder), device="cpu")


def test_integer_weights_are_not_taken_for_numbers(folder):
    rewrite(folder, lambda state: state.update({"model.norm.weight": state["model.norm.weight"].to(torch.int32)}))
    with pytest.raises(ModelLoadError, match=r"model.norm.weight holds torch.int32"):
        load_model(str(folder), device="cpu")


def test_folder_without_config_or_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        load_model(str(folder), device="cpu")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"cannot read .*config.json"):
        load_model(str(folder), device="cpu")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="not a JSON object"):
        load_model(str(folder), device="cpu")
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config.json"):
        load_model(str(folder), device="cpu")


def test_a_path_object_names_a_folder(folder):
    assert load_model(folder, device="cpu").config.name == "copy"


@pytest.mark.parametrize("name", ["smollm3", "./no/such/folder", "", "a/b/c", "/", "x" * 5000, "~no-such-user/x", "\0"])
def test_unknown_names_list_what_there_is(name):
    with pytest.raises(ModelLoadError, match=r"smollm2, dummy:qwen3-8b|no config.json"):
        load_model(name, device="cpu")


def test_wrong_dtype_or_device():
    with pytest.raises(ConfigError, match="'int8' is not supported"):
        load_model("dummy:tiny", device="cpu", dtype="int8")
    with pytest.raises(ConfigError, match="gpu"):
        load_model("dummy:tiny", device="gpu")
    with pytest.raises(ConfigError, match="device cpu:7 is none"):
        load_model("dummy:tiny", device="cpu:7")
    assert resolve_device("cpu:0").type == "cpu"
    for device in (1.5, [1], True):
        with pytest.raises(ConfigError, match="device"):
            load_model("dummy:tiny", device=device)
    if not torch.cuda.is_available():
        with pytest.raises(CudaUnavailableError):
            load_model("dummy:tiny", device="cuda")


def test_a_gpu_number_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(CudaUnavailableError, match="cuda:2 was asked for, and there are 2 GPUs"):
        resolve_device("cuda:2")


def test_a_model_larger_than_memory_is_refused(monkeypatch):
    """With small numbers, so that a broken check fails here instead of filling the machine's memory."""
    cpu = torch.device("cpu")
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2_000_000}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    with pytest.raises(ModelLoadError, match=r"32.8 GB of memory, this machine has 8.2 GB"):
        check_memory(preset("qwen3-8b"), cpu, torch.float32)
    check_memory(preset("qwen2-1.5b"), cpu, torch.float32)
    long = dataclasses.replace(preset("tiny"), max_position_embeddings=10**12)  # its table of angles would not fit
    with pytest.raises(ModelLoadError, match=r"256000.0 GB of memory"):
        check_memory(long, cpu, torch.float32)
    pages["SC_PHYS_PAGES"] = 100
    with pytest.raises(ModelLoadError, match=r"tiny in torch.float32"):
        load_model("dummy:tiny", device="cpu", dtype="float32")


def test_dummy_weights_are_seeded(tiny):
    assert tiny.tokenizer is None
    assert tiny.config.eos_token_ids == ()
    again, other = (load_model("dummy:tiny", device="cpu", seed=seed) for seed in (0, 1))
    assert torch.equal(again.model.weights.layers[1].qkv, tiny.model.weights.layers[1].qkv)
    assert not torch.equal(other.model.weights.layers[1].qkv, tiny.model.weights.layers[1].qkv)
    assert bool((tiny.model.weights.final_norm == 1).all())
    pager = Pager(tiny)
    (logits,) = pager.step([(pager.sequence(random_tokens(20, seed=1)), 20)])
    assert bool(logits.isfinite().all())
    with pytest.raises(ModelLoadError, match="tiny"):
        load_model("dummy:huge", device="cpu")


def test_hub_name_is_downloaded_and_loaded(source, monkeypatch):
    hf_model, folder = source
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    same_logits("some-org/Some.Model-1B", hf_model)
    assert asked[0][0] == "some-org/Some.Model-1B"
    assert "config.json" in asked[0][1]


def test_hub_offline_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"not in the local cache .* hf download some-org/no-such-model"):
        load_model("some-org/no-such-model", device="cpu")


def test_hub_errors_are_typed(monkeypatch):
    import httpx
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
    cases = [
        (GatedRepoError("no", response=response), "accept its licence"),
        (RepositoryNotFoundError("no", response=response), "has no model"),
        (ConnectionResetError("cut"), "ConnectionResetError: cut"),
    ]
    for raised, expected in cases:

        def fail(*args, error=raised, **kwargs):
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
        with pytest.raises(ModelLoadError, match=expected):
            hub.hub_model("org/model")
