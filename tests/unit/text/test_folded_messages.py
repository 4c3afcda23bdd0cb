"""Roles become those that a template knows, or are refused by name (G04)."""

from __future__ import annotations

import pytest

from manyroots.errors import RequestError
from manyroots.text.chat import ChatTemplate

ALTERNATING = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
)
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must be the first') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}"
    "{% for call in m.tool_calls %} {{ call.function.name }}{% endfor %}{% endfor %}"
)
AGENT = [
    {"role": "developer", "content": "a"},
    {"role": "system", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "system", "content": "d"},
    {"role": "assistant", "content": "e"},
    {"role": "user", "content": "f"},
]


def test_g04_several_system_messages_become_one_in_front() -> None:
    text = ChatTemplate(ONE_SYSTEM, {}).render(AGENT)
    assert text == "[system] a\n\nb[user] c\n\nd[assistant] e[user] f"


def test_g04_a_template_without_system_messages_sees_the_users() -> None:
    text = ChatTemplate(ALTERNATING, {}).render(AGENT)
    assert text == "[user] a\n\nb\n\nc\n\nd[assistant] e[user] f"


@pytest.mark.parametrize("answers", [["1", "2"], ["2", "1"], ["1"], []])
def test_g04_a_template_that_takes_one_call_at_once_sees_several_in_turn(
    answers: list[str],
) -> None:
    """G04: Llama's template refuses the two calls that its model made in one answer."""
    calls = [{"id": i, "function": {"name": f"f{i}", "arguments": "{}"}} for i in "12"]
    results = [{"role": "tool", "tool_call_id": i, "content": f"r{i}"} for i in answers]
    said = {"role": "assistant", "content": "a", "tool_calls": calls}
    chat = [{"role": "user", "content": "c"}, said, *results, {"role": "user", "content": "d"}]
    shown = {i: f"[tool] r{i}" if i in answers else "" for i in "12"}
    text = ChatTemplate(ONE_CALL, {}).render(chat)
    first, second = f"[assistant] a f1{shown['1']}", f"[assistant]  f2{shown['2']}"
    assert text == f"[user] c{first}{second}[user] d"


def test_g04_one_call_at_once_and_one_system_message() -> None:
    calls = [{"id": i, "function": {"name": f"f{i}", "arguments": "{}"}} for i in "12"]
    template = ChatTemplate(ONE_CALL + ONE_SYSTEM, {})
    text = template.render([*AGENT, {"role": "assistant", "tool_calls": calls}])
    assert text.startswith("[system] a\n\nb[user] c\n\nd[assistant] e[user] f[assistant]  f1")


def test_g04_neighbouring_answers_are_one_where_roles_must_alternate() -> None:
    """G04: a greeting and an answer, or an answer that was cut off and continued."""
    answers = [{"role": "assistant", "content": text} for text in "de"]
    chat = [{"role": "user", "content": "c"}, *answers, {"role": "user", "content": "f"}]
    assert ChatTemplate(ALTERNATING, {}).render(chat) == "[user] c[assistant] d\n\ne[user] f"
    assert ChatTemplate(ONE_SYSTEM, {}).render(chat) == "[user] c[assistant] d[assistant] e[user] f"


def test_g04_a_refusal_of_other_reasons_stays() -> None:
    template = ChatTemplate("{{ raise_exception('never') }}", {})
    with pytest.raises(RequestError, match="never"):
        template.render(AGENT)


@pytest.mark.parametrize(
    ("given", "shown"), [("developer", "system"), ("function", "tool"), ("model", "assistant")]
)
def test_g04_roles_of_other_apis_are_mapped(given: str, shown: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}{# tool_calls #}", {})
    assert template.render([{"role": given, "content": "x"}]) == shown


def test_g04_a_role_that_the_template_asks_for_is_passed_on() -> None:
    source = "{% for m in messages if m['role'] == 'observation' %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {})
    assert template.render([{"role": "observation", "content": "x"}]) == "x"
    with pytest.raises(RequestError, match=r"messages\[0\]\.role is 'wizard'.*observation"):
        template.render([{"role": "wizard", "content": "x"}])
