"""How requests ask for a shape of their output, and what reaches the engine (G01, G02)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manyroots.structured_outputs import StructuredOutputsParams
from tests.unit.api.fake_engine import FakeEngine, script
from tests.unit.api.harness import Harness, error_of
from tests.unit.grammar.tiny_grammars import cache

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GRAMMARS = cache()

FIELDS: list[tuple[dict[str, Any], StructuredOutputsParams | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        StructuredOutputsParams(json=SCHEMA),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
    ({"structured_outputs": {}}, None),
    ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputsParams(json=json.dumps(SCHEMA))),
    ({"guided_regex": "a|b"}, StructuredOutputsParams(regex="a|b")),
    ({"guided_choice": ["x", "y"]}, StructuredOutputsParams(choice=("x", "y"))),
    ({"guided_grammar": 'start: "x"'}, StructuredOutputsParams(grammar='start: "x"')),
    # SGLang's names.
    ({"regex": "a|b"}, StructuredOutputsParams(regex="a|b")),
    ({"ebnf": 'root ::= "x"'}, StructuredOutputsParams(grammar='root ::= "x"')),
    ({"json_schema": json.dumps(SCHEMA)}, StructuredOutputsParams(json=json.dumps(SCHEMA))),
    # Other servers' forms: llama.cpp's and Together's, then TGI's, which huggingface_hub sends.
    *(
        ({"response_format": {"type": kind, field: SCHEMA}}, StructuredOutputsParams(json=SCHEMA))
        for kind, field in (
            ("json_object", "schema"),
            ("json_schema", "schema"),
            ("json_object", "value"),
            ("json", "value"),
        )
    ),
    (
        {"response_format": {"type": "regex", "value": "a|b"}},
        StructuredOutputsParams(regex="a|b"),
    ),
    # The same for servers of two ages, as guidance sends it.
    (
        {"structured_outputs": {"regex": "a+"}, "guided_regex": "a+"},
        StructuredOutputsParams(regex="a+"),
    ),
]


@pytest.mark.parametrize(("fields", "wanted"), FIELDS, ids=str)
async def test_g01_every_way_to_ask_reaches_the_engine(
    fields: dict[str, Any], wanted: StructuredOutputsParams | None
) -> None:
    harness = Harness()
    for response in (
        await harness.complete(max_tokens=1, **fields),
        await harness.chat(max_tokens=1, **fields),
    ):
        assert response.status_code == 200, response.text
    given = [submit.sampling.structured_outputs for submit in harness.engine.submitted]
    assert given == [wanted, wanted]


async def test_g01_two_shapes_that_differ_are_refused_by_both_names() -> None:
    response = await Harness().chat(structured_outputs={"regex": "a+"}, guided_regex="b+")
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "guided_regex"
    assert "structured_outputs and guided_regex" in error["message"]


def follows(params: StructuredOutputsParams, text: str) -> bool:
    """Whether a whole text is one that the grammar allows."""
    matcher = GRAMMARS.compile(params).start()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string"}), tool("now")]


def call(name: str, arguments: str) -> str:
    text = f'{{"name": "{name}", "arguments": {arguments}}}'
    return f"<tool_call>\n{text}\n</tool_call>"


KNOWS_TOOLS = "{{ tools | length }}{{ messages[-1].content }}"


async def forced(choice: Any, **fields: Any) -> StructuredOutputsParams:
    harness = Harness(FakeEngine(script(*b"x")), template=KNOWS_TOOLS)
    response = await harness.chat(tools=TOOLS, tool_choice=choice, **fields)
    assert response.status_code == 200, response.text
    wanted = harness.engine.submitted[0].sampling.structured_outputs
    assert wanted is not None
    return wanted


async def test_g02_a_required_call_is_one_of_the_tools() -> None:
    wanted = await forced("required")
    weather, now = call("weather", '{"city": "Oslo"}'), call("now", "{}")
    assert follows(wanted, weather)
    assert follows(wanted, f"{now}\n{weather}")
    assert not follows(wanted, call("weather", '{"town": "Oslo"}'))
    assert not follows(wanted, call("other", "{}"))
    assert not follows(wanted, "Oslo")
    alone = await forced("required", parallel_tool_calls=False)
    assert follows(alone, now)
    assert not follows(alone, f"{now}\n{weather}")


@pytest.mark.parametrize("word", ["auto", "none", "required"])
async def test_g02_a_choice_may_be_a_word_in_an_object(word: str) -> None:
    """G02: as Cursor writes it."""
    prompts, shapes = [], []
    for choice in (word, {"type": word}):
        harness = Harness(template=KNOWS_TOOLS.replace("tools | length", "tools"))
        response = await harness.chat(tools=TOOLS, tool_choice=choice)
        assert response.status_code == 200, response.text
        [submit] = harness.engine.submitted
        prompts.append(submit.prompt)
        shapes.append(submit.sampling.structured_outputs)
    assert prompts[0] == prompts[1]
    assert shapes[0] == shapes[1]


async def test_g02_a_named_call_is_that_tool() -> None:
    wanted = await forced({"type": "function", "function": {"name": "now"}})
    assert follows(wanted, call("now", "{}"))
    assert not follows(wanted, call("weather", '{"city": "Oslo"}'))


async def test_g02_a_named_call_is_one_call_unless_more_are_asked_for() -> None:
    """A small model would go on calling until it is cut short, and agents run no tools then."""
    named = {"type": "function", "function": {"name": "now"}}
    twice = f"{call('now', '{}')}\n{call('now', '{}')}"
    assert not follows(await forced(named), twice)
    assert follows(await forced(named, parallel_tool_calls=True), twice)


async def test_g02_a_forced_call_comes_behind_the_reasoning() -> None:
    harness = Harness(FakeEngine(script(*b"x")), template=KNOWS_TOOLS + "{# </think> #}")
    await harness.chat(tools=TOOLS, tool_choice="required")
    wanted = harness.engine.submitted[0].sampling.structured_outputs
    assert wanted is not None
    assert follows(wanted, call("now", "{}"))
    assert follows(wanted, f"<think>I <must>\n call</think>\n\n{call('now', '{}')}")
    assert not follows(wanted, f"I must {call('now', '{}')}")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_g02_a_typed_answer_beside_tools_leaves_the_choice(path: str) -> None:
    """G02: agents send the type of their last answer with every turn. A call may be made instead,
    also of a tool with a schema that could not be forced."""
    odd = {"type": "object", "properties": {"a": {"type": "string"}}, "not": {}}
    harness = Harness(template=KNOWS_TOOLS)
    user = [{"role": "user", "content": "hi"}]
    typed = {"type": "json_schema", "schema": SCHEMA, "name": "x"}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": user,
            "tools": [{"type": "function", "function": {"name": "now", "parameters": odd}}],
            "response_format": {"type": "json_schema", "json_schema": typed},
        },
        "/v1/responses": {
            "input": user,
            "tools": [{"type": "function", "name": "now", "parameters": odd}],
            "text": {"format": typed},
        },
        "/v1/messages": {
            "messages": user,
            "tools": [{"name": "now", "input_schema": odd}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "max_tokens": 8,
        },
    }
    response = await harness.post(path, {"model": "tiny"} | asked[path])
    assert response.status_code == 200, response.text
    wanted = harness.engine.submitted[0].sampling.structured_outputs
    assert wanted is not None
    matcher = GRAMMARS.compile(wanted).start()
    for text in ('{"a": 1}', '<tool_call>\n{"name": "now", "arguments": {"a": "b"}}\n</tool_call>'):
        tokens, trial = list(text.encode()), matcher.deep_copy()
        assert trial.try_consume_tokens(tokens) == len(tokens)
        assert trial.is_accepting()


async def test_g02_tools_that_cannot_be_honoured_are_refused_where_a_call_is_forced() -> None:
    harness = Harness(template=KNOWS_TOOLS)
    for items in ({}, {"enum": list("abcdefgh")}):
        odd = tool("odd", a={"type": "array", "uniqueItems": True, "items": items})
        response = await harness.chat(tools=[odd], tool_choice="required")
        assert error_of(response)["param"] == "tools"
        assert "uniqueItems" in error_of(response)["message"]
    fields = {"tools": [tool("now")], "tool_choice": "required", "guided_regex": "a"}
    assert error_of(await harness.chat(**fields))["param"] == "guided_regex"


async def test_g02_a_forced_call_goes_before_the_shape_of_the_last_answer() -> None:
    """Agents with a type for their result and a tool that must be called first send both."""
    harness = Harness(template=KNOWS_TOOLS)
    fields = {"tools": [tool("now")], "tool_choice": "required", "max_tokens": 4}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    await harness.chat(**fields)
    await harness.chat(**fields, response_format=shape)
    alone, both = (submit.sampling.structured_outputs for submit in harness.engine.submitted)
    assert alone is not None
    assert both == alone


def allowed(mode: str, *names: str, deeper: bool = True) -> dict[str, Any]:
    """OpenAI's choice of some tools, as chats write it and as responses do."""
    if not deeper:
        tools = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    chosen = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}


@pytest.mark.parametrize("deeper", [True, False])
async def test_g02_a_choice_among_some_of_the_tools(deeper: bool) -> None:
    wanted = await forced(allowed("required", "now", deeper=deeper))
    assert follows(wanted, call("now", "{}"))
    assert not follows(wanted, call("weather", '{"city": "Oslo"}'))


@pytest.mark.parametrize(
    "choice",
    [
        allowed("required", "nobody"),
        allowed("maybe", "now"),
        allowed("auto"),
        {"type": "allowed_tools", "allowed_tools": 5},
        {"type": "allowed_tools", "mode": "auto", "tools": [5]},
    ],
)
async def test_g02_what_some_of_the_tools_cannot_be(choice: Any) -> None:
    response = await Harness(template=KNOWS_TOOLS).chat(tools=TOOLS, tool_choice=choice)
    assert response.status_code == 400
    assert error_of(response)["param"] == "tool_choice"
