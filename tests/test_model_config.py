"""ModelConfig: published shapes, both styles of config.json, and refusal of what is not implemented."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nanopd.errors import ModelLoadError
from nanopd.model.config import ModelConfig, RopeScaling
from nanopd.model.presets import preset, presets

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": [128001, 128008, 128009],
}
QWEN2 = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 28,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [  # parameter counts as the model cards' safetensors metadata state them
        ("qwen3-8b", 8_190_735_360, 147_456),
        ("llama3-8b", 8_030_261_248, 131_072),
        ("qwen2-1.5b", 1_543_714_304, 28_672),
    ],
)
def test_presets_have_the_published_size(name, parameters, kv_bytes):
    config = preset(name)
    assert config.num_parameters == parameters
    assert config.weight_bytes(2) == 2 * parameters
    assert config.kv_bytes_per_token(2) == kv_bytes


def test_a_step_reads_everything_but_an_untied_embedding_table():
    qwen3, qwen2 = preset("qwen3-8b"), preset("qwen2-1.5b")
    assert qwen3.num_parameters - qwen3.num_step_parameters == 151936 * 4096
    assert qwen2.num_parameters == qwen2.num_step_parameters


def test_presets_are_named_after_their_key_and_fresh_each_time():
    for name, config in presets().items():
        assert config.name == name
    assert presets() is not presets()
    with pytest.raises(ModelLoadError, match="qwen3-8b"):
        preset("qwen9")


def test_flops_equal_a_count_of_the_matrix_products(tiny):
    import torch
    from model_cases import Pager
    from torch.utils.flop_counter import FlopCounterMode

    pager = Pager(tiny)
    with FlopCounterMode(display=False) as counter:
        pager.step([(pager.sequence(list(range(50))), 50)])
    counted = counter.get_flop_counts()["Global"]
    matrices = sum(flops for op, flops in counted.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert matrices == 50 * tiny.config.flops_per_token(0)


def test_flops_of_attention_grow_with_the_context():
    config = preset("qwen3-8b")
    per_position = config.flops_per_token(1001) - config.flops_per_token(1000)
    assert per_position == 36 * 2 * (2 * 32 * 128)  # layers * (q·k, p·v) * (multiply-add * query heads * head_dim)
    assert config.flops_per_token(10) - config.flops_per_token(10, logits=False) == 2 * 151936 * 4096


def test_old_and_new_rope_styles_read_alike():
    old = ModelConfig.from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}})
    new = ModelConfig.from_hf(
        {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_SCALING}}
    )
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_oldest_rope_style_names_its_kind_type():
    config = ModelConfig.from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (config.rope_theta, config.rope_scaling) == (10000.0, RopeScaling("linear", 2.0))
    assert ModelConfig.from_hf({**LLAMA, "rope_scaling": None}).rope_scaling is None


def test_fields_follow_the_file():
    config = ModelConfig.from_hf(LLAMA, name="a")
    assert (config.name, config.architecture, config.head_dim, config.num_kv_heads) == ("a", "llama", 128, 8)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert not config.tie_word_embeddings
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": 7}).eos_token_ids == (7,)
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": None}).eos_token_ids == ()
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(without).num_kv_heads == 32
    assert ModelConfig.from_hf({**LLAMA, "head_dim": 256}).head_dim == 256
    qwen3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048}
    assert ModelConfig.from_hf(qwen3).head_dim == 128  # Qwen3's default, not hidden_size / num_attention_heads
    assert ModelConfig.from_hf({**qwen3, "head_dim": None}).qk_norm


def test_an_unused_sliding_window_is_accepted():
    assert ModelConfig.from_hf(QWEN2).qkv_bias
    # From layer 28 on of 28 layers: none.
    ModelConfig.from_hf({**QWEN2, "use_sliding_window": True, "num_hidden_layers": 28})
    # As long as the longest sequence: never hides anything.
    ModelConfig.from_hf({**QWEN2, "use_sliding_window": True, "sliding_window": 131072})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 30}, "30 query heads"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({**QWEN2, "use_sliding_window": True}, "sliding window"),
        ({**QWEN2, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 32}, "sliding window"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, named):
    with pytest.raises(ModelLoadError, match=named):
        ModelConfig.from_hf({**LLAMA, **changes}, name="m")


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "vocab_size": ("many", 1.5, [1], True, float("inf"), 0),
        "hidden_size": ([1], {}),
        "num_attention_heads": (0, "x"),
        "num_key_value_heads": (0, -1, "x"),
        "head_dim": (0, 7, "x"),
        "rms_norm_eps": ("x", 0, -1e-6, float("nan"), [1]),
        "max_position_embeddings": (0, -5, "x"),
        "architectures": (3, "LlamaForCausalLM", {"a": 1}),
        "rope_theta": ("x", 0, -1),
        "rope_scaling": ("linear", [1], {"type": "linear", "factor": "x"}, {"type": "linear", "factor": 0}),
        "rope_parameters": ([1],),
        "eos_token_id": ("x", [None], {}, [[3]], 1.5),
        "tie_word_embeddings": ("false", 1),
    }.items(),
)
def test_junk_in_a_field_is_refused_by_name(field, values):
    others = {"num_key_value_heads": "num_kv_heads", "architectures": "architecture", "rope_scaling": "rope scaling"}
    for value in values:
        with pytest.raises(ModelLoadError, match=f"{field}|{others.get(field, field)}"):
            ModelConfig.from_hf({**LLAMA, field: value}, name="m")


def test_null_stands_for_the_default():
    nulls = dict.fromkeys(("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings"))
    config = ModelConfig.from_hf({**LLAMA, **nulls})
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-6, 10000.0, False)


def test_a_sliding_window_that_is_no_number_is_refused():
    with pytest.raises(ModelLoadError, match="sliding_window must be an integer, got 'x'"):
        ModelConfig.from_hf({**QWEN2, "use_sliding_window": True, "sliding_window": "x"})


def test_configs_never_import_torch():
    code = "import sys, nanopd.model.presets as p; p.preset('tiny'); import nanopd.model; nanopd.model.ModelConfig"
    check = "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=False).returncode == 0
