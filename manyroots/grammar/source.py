"""What a caller asks for, as one grammar of `llguidance`.

Takes `StructuredOutputsParams`; gives the grammar's text, within the bounds of depth, or raises
ValueError. What a JSON schema says and can't be honoured is refused, never left out.
"""

from __future__ import annotations

import json
import re
from typing import Any

from manyroots.grammar.bounded_strings import without_limits
from manyroots.grammar.bounds import check_lark, check_schema
from manyroots.grammar.json_schemas import WHITE_SPACE, closed
from manyroots.grammar.library import matchers
from manyroots.structured_outputs import StructuredOutputsParams

JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": WHITE_SPACE,
    "whitespace_flexible": True,
    "coerce_one_of": False,
    "lenient": False,
}


def grammar_text(params: StructuredOutputsParams) -> str:
    """The whole grammar. Raises ValueError for what is none."""
    answer = _answer(params)
    if "lark_grammar" in answer:
        check_lark(answer["lark_grammar"])
    return _whole(params, answer)


def text_without_limits(params: StructuredOutputsParams) -> str | None:
    """The grammar with strings of any length, where these are all that it limits; else None."""
    if params.kind != "json" or params.instead is not None:
        return None
    answer = _answer(params)
    schema = without_limits(answer["json_schema"])
    return None if schema is None else _whole(params, {"json_schema": schema})


def _whole(params: StructuredOutputsParams, answer: dict[str, Any]) -> str:
    grammars = [{**answer, "name": "answer"}]
    if params.prefix is not None or params.instead is not None:
        start = "start: @answer" if params.prefix is None else "start: prefix @answer"
        start += "" if params.instead is None else " | instead"
        # Both parts may have brought the same rules.
        rules = dict.fromkeys(f"{params.prefix or ''}\n{params.instead or ''}".split("\n"))
        grammars.insert(0, {"name": "main", "lark_grammar": "\n".join([start, *rules])})
    return json.dumps({"grammars": grammars})


def _answer(params: StructuredOutputsParams) -> dict[str, Any]:
    """What a caller asked for, as an entry of `llguidance`'s list of grammars."""
    match params.kind:
        case "json":
            return _schema(json.loads(params.json or ""))
        case "json_object":
            return _schema({"type": "object"})
        case "regex":
            made = matchers().grammar_from_regex(_unanchored(params.regex or ""))
            return {"lark_grammar": json.loads(made)["grammars"][0]["lark_grammar"]}
        case "choice":
            choices = " | ".join(json.dumps(text) for text in params.choice or ())
            return {"lark_grammar": f"start: {choices}"}
    text = params.grammar or ""
    # Lark's rules have a colon; GBNF's have two and an equals sign.
    if "::=" not in text:
        return {"lark_grammar": text}
    # Before it is translated, which takes the square of a chain's length.
    check_lark(text.replace("::=", ":").replace("-", "_"))
    from llguidance.gbnf_to_lark import any_to_lark

    return {"lark_grammar": any_to_lark(text)}


def _schema(schema: Any) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, not {json.dumps(schema)[:60]}")
    check_schema(schema)
    return {"json_schema": {**closed(schema), "x-guidance": JSON_OPTIONS}}


def _unanchored(regex: str) -> str:
    """The whole text is matched anyway."""
    regex = regex.removeprefix("^")
    backslashes = re.search(r"(\\*)\$$", regex)
    return regex[:-1] if backslashes and len(backslashes[1]) % 2 == 0 else regex
