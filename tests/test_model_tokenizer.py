"""The tokenizer class against transformers', over the embedded model's tokenizer files."""

from __future__ import annotations

import json

import pytest

from nanopd.errors import InvalidRequestError, InvalidTokenError, ModelLoadError
from nanopd.model.embedded import embedded_model
from nanopd.model.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief & kind."},
    {"role": "user", "content": 'Say "<b>é</b>"'},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "more"},
]

# What published templates do: blocks on lines of their own (trimmed), loop controls, JSON, special tokens.
TEMPLATE = """
{%- if messages[0].role == 'system' %}
    {{- bos_token + messages[0].content }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set parts = namespace(last=loop.last) %}
[{{ message.role }}] {{ message.content | tojson }}{{ eos_token if not parts.last }}
{% endfor %}
{{ messages | tojson(indent=2) }}
{% if add_generation_prompt %}
[assistant]
{% endif %}
"""


@pytest.fixture(scope="module")
def oracle():
    import transformers

    return transformers.AutoTokenizer.from_pretrained(embedded_model())


@pytest.fixture
def ours():
    return Tokenizer.from_folder(embedded_model())


@pytest.mark.parametrize("prompt", [True, False])
def test_chat_templates_render_as_in_transformers(oracle, ours, prompt):
    ours.chat_template = TEMPLATE
    want = oracle.apply_chat_template(CHAT, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=prompt)
    assert ours.apply_chat_template(CHAT, add_generation_prompt=prompt) == want


def test_special_tokens_in_decoding(oracle, ours):
    ids = oracle.encode("<|im_start|>user\nhi<|im_end|> there")
    assert ours.encode("<|im_start|>user\nhi<|im_end|> there") == ids
    assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == "user\nhi there"
    assert ours.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
    assert ours.eos_token_id == oracle.eos_token_id


def test_a_template_that_refuses_or_is_missing(ours):
    ours.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ours.apply_chat_template(CHAT)
    ours.chat_template = "{{ messages.__class__.__mro__ }}"  # reaching for the interpreter: the sandbox says no
    with pytest.raises(InvalidRequestError, match="refused"):
        ours.apply_chat_template(CHAT)
    for failing in ("{{ 1 / 0 }}", "{{ messages[9].role.x }}", "{{ [0, 1]['a' * 3] + 1 }}"):
        ours.chat_template = failing
        with pytest.raises(InvalidRequestError, match="refused"):
            ours.apply_chat_template(CHAT)
    ours.chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ours.apply_chat_template(CHAT)


@pytest.mark.parametrize("ids", [None, 3, "x", ["a"], [1.5], [-1], [2**40]])
def test_what_are_no_token_ids_cannot_be_decoded(ours, ids):
    with pytest.raises(InvalidTokenError, match="cannot decode"):
        ours.decode(ids)


def test_files_of_a_folder(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"tokenizer.model but no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"cannot read .*tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_older_files_keep_the_template_and_tokens_in_the_config(tmp_path, ours):
    """Templates by name, tokens as objects; and truncation asked for, which would cut prompts without a word."""
    ours.backend.enable_truncation(4)
    ours.backend.enable_padding(length=64)
    ours.backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "bos_token": None,
        "chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d{{ eos_token }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(CHAT) == "d<|im_end|>"
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}
    assert len(tokenizer.encode("one two three four five six")) == 6
    for odd in ([3], [{"name": "x"}], []):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": odd}))
        assert Tokenizer.from_folder(tmp_path).chat_template is None
    for junk in (3, {"a": 1}, [{"name": "default", "template": 3}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": junk}))
        with pytest.raises(ModelLoadError, match="chat_template must be a text"):
            Tokenizer.from_folder(tmp_path)
