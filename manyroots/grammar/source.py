"""What a caller asks for, as one grammar of `llguidance`.

Takes `StructuredOutputsParams`; gives the grammar's text, checked without a vocabulary, or raises
RequestError with the reason. What a JSON schema says and can't be honoured is refused, never left
out.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from manyroots.errors import RequestError
from manyroots.grammar.library import matchers
from manyroots.json_schemas import WHITE_SPACE, closed
from manyroots.structured_outputs import StructuredOutputsParams

JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": WHITE_SPACE,
    "whitespace_flexible": True,
    "coerce_one_of": False,
    "lenient": False,
}
_MAX_REASON_CHARACTERS = 600


def check_structure(params: StructuredOutputsParams, field: str = "structured_outputs") -> None:
    """Raise RequestError if this can't be honoured. `field` is what the caller called it."""
    matchers(field)
    fault = _fault(replace(params, prefix=None))
    if fault is not None:
        raise RequestError(f"{field} can't be honoured: {fault}", field=field)


def grammar_text(params: StructuredOutputsParams) -> str:
    """The whole grammar. Raises ValueError for what is none."""
    grammars = [{**_answer(params), "name": "answer"}]
    if params.prefix is not None:
        lark = f"start: prefix @answer\n{params.prefix}"
        grammars.insert(0, {"name": "main", "lark_grammar": lark})
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
    from llguidance.gbnf_to_lark import any_to_lark

    return {"lark_grammar": any_to_lark(text)}


def _schema(schema: Any) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, not {json.dumps(schema)[:60]}")
    return {"json_schema": {**closed(schema), "x-guidance": JSON_OPTIONS}}


def _unanchored(regex: str) -> str:
    """The whole text is matched anyway."""
    regex = regex.removeprefix("^")
    backslashes = re.search(r"(\\*)\$$", regex)
    return regex[:-1] if backslashes and len(backslashes[1]) % 2 == 0 else regex


@lru_cache(maxsize=256)
def _fault(params: StructuredOutputsParams) -> str | None:
    """Why it can't be honoured; None if it can."""
    try:
        reason = matchers().validate_grammar(grammar_text(params))
    except RecursionError:
        reason = "it is nested too deeply."
    except Exception as error:  # whatever a caller's text provokes in a parser
        reason = str(error) or type(error).__name__
    if not reason or reason.startswith("WARNING"):
        return None
    return " ".join(reason.split())[:_MAX_REASON_CHARACTERS]
