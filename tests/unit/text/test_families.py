"""Every family's way to write calls: chosen by its template, read back, and forced (G02, G03)."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from manyroots.grammar.cache import GrammarCache
from manyroots.grammar.rows import GrammarRows
from manyroots.grammar.vocabulary import Vocabulary
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.text.chat import ChatTemplate
from manyroots.text.formats import harmony
from manyroots.text.formats.choice import choose_format
from manyroots.text.formats.thinking import ThinkingMarks
from manyroots.text.tokenizer import SpecialTokens, Tokenizer
from manyroots.text.tools import check_tools
from tests.helpers.family_templates import TEMPLATES
from tests.helpers.seeded import Draw, for_seeds
from tests.soaks import bfcl
from tests.unit.grammar.tiny_grammars import allowed
from tests.unit.text.tiny_tokenizer import BOS, EOS, tiny_backend

GRAMMARS = GrammarCache(bfcl.bytes_vocabulary)
NUM_TOKENS = 257
USER = [{"role": "user", "content": "Rain, tomorrow?"}]


def function(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    function(
        "geo.get_weather",
        ["city"],
        city={"type": "string", "enum": ["Oslo", "Łódź", "a \"b\""]},
        days={"type": "integer", "minimum": 0, "maximum": 99},
        exact={"type": "boolean"},
    ),
    function("now", []),
    function("note", ["text", "tags"], text={"type": "string"},
             tags={"type": "array", "items": {"type": "integer"}, "maxItems": 2}),
]  # fmt: skip
CALLS: list[list[bfcl.Call]] = [
    [("now", {})],
    [("geo.get_weather", {"city": "Łódź", "days": 3, "exact": True})],
    [("geo.get_weather", {"city": "Oslo", "exact": False}), ("now", {})],
    [("note", {"text": "lines\n\n and <tags> {too}, \"quoted\" \\ [x] 'y'", "tags": [1, -2]})],
    [("note", {"text": "", "tags": []})],
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_g02_a_format_is_chosen_by_the_template(name: str) -> None:
    chosen = choose_format(TEMPLATES[name])
    assert chosen.tools.name == name.partition(",")[0]
    assert chosen.thinking is None


@pytest.mark.parametrize(
    ("words", "marks"),
    [
        ("<think> </think>", ("<think>", "</think>")),
        ("{% set x = m.split('</think>') %}", ("<think>", "</think>")),
        ("[THINK] [/THINK]", ("[THINK]", "[/THINK]")),
        ("<|channel>thought <channel|>", ("<|channel>", "<channel|>", "thought\n", True)),
        ("nothing", None),
    ],
)
def test_g03_reasoning_is_chosen_by_the_template(words: str, marks: tuple[Any, ...] | None) -> None:
    chosen = choose_format(words)
    assert chosen.thinking == (None if marks is None else ThinkingMarks(*marks))
    assert choose_format(words, None, "none").thinking is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_g02_what_a_family_writes_is_read_back_and_can_be_forced(name: str) -> None:
    """G02: calls written by the template, cut at random; and the grammar of a forced call."""
    template = ChatTemplate(TEMPLATES[name], {})
    for place, calls in enumerate(CALLS):
        record = bfcl.Record(f"{name} {place}", USER, TOOLS, calls)
        counts = bfcl.check(record, template, GRAMMARS)
        assert counts["read back"] == 1
        is_one_too_many = name == "openai" and len(calls) > 1  # which forces a single call
        assert counts["not allowed" if is_one_too_many else "allowed"] == 1, (name, calls)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "openai"])
@for_seeds(4)
def test_g02_whatever_a_grammar_lets_through_is_a_call_by_its_schema(draw: Draw, name: str) -> None:
    """G02: tokens drawn at random among those that the grammar of a forced call allows.
    (gpt-oss may reason before, at any length.)"""
    tools = TOOLS[:2]
    use = check_tools(tools, "required", draw.flag())
    chosen = choose_format(TEMPLATES[name])
    wanted = StructuredOutputsParams(grammar=chosen.tools.grammar(use, json.dumps))
    rows = GrammarRows(NUM_TOKENS)
    rows.begin(0, GRAMMARS.compile(wanted), 0)
    tokens: list[int] = []
    while tokens[-1:] != [256]:
        masks, failures = rows.masks({0: np.array(tokens, np.int32)})
        assert not failures
        left = sorted(allowed(masks[0]) - {9, 10, 13, 32}) or sorted(allowed(masks[0]))
        tokens.append(256 if 256 in left and draw.random() < 0.5 else draw.choice(left))
        assert len(tokens) < 4000
    output = chosen.output(use)
    output.push(bytes(tokens[:-1]).decode())
    output.finish()
    assert output.answer.content is None
    assert output.answer.tool_calls
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in output.answer.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


ANSWER: dict[str, Any] = {
    "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
    "additionalProperties": False,
}  # fmt: skip


@functools.cache
def marked() -> tuple[Tokenizer, GrammarCache]:
    """A tokenizer in which harmony's marks are special tokens, and grammars for it."""
    backend = tiny_backend()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in harmony.MARKS])
    tokenizer = Tokenizer(backend, SpecialTokens(bos=BOS, eos=EOS), None)
    vocabulary = Vocabulary(
        pieces=[tokenizer.token_bytes(token) for token in range(backend.get_vocab_size())],
        special_ids=tokenizer.special_ids,
        eos_ids=[backend.token_to_id(EOS)],
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    return tokenizer, GrammarCache(lambda: vocabulary)


def structure(name: str, choice: Any, asked_as: str = "response_format") -> StructuredOutputsParams:
    """Of a typed answer beside tools."""
    chosen = choose_format(TEMPLATES[name], None, "qwen3" if name == "hermes" else None)
    wanted = StructuredOutputsParams(json=json.dumps(ANSWER), asked_as=asked_as)
    use = check_tools(TOOLS, choice)
    made = chosen.structure(wanted, use, prompt="", tokenizer=marked()[0])
    assert made is not None
    return made


def follows(wanted: StructuredOutputsParams, text: str) -> bool:
    tokenizer, grammars = marked()
    matcher, tokens = (
        grammars.compile(wanted).start(),
        tokenizer.encode(text, add_special_tokens=False),
    )
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", TEMPLATES)
def test_g02_a_typed_answer_leaves_the_model_its_calls(name: str) -> None:
    """G02: an agent offers tools with a type for its last answer. Where the choice is the model's,
    it may call, and what else it says is of that type."""
    made, template = structure(name, "auto"), ChatTemplate(TEMPLATES[name], {})
    before = "<|channel|>final<|message|>" if name == "openai" else ""
    assert follows(made, before + '{"name": "now"}')
    assert not follows(made, before + "It is noon.")
    if template.format.tools.is_like_json:
        assert made.instead is None
        return
    for calls in CALLS:
        messages = USER + bfcl.messages_of(calls)
        use = check_tools(TOOLS, "auto")
        history = template.render(messages, use=use, add_generation_prompt=False)
        text = history.rpartition(bfcl.BEGIN)[2].removesuffix(bfcl.END)
        is_one_too_many = name == "openai" and len(calls) > 1
        assert follows(made, text.strip().removesuffix("<|call|>")) is not is_one_too_many


def test_g02_thoughts_come_before_a_typed_answer_and_before_calls() -> None:
    made = structure("hermes", None)
    call = '<tool_call>\n{"name": "now", "arguments": {"any": 1}}\n</tool_call>'
    for text in ('{"name": "now"}', call):
        assert follows(made, f"<think>\nhm {{\n</think>\n\n{text}")
        assert follows(made, text)


@pytest.mark.parametrize(
    ("choice", "asked_as"),
    [("none", "response_format"), ("required", "response_format"), ("auto", "structured_outputs")],
)
def test_g02_no_calls_where_none_may_be_and_no_answer_where_one_must(
    choice: str, asked_as: str
) -> None:
    """G02: vLLM's own field is a shape of every completion."""
    assert structure("hermes", choice, asked_as).instead is None


def test_g02_mistrals_ids_are_of_the_kind_that_its_template_takes() -> None:
    output = choose_format(TEMPLATES["mistral"]).output(check_tools(TOOLS, "auto"))
    output.push('[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    output.finish()
    [call] = output.answer.tool_calls
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_g02_ids_of_other_servers_fit_mistrals_template() -> None:
    template = ChatTemplate(
        "[TOOL_CALLS]{% for m in messages %}{{ m.tool_calls[0].id if m.tool_calls }}"
        "{{ m.tool_call_id if m.tool_call_id }} {% endfor %}{{ tools }}",
        {},
    )
    call = {"id": "call_1234567890abcdef", "function": {"name": "now", "arguments": "{}"}}
    history = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "noon"},
    ]
    first, second, _ = template.render(history).removeprefix("[TOOL_CALLS]").split()
    assert first == second
    assert len(first) == 9


def test_g03_reasoning_in_the_history_reaches_the_template() -> None:
    template = ChatTemplate(
        "{{ messages[1].reasoning_content }}|{{ messages[1].thinking }}|{{ tools }}"
        "{# tool_calls #}",
        {},
    )
    call = {"id": "c", "function": {"name": "now", "arguments": "{}"}}
    for name in ("reasoning_content", "reasoning"):
        answer = {"role": "assistant", "content": "yes", name: "because"}
        assert template.render([*USER, answer]) == "because||None"
    answer = {"role": "assistant", "tool_calls": [call], "reasoning_content": "because"}
    assert template.render([*USER, answer]) == "because|because|None"


def test_g03_gpt_oss_knows_three_efforts() -> None:
    template = ChatTemplate("{{ reasoning_effort }}<|channel|><|message|>", {})
    assert template.render(USER, reasoning_effort="low").startswith("low")
    for effort, nearest in (("none", "low"), ("minimal", "low"), ("max", "high")):
        assert template.render(USER, reasoning_effort=effort).startswith(nearest)
