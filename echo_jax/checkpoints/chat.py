"""Messages to the text of a prompt: by the chat template of a checkpoint, or by DeepSeek-V3.2's own encoding.

Knows files of a model folder and Jinja. DeepSeek-V3.2 ships no template; a folder of that model type without one gets
its official form: markers of user and assistant, and a thinking section that is closed unless thinking is asked for.
"""

from __future__ import annotations

import datetime
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_jax.checkpoints.contents import read_object
from echo_jax.checkpoints.hf_config import DEEPSEEK
from echo_jax.checkpoints.tokenizer import TOKENIZER_CONFIG, token_text

TEMPLATE_FILE, TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
ROLES = ("system", "user", "assistant")
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, THINK, THOUGHT = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"


def chat_text(folder: str | Path, messages: Sequence[Mapping[str, Any]], *, thinking: bool = False) -> str:
    """The text of a prompt that ends where the assistant's answer begins.

    messages: mappings of "role" (system, user, assistant) and "content". Raises ValueError for messages that are none,
    for a folder without a template whose model has no encoding here, and where the template refuses; ImportError where
    a template needs the `hf` extra.
    """
    folder = Path(folder)
    _check(messages)
    template = find_template(folder)
    if template is not None:
        return _render(folder, template, messages, thinking)
    config = read_object(folder / "config.json", "a model's settings") if (folder / "config.json").is_file() else {}
    if config.get("model_type") != DEEPSEEK:
        raise ValueError(
            f"{str(folder)!r} has no chat template ({TEMPLATE_FILE}, {TEMPLATE_JSON} or chat_template in "
            f"{TOKENIZER_CONFIG}); fetch it from where the model came from, or give the prompt as the model expects it"
        )
    return deepseek_v32_text(messages, thinking)


def parse_messages(content: str) -> list[dict[str, Any]]:
    """A prompt file's messages: a JSON list of them, or the whole text as one message of the user."""
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if isinstance(found, list) and found and all(isinstance(one, dict) and "role" in one for one in found):
        return found
    return [{"role": "user", "content": content}]


def find_template(folder: Path) -> str | None:
    """The folder's Jinja template; of several named ones the default."""
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    for name in (TEMPLATE_JSON, TOKENIZER_CONFIG):
        if not (folder / name).is_file():
            continue
        stated = read_object(folder / name, "settings").get("chat_template")
        if isinstance(stated, list):
            named = {one.get("name"): one.get("template") for one in stated if isinstance(one, dict)}
            stated = named.get("default")
            if stated is None:
                raise ValueError(f"{str(folder / name)!r} has the templates {sorted(map(str, named))} but no default")
        if stated is not None:
            if not isinstance(stated, str):
                raise ValueError(f"chat_template in {str(folder / name)!r} is no text; fetch it again")
            return stated
    return None


def deepseek_v32_text(messages: Sequence[Mapping[str, Any]], thinking: bool = False) -> str:
    """DeepSeek-V3.2's form of a conversation, up to where the next answer begins."""
    parts, opened = [BEGIN], f"{ASSISTANT}{THINK if thinking else THOUGHT}"
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "user":
            parts += [USER, content]
        elif role == "assistant":
            parts += [f"{ASSISTANT}{THOUGHT}", content, END]
        elif number == 0:
            parts.append(content)
        else:
            raise ValueError(f"message {number} is the system's, which must be the first; move it")
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last message is the {messages[-1]['role']}'s but the user's must be last; add one")
    return "".join([*parts, opened])


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise ValueError("there are 0 messages; give at least one of the user")
    for number, message in enumerate(messages):
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise ValueError(
                f"message {number} has role {message.get('role')!r} and content of type "
                f"{type(message.get('content')).__name__}; roles are {', '.join(ROLES)} and content is text"
            )


def _render(folder: Path, template: str, messages: Sequence[Mapping[str, Any]], thinking: bool) -> str:
    try:
        sandbox, jinja2 = importlib.import_module("jinja2.sandbox"), importlib.import_module("jinja2")
    except ImportError:
        raise ImportError("a chat template needs jinja2; install it with: pip install 'echo-jax[hf]'") from None
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    stated = (
        read_object(folder / TOKENIZER_CONFIG, "tokenizer settings") if (folder / TOKENIZER_CONFIG).is_file() else {}
    )
    named = {name: token_text(stated.get(name)) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=True,
            enable_thinking=thinking,
            thinking=thinking,
            **named,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ValueError(f"the chat template of {str(folder)!r} refuses these messages: {error}") from None
