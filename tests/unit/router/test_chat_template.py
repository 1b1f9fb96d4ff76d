"""Chats rendered by the template itself: the same text as by transformers' wrapper around it."""

from typing import Any

import pytest

from disagg.errors import RequestError
from disagg.router.chat import Chat
from disagg.router.tokenizer import Tokenizer

USER = {"role": "user", "content": "naïve <|end|> {{ 1 }} 5 €\n"}
ROLES = ("system", "user", "assistant", "user")
CHATS = {
    "one": (USER,),
    "several": tuple({"role": role, "content": f" {role} "} for role in ROLES),
    "empty": ({"role": "user", "content": ""},),
}
OTHERS = {
    "a name": Chat(({**USER, "name": "bob"},)),
    "no content": Chat(({"role": "assistant", "content": None},)),
    "reasoning": Chat(({"role": "assistant", "content": "x", "reasoning_content": "y"},)),
    "variables": Chat((USER,), template_kwargs={"thinking": True}),
    "no messages": Chat(()),
}
EVERYTHING = (
    "{{ bos_token }}{% for message in messages %}{{ loop.index }}{{ message.role }}"
    "{{ message['content'] | trim | tojson }}{{ message.name is defined }}{{ message.items() }}"
    "{% if message.content == 'stop' %}{{ raise_exception('no stop') }}{% endif %}{% endfor %}"
    "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ tools is none }}{{ documents }}"
    "{{ add_generation_prompt }}{{ eos_token }}{{ unknown is defined }}{{ thinking is defined }}"
)


@pytest.fixture(params=["the checkpoint's", "one with tools", "everything"])
def tokenizer(request: Any, model_dir: Any, chat_checkpoint: Any, tmp_path: Any) -> Tokenizer:
    if request.param == "everything":
        file = tmp_path / "template.jinja"
        file.write_text(EVERYTHING)
        return Tokenizer(model_dir, chat_template=str(file))
    return Tokenizer(model_dir if request.param == "the checkpoint's" else chat_checkpoint)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", CHATS)
def test_a_plain_chat_is_the_same_text(
    tokenizer: Tokenizer, name: str, add_generation_prompt: bool, monkeypatch: Any
) -> None:
    template, chat = tokenizer._template, Chat(CHATS[name])
    wrapped = tokenizer._tokenizer.apply_chat_template(
        list(chat.messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    monkeypatch.setattr(template, "_tokenizer", None)  # it is not asked
    assert template.render(chat, add_generation_prompt=add_generation_prompt) == wrapped


@pytest.mark.parametrize("name", OTHERS)
def test_other_chats_go_through_the_wrapper(
    tokenizer: Tokenizer, name: str, monkeypatch: Any
) -> None:
    """Negative control: what the wrapper changes, or may, it is given."""
    monkeypatch.setattr(tokenizer._template, "_render_plain", lambda **given: "not here")
    try:
        text = tokenizer._template.render(OTHERS[name])
    except RequestError:
        return
    assert text != "not here"


def test_a_template_that_refuses_is_the_clients_error(model_dir: Any, tmp_path: Any) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(EVERYTHING)
    template = Tokenizer(model_dir, chat_template=str(file))._template
    with pytest.raises(RequestError, match="the chat template refuses these messages: no stop"):
        template.render(Chat(({"role": "user", "content": "stop"},)))


def test_a_template_that_is_none_is_refused_where_it_is_used(model_dir: Any, tmp_path: Any) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% nothing %}")
    template = Tokenizer(model_dir, chat_template=str(file))._template
    with pytest.raises(RequestError, match="refuses these messages"):
        template.render(Chat((USER,)))


def test_who_renders_in_its_own_way_is_left_to_it(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    from disagg.router import chat_template

    kind = type(tokenizer._tokenizer)
    text = tokenizer._template.text
    assert chat_template._plain_renderer(tokenizer._tokenizer, text) is not None
    monkeypatch.setattr(kind, "apply_chat_template", lambda *given, **more: "own", raising=False)
    assert chat_template._plain_renderer(tokenizer._tokenizer, text) is None
