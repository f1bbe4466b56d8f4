"""Prompts of a released folder: start and end tokens once, nothing clipped or padded, chat templates, end-token ids."""

from __future__ import annotations

import json

import pytest

from echo_jax.checkpoints import end_token_ids, load_tokenizer
from echo_jax.checkpoints.chat import BEGIN, chat_text, deepseek_v32_text, parse_messages
from echo_jax.checkpoints.tokenizer import JsonTokenizer
from echo_jax.sampling import GREEDY, Sampling, sample

WORDS = ["<s>", "</s>", "<pad>", "<unk>", "a", "b", "c", "hello", "world", "käse", "<|user|>", "<|answer|>"]


def write_tokenizer(folder, *, post=None, config=None, change=None):
    """A tokenizer.json over WORDS, split at white space, as the tokenizers package saves it."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([WORDS[0], WORDS[1], WORDS[2], WORDS[10], WORDS[11]])
    if post:
        places = [(word, WORDS.index(word)) for word in set(post.split()) - {"$A"}]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=post, special_tokens=places)
    if change:
        change(made)
    made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def encode(folder, text, **more) -> list[str]:
    return [WORDS[token] for token in load_tokenizer(folder).encode(text, **more)]


def test_truncation_and_padding_in_the_file_are_reset(tmp_path):
    """Regression: such a file clipped or padded every prompt in silence."""

    def trained_with(made):
        made.enable_truncation(max_length=3)
        made.enable_padding(length=8, pad_id=2, pad_token="<pad>")

    folder = write_tokenizer(tmp_path, change=trained_with)
    assert json.loads((folder / "tokenizer.json").read_text())["truncation"]["max_length"] == 3
    assert encode(folder, "a b c a b c") == ["a", "b", "c", "a", "b", "c"]
    assert encode(folder, "a") == ["a"]


@pytest.mark.parametrize(
    ("post", "config", "expected"),
    [
        (None, None, "hello world"),
        ("<s> $A </s>", None, "<s> hello world </s>"),
        ("<s> <s> $A", None, "<s> <s> hello world"),
        ("<s> $A </s>", {"add_bos_token": False, "bos_token": "<s>"}, "hello world </s>"),
        ("<s> $A </s>", {"add_eos_token": False}, "<s> hello world"),
        (None, {"add_bos_token": True, "bos_token": {"content": "<s>", "lstrip": False}}, "<s> hello world"),
        (
            None,
            {"add_bos_token": True, "bos_token": "<s>", "add_eos_token": True, "eos_token": "</s>"},
            "<s> hello world </s>",
        ),
        ("<s> $A", {"add_bos_token": True, "bos_token": "<s>"}, "<s> hello world"),
    ],
)
def test_start_and_end_tokens_are_those_of_the_folder(tmp_path, post, config, expected):
    folder = write_tokenizer(tmp_path, post=post, config=config)
    assert encode(folder, "hello world") == expected.split()
    assert encode(folder, b"hello world", add_special_tokens=False) == ["hello", "world"]


def test_special_tokens_that_the_text_brings_are_not_added_again(tmp_path):
    folder = write_tokenizer(tmp_path, post="<s> $A </s>")
    assert encode(folder, "<s> hello") == ["<s>", "hello", "</s>"]
    assert encode(folder, "<s> hello </s>") == ["<s>", "hello", "</s>"]
    assert encode(folder, "") == ["<s>", "</s>"]
    assert encode(folder, "käse a") == ["<s>", "käse", "a", "</s>"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"add_bos_token": True, "bos_token": "<begin>"}, "bos_token '<begin>' is no token of tokenizer.json"),
        ({"add_bos_token": True}, "bos_token None is no token"),
        ({"add_eos_token": "yes"}, "add_eos_token in .* is 'yes' but must be true or false"),
    ],
)
def test_switches_that_cannot_be_followed_are_refused(tmp_path, config, words):
    with pytest.raises(ValueError, match=words):
        load_tokenizer(write_tokenizer(tmp_path, config=config))


# ---- chat ------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}{{ ' <|user|> ' if message.role == 'user' else ' <|answer|> ' }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %} <|answer|> {% endif %}"
)
ASKED = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("place", ["jinja", "json", "config", "named"])
def test_the_template_of_the_checkpoint_is_used(tmp_path, place):
    config = {"bos_token": "<s>", "add_bos_token": True}
    if place == "config":
        config["chat_template"] = TEMPLATE
    if place == "named":
        config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    folder = write_tokenizer(tmp_path, config=config)
    if place == "jinja":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    if place == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    text = chat_text(folder, ASKED)
    assert text == "<s> <|user|> hello <|answer|> "
    assert encode(folder, text) == ["<s>", "<|user|>", "hello", "<|answer|>"], "the start token comes once"


def test_what_released_templates_call_is_there(tmp_path):
    template = "{{ strftime_now('%Y') | length }}{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}"
    folder = write_tokenizer(tmp_path, config={"chat_template": template})
    assert chat_text(folder, [{"role": "user", "content": "grüße"}] * 2) == '4{"role": "user", "content": "grüße"}'


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[5].content }}", "refuses these messages"),
        ("{% if %}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_a_template_that_refuses_is_told(tmp_path, template, words):
    folder = write_tokenizer(tmp_path, config={"chat_template": template})
    with pytest.raises(ValueError, match=words):
        chat_text(folder, ASKED)


def test_a_folder_without_a_template(tmp_path):
    with pytest.raises(ValueError, match="has no chat template"):
        chat_text(tmp_path, ASKED)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert chat_text(tmp_path, ASKED).startswith(BEGIN)


def test_deepseeks_form_of_a_conversation():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    assert deepseek_v32_text(messages) == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>One?<｜Assistant｜></think>1<｜end▁of▁sentence｜>"
        "<｜User｜>Two?<｜Assistant｜></think>"
    )
    assert deepseek_v32_text(messages, thinking=True).endswith("<｜User｜>Two?<｜Assistant｜><think>")
    with pytest.raises(ValueError, match="the last message is the assistant's"):
        deepseek_v32_text(messages[:3])
    with pytest.raises(ValueError, match="message 1 is the system's, which must be the first"):
        deepseek_v32_text([messages[1], messages[0], messages[3]])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "there are 0 messages"),
        ([{"role": "tool", "content": "x"}], "message 0 has role 'tool'"),
        ([{"role": "user", "content": None}], "content of type NoneType"),
    ],
)
def test_what_is_no_message(tmp_path, messages, words):
    with pytest.raises(ValueError, match=words):
        chat_text(tmp_path, messages)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("hello", ASKED),
        (json.dumps(ASKED), ASKED),
        ("[1, 2]", [{"role": "user", "content": "[1, 2]"}]),
        ("", [{"role": "user", "content": ""}]),
    ],
)
def test_a_prompt_file_holds_text_or_messages(text, messages):
    assert parse_messages(text) == messages


# ---- ids and temperatures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", ["</s>", -1, 1.5, True, [1, "2"], [[1]], 256, {"id": 1}])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_token_that_is_none_is_refused_with_its_file(tmp_path, name, stated):
    (tmp_path / name).write_text(json.dumps({"eos_token_id": stated}))
    with pytest.raises(ValueError, match=f"eos_token_id in .*{name}' holds .* which is no token id.*0..255"):
        end_token_ids(tmp_path, 256)


def test_end_tokens_that_are(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 255]}')
    assert end_token_ids(tmp_path, 256) == (1, 255)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert end_token_ids(tmp_path, 256) == (7,)


@pytest.mark.parametrize("temperature", [1e-31, 1e-45, 5e-324, 0.0])
def test_a_temperature_that_no_logit_survives_is_greedy(temperature):
    """Regression: logits over 1e-45 are infinite or NaN, and the draw was NaN's choice."""
    import jax.numpy as jnp

    logits = jnp.asarray([[1.0, 5.0, 2.0, 4.9]] * 2, jnp.float32)
    arguments = logits, jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.int32)
    assert sample(*arguments, Sampling(temperature)).tolist() == sample(*arguments, GREEDY).tolist() == [1, 1]
    assert sample(*arguments, Sampling(1e-29)).tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [-1e-40, float("nan"), float("inf")])
def test_what_is_no_temperature(temperature):
    with pytest.raises(ValueError, match="temperature is"):
        Sampling(temperature)


def test_a_tokenizer_made_by_hand_adds_nothing(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path)
    assert JsonTokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))).encode("a") == [4]
