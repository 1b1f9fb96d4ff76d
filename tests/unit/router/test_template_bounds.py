"""Chat templates that would hold a thread, or fill the memory, for ever."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError, RequestError
from disagg.router import template_bounds
from disagg.router.chat import Chat
from disagg.router.tokenizer import Tokenizer
from tests.unit.router.test_http_errors import check_error

ROUNDS = "{% for i in range(99999) %}{% for j in range(99999) %}$$${% endfor %}{% endfor %}"
"""Ten thousand million, which Jinja's sandbox allows."""
ENDLESS = {
    "loops": ROUNDS.replace("$$$", ""),
    "a condition": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}"
    "{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "callers": "{% macro f(n) %}{% if n %}{% call f(n - 1) %}{% endcall %}{% call f(n - 1) %}"
    "{% endcall %}{% endif %}{{ caller is defined }}{% endmacro %}{{ f(99) }}",
    "blocks": "{% set left = namespace(n=99) %}{% block a %}{% if left.n %}"
    "{% set left.n = left.n - 1 %}{{ self.a() }}{{ self.a() }}{% set left.n = left.n + 1 %}"
    "{% endif %}{% endblock %}",
    "one loop in itself": "{% for i in [99] recursive %}"
    "{% if i %}{{ loop([i - 1]) }}{{ loop([i - 1]) }}{% endif %}{% endfor %}",
    "a value": "{% set x %}" + ROUNDS.replace("$$$", "") + "{% endset %}",
}
LONG = {
    "as it goes": ROUNDS.replace("$$$", "a" * 50),
    "a value": "{% set x %}{% for i in range(99999) %}" + "a" * 100 + "{% endfor %}{% endset %}",
    "a macro": "{% macro f() %}{% for i in range(99999) %}"
    + "a" * 100
    + "{% endfor %}{% endmacro %}{{ f() }}",
}
ON_REQUEST = "{% for m in messages %}{{ m.content }}{% if m.content == 'go' %}$$${% endif %}"
ON_REQUEST += "{% endfor %}{{ thinking }}"


def chat(text: str, **template_kwargs: Any) -> Chat:
    return Chat(({"role": "user", "content": text},), template_kwargs=template_kwargs)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template has a fifth of a second."""
    monkeypatch.setattr(template_bounds, "SECONDS_MAX", 0.2)


@pytest.fixture
def made(model_dir: Path, tmp_path: Path) -> Any:
    """Load a template."""

    def load(text: str, **more: Any) -> Tokenizer:
        file = tmp_path / "template.jinja"
        file.write_text(text)
        return Tokenizer(model_dir, chat_template=str(file), **more)

    return load


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_refused_at_the_start(made: Any, name: str) -> None:
    began_s = time.thread_time()
    with pytest.raises(ConfigError, match="the chat template does not end") as refused:
        made(ENDLESS[name])
    assert refused.value.param == "model.chat_template"
    assert time.thread_time() - began_s < 3


@pytest.mark.parametrize("name", LONG)
def test_a_template_that_writes_without_end_is_refused_at_the_start(made: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=r"more than 8388608 .*limits\.prompt_bytes_max"):
        made(LONG[name])


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("more", [{}, {"thinking": True}], ids=["plain", "by the wrapper"])
def test_for_some_messages_alone_it_is_the_requests_error(made: Any, more: Any) -> None:
    tokenizer = made(ON_REQUEST.replace("$$$", ENDLESS["loops"]))
    assert tokenizer.encode_chat(chat("stay", **more))  # negative control
    with pytest.raises(RequestError, match="does not end") as refused:
        tokenizer.encode_chat(chat("go", **more))
    assert refused.value.param == "messages"
    assert tokenizer.encode_chat(chat("stay", **more))  # the next has its own time


@pytest.mark.parametrize("more", [{}, {"thinking": True}], ids=["plain", "by the wrapper"])
def test_what_it_writes_is_bounded_by_the_limit_of_prompts(made: Any, more: Any) -> None:
    tokenizer = made(ON_REQUEST.replace("$$$", "a" * 90), prompt_chars_max=100)
    assert tokenizer.encode_chat(chat("go", **more))  # negative control
    with pytest.raises(RequestError, match="more than 100 characters"):
        tokenizer.encode_chat(Chat(chat("go").messages * 2, template_kwargs=more))


def test_a_small_limit_of_prompts_does_not_stop_the_start(made: Any) -> None:
    with pytest.raises(RequestError, match="more than 5 characters"):
        made("a template", prompt_chars_max=5).encode_chat(chat("x"))


def test_a_pipe_is_no_template(model_dir: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "template.jinja"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*is no file"):
        Tokenizer(model_dir, chat_template=str(pipe))


def test_lipsum_is_none_of_a_templates_names(made: Any) -> None:
    with pytest.raises(RequestError, match="'lipsum' is undefined"):
        made("{{ lipsum(n=100000000) }}").encode_chat(chat("x"))


@pytest.mark.parametrize("more", [{}, {"thinking": True}], ids=["plain", "by the wrapper"])
async def test_half_a_surrogate_pair_is_a_400(
    open_house: Any, tmp_path: Path, more: dict[str, Any]
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ '\\ud800' }}{{ thinking }}")
    house = await open_house(chat_template=str(file))
    await house.add()
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": more}
    answer = await house.http.post("/v1/chat/completions", json={"model": "tiny"} | body)
    check_error(answer, 400, "messages", "invalid_value")
    assert "half a surrogate pair" in answer.text
