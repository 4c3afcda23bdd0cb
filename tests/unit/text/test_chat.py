"""Chat templates: the model's words, within bounds, from checked messages."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from manyroots.errors import ConfigError, ModelError, RequestError
from manyroots.text.chat import ChatTemplate, load_chat_template
from manyroots.text.tokenizer import Tokenizer
from manyroots.text.tools import check_tools
from tests.unit.text.tiny_tokenizer import TEMPLATE, tiny_backend, tiny_tokenizer

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, {"bos_token": "<|begin|>", "eos_token": "<|end|>"})


def test_messages_become_one_prompt(template: ChatTemplate) -> None:
    assert template.render([USER]) == "<|begin|>user\nhi<|end|>\n<|begin|>assistant\n"
    assert template.render([USER], add_generation_prompt=False) == "<|begin|>user\nhi<|end|>\n"


def test_text_parts_are_joined(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = template.render([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert text == "<|begin|>user\na\nb<|end|>\n"


def test_developer_is_system_to_a_template_that_does_not_know_it(template: ChatTemplate) -> None:
    message = {"role": "developer", "content": "x"}
    assert template.render([message]).startswith("<|begin|>system\n")
    own = ChatTemplate("{% if messages[0].role == 'developer' %}dev{% endif %}", {})
    assert own.render([message]) == "dev"


def test_the_final_message_can_be_left_open(template: ChatTemplate) -> None:
    messages = [USER, {"role": "assistant", "content": "I am "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|begin|>user\nhi<|end|>\n<|begin|>assistant\nI am "
    with pytest.raises(RequestError, match="add_generation_prompt"):
        template.render(messages, continue_final_message=True)
    drops = ChatTemplate("nothing", {})
    with pytest.raises(RequestError, match="drops the final message"):
        drops.render(messages, add_generation_prompt=False, continue_final_message=True)


def test_tool_history_reaches_the_template_as_objects() -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments.city }}|{{ messages[2].content }}"
    function = {"name": "f", "arguments": '{"city": "Oslo"}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    assert ChatTemplate(source, {}).render(messages) == "Oslo|rain"


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": []}])
@pytest.mark.parametrize("role", ["tool", "function"])
def test_g04_a_tool_may_give_nothing_back(role: str, content: Any) -> None:
    source = "{% for m in messages %}{{ m.tool_calls }}{{ m.role }}={{ m.content }};{% endfor %}"
    messages = [USER, {"role": role, "name": "f", "tool_call_id": "c", **content}]
    assert ChatTemplate(source, {}).render(messages) == "user=hi;tool=;"


AS_DEEPSEEKS = (
    "{%- for m in messages -%}"
    "{%- if m['role'] == 'assistant' and m['content'] is none -%}"
    "{%- for c in m['tool_calls'] %}<call>{{ c['function']['name'] + c['function']['arguments'] }}"
    "{%- endfor -%}"
    "{%- elif m['content'] is not none -%}<{{ m['role'] }}>{{ m['content'] }}{%- endif -%}"
    "{%- endfor -%}"
)
PRINTED = (
    "{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- if m.content is not none -%}!"
    "{%- endif -%}{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% endfor %}"
    "{%- endfor -%}"
)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (AS_DEEPSEEKS, '<user>hi<call>f{"a": 1}<tool>42<assistant>ok'),
        (PRINTED, "<user>hi!<assistant>!<call>f<tool>42!<assistant>ok!"),
    ],
    ids=["told by none", "printed"],
)
def test_g04_calls_without_content_reach_templates_that_know_them_by_it(
    source: str, shown: str
) -> None:
    """The templates of DeepSeek's R1 distilled into Qwen and Llama dropped them else."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "assistant", "content": "ok"},
    ]
    assert ChatTemplate(source, {}).render(messages) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('{"city": "Os', {"_not_json": '{"city": "Os'}),  # cut short by max_tokens
        ('"Oslo"', {"_not_an_object": "Oslo"}),
        ("[" * 10_000, {"_not_json": "[" * 10_000}),
        ("", {}),
        ("null", {}),
        (None, {}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
    ],
    ids=["cut short", "a word", "deep", "empty", "null", "absent", "an object"],
)
def test_g04_a_chat_goes_on_whatever_its_calls_were(given: Any, shown: Any) -> None:
    """Templates iterate over the arguments: they are an object in every case."""
    source = "{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}"
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    text = ChatTemplate(source + "{% endfor %}", {}).render(messages)
    assert text == "".join(f"{key}={value}" for key, value in shown.items())


def test_options_are_those_the_template_reads(template: ChatTemplate) -> None:
    assert template.options == {"enable_thinking"}
    assert template.render([USER], options={"enable_thinking": True}).endswith("hm ")
    for options in ({"surprise": 1}, {"messages": "x"}, {"bos_token": "x"}):
        with pytest.raises(RequestError, match="enable_thinking") as caught:
            template.render([USER], options=options)
        assert caught.value.field == "chat_template_kwargs"
    for value in ([1], {"a": 1}, "x" * 2000):
        with pytest.raises(RequestError, match=r"chat_template_kwargs\.enable_thinking"):
            template.render([USER], options={"enable_thinking": value})


@pytest.mark.parametrize(
    ("words", "taken"),
    [("</think>", {"on"}), ("<|channel|><|message|>", {"on", "off"}), ("plain", {"off"})],
)
def test_g04_reasoning_may_be_switched_to_what_it_is_anyway(words: str, taken: set[str]) -> None:
    """Clients send the switch to every model; a template without it reasons always, or never."""
    template = ChatTemplate("{{ messages[0].content }}{# " + words + " #}", {})
    found = set()
    for name, value in (("on", True), ("off", False)):
        with contextlib.suppress(RequestError):
            assert template.render([USER], options={"enable_thinking": value}) == "hi"
            found.add(name)
    assert found == taken


IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([USER] * 10_001, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([USER, {"role": "wizard", "content": "hi"}], "messages[1].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [IMAGE]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "audio": {}}], "messages[0].audio"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_a_bad_message_is_refused_by_place(
    template: ChatTemplate, messages: list[Any], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        template.render(messages)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set _ = messages.pop() %}",
        "{{ '{0.__class__}'.format(1) ~ raise_exception('unreached') }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_change_its_input(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source, {}).render([USER])


def test_what_templates_are_written_against_is_there() -> None:
    source = (
        "{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(source, {}).render([USER]) == '{"a": "<é>"}14'


def test_a_broken_template_is_refused_at_start() -> None:
    with pytest.raises(ModelError, match="--chat-template"):
        ChatTemplate("{% for %}", {})


def test_the_operators_file_wins_over_the_models(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ eos_token }}{{ messages[0].content }}")
    loaded = load_chat_template(tokenizer, str(path))
    assert loaded is not None
    assert loaded.render([USER]) == "<|end|>hi"
    with pytest.raises(ConfigError, match="--chat-template"):
        load_chat_template(tokenizer, str(tmp_path / "missing"))
    assert load_chat_template(tiny_tokenizer(template=None), None) is None


FOR_TOOLS = (
    "{{ tools[0].function.name }}|{% for m in messages %}{{ m.content }}"
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
)
"""As Mistral's write calls."""


def test_a_template_of_its_own_for_tools_is_used_with_tools_alone(tmp_path: Path) -> None:
    """As transformers chooses between them; calls are read as that template writes them."""
    plain = tiny_tokenizer()
    both = Tokenizer(tiny_backend(), plain.special_tokens, "{{ messages[0].content }}", FOR_TOOLS)
    loaded = load_chat_template(both, None)
    assert loaded is not None
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert loaded.render([USER]) == "hi"
    assert loaded.render([USER], use=check_tools(tools, None)) == "add|hi"
    assert loaded.render([USER], use=check_tools(tools, "none")) == "hi"
    assert loaded.format == ChatTemplate(FOR_TOOLS, {}).format != ChatTemplate("", {}).format
    path = tmp_path / "t.jinja"
    path.write_text("{{ tools[0].function.name }}!")
    mine = load_chat_template(both, str(path))
    assert mine is not None
    assert mine.render([USER], use=check_tools(tools, None)) == "add!"
