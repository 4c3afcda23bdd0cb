"""What a caller asks for, as a grammar, or refused with the reason (G01)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manyroots.errors import RequestError
from manyroots.grammar.checks import check_structure
from manyroots.structured_outputs import StructuredOutputsParams
from tests.helpers.schemas import REFUSED, schema
from tests.helpers.seeded import Draw
from tests.unit.grammar.tiny_grammars import cache

GRAMMARS = cache()


def follows(params: StructuredOutputsParams, text: str) -> bool:
    matcher = GRAMMARS.compile(params).start()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("refused", REFUSED, ids=str)
def test_g01_a_schema_is_refused_for_what_it_says_and_cannot_be_honoured(refused: Any) -> None:
    wanted = {"type": "object", "properties": {"a": refused}, "required": ["a"]}
    with pytest.raises(RequestError, match=r"my_field can't be honoured: .+") as caught:
        check_structure(StructuredOutputsParams(json=wanted), "my_field")
    assert caught.value.field == "my_field"


@pytest.mark.parametrize(
    "names",
    [
        {"$id": "Output Format"}, {"$id": "日本 50%"}, {"$id": "urn:a:b"}, {"$id": "https://a.b/c"},
        {"$schema": "http://json-schema.org/schema#"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
    ],
)  # fmt: skip
def test_g01_titles_in_the_place_of_names_are_no_fault(names: dict[str, str]) -> None:
    """G01: griptape writes one as `$id`, genson the address of whatever dialect is newest."""
    inner = {"$defs": {"city": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/city"}}}
    check_structure(StructuredOutputsParams(json=json.dumps({"type": "object", **inner, **names})))


def test_g01_a_caller_cannot_make_a_schema_lenient() -> None:
    wanted = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match="uniqueItems"):
        check_structure(StructuredOutputsParams(json=wanted))


def test_g01_five_hundred_schemas_can_be_honoured() -> None:
    for seed in range(500):
        check_structure(StructuredOutputsParams(json=schema(Draw(seed))))


def test_g01_a_regex_matches_the_whole_text_with_anchors_and_without() -> None:
    for regex in ("a+b", "^a+b$", "^a+b"):
        params = StructuredOutputsParams(regex=regex)
        assert follows(params, "aab")
        assert not follows(params, "xaab")
    assert follows(StructuredOutputsParams(regex=r"a\$"), "a$")


def test_g01_space_in_json_has_an_end() -> None:
    params = StructuredOutputsParams(json={"type": "array", "items": {"type": "null"}})
    assert follows(params, "[\n    null,\n    null\n]")
    assert not follows(params, "[" + " " * 41 + "null]")


def test_g01_a_schema_may_be_true_and_is_an_object_else() -> None:
    assert follows(StructuredOutputsParams(json="true"), '"anything"')
    for text in ("false", "[]", "3", "{"):
        with pytest.raises(RequestError, match="can't be honoured"):
            check_structure(StructuredOutputsParams(json=text))


def test_g01_lark_and_gbnf_are_told_apart() -> None:
    assert follows(StructuredOutputsParams(grammar='root ::= "a" [0-9]'), "a7")
    assert follows(StructuredOutputsParams(grammar='start: "a" /[0-9]/'), "a7")
    wanted = StructuredOutputsParams(grammar='start: %json {"type": "null"} "!"')
    assert follows(wanted, "null!")
