"""Grammars that would end the process that reads them: refused with the reason (R03)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from manyroots.engine.grammar_compiles import GrammarCompiles
from manyroots.errors import RequestError
from manyroots.grammar import checks
from manyroots.grammar.bounds import MAX_DEPTH, MAX_OPTIONAL
from manyroots.grammar.checks import check_structure
from manyroots.grammar.trial import GrammarTrial
from manyroots.process.helper_process import HelperProcess
from manyroots.structured_outputs import StructuredOutputsParams
from tests.unit.grammar.tiny_grammars import cache

LINKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda to: {"$ref": to},
    "items": lambda to: {"type": "array", "items": {"$ref": to}},
    "property": lambda to: {"type": "object", "properties": {"a": {"$ref": to}}},
    "either": lambda to: {"anyOf": [{"type": "null"}, {"$ref": to}]},
    "prefix": lambda to: {"type": "array", "prefixItems": [{"$ref": to}]},
    "joined": lambda to: {"allOf": [{"$ref": to}]},
}


def references(link: Callable[[str], dict[str, Any]], num: int) -> dict[str, Any]:
    """A schema whose definitions refer to each other in a chain."""
    definitions = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(num)}
    return {"$defs": {**definitions, f"d{num}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def rules(num: int, sign: str = ":") -> str:
    name = "start" if sign == ":" else "root"
    chain = "\n".join(f'r{i}{sign} "a" r{i + 1}' for i in range(num))
    return f'{name}{sign} r0\n{chain}\nr{num}{sign} "b"'


def refusal(params: StructuredOutputsParams) -> str:
    with pytest.raises(RequestError) as caught:
        check_structure(params, "my_field")
    assert caught.value.field == "my_field"
    return str(caught.value)


@pytest.mark.parametrize("link", LINKS)
def test_r03_a_long_chain_of_references_is_refused_before_the_library_sees_it(link: str) -> None:
    said = refusal(StructuredOutputsParams(json=references(LINKS[link], 3000)))
    assert f"more than {MAX_DEPTH} levels deep" in said
    assert "shorten" in said


def test_r03_a_long_chain_of_rules_is_refused_before_the_library_sees_it() -> None:
    deep = json.dumps(references(LINKS["property"], 3000))
    for grammar in (rules(3000), rules(3000, " ::="), f"start: a\na: %json {deep}"):
        assert "levels deep" in refusal(StructuredOutputsParams(grammar=grammar))


@pytest.mark.parametrize("link", LINKS)
def test_r03_chains_up_to_the_bound_are_compiled(link: str) -> None:
    """Those of the longest links, too, by the engine's own compiler and on its thread."""
    num = MAX_DEPTH // 4
    params = StructuredOutputsParams(json=references(LINKS[link], num))
    if link != "joined":  # llguidance has a bound of its own there
        check_structure(params)
        assert cache().compile(params).num_characters > 0


def test_r03_many_rules_beside_each_other_are_no_chain() -> None:
    flat = "start: " + " | ".join(f"r{i}" for i in range(2000))
    flat += "".join(f'\nr{i}: "x{i}"\n  | "y{i}"' for i in range(2000))
    check_structure(StructuredOutputsParams(grammar=flat))
    wide = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(400)},
            "$defs": {"a": {"type": "array", "items": {"$ref": "#"}}}}  # fmt: skip
    check_structure(StructuredOutputsParams(json=wide))


def test_r03_more_optional_properties_than_can_be_followed_cost_nothing() -> None:
    """R03: 15,000 took API and engine 32 s before the refusal."""
    named = {f"p{i:05d}": {"type": "integer"} for i in range(15_000)}
    params = StructuredOutputsParams(json={"type": "object", "properties": named})
    check_structure(StructuredOutputsParams(regex="warm"))
    begin = time.process_time()
    said = refusal(params)
    assert time.process_time() - begin < 1
    assert "15000 optional properties" in said
    assert f"at most {MAX_OPTIONAL}" in said
    few = dict(list(named.items())[:MAX_OPTIONAL])
    params = StructuredOutputsParams(json={"type": "object", "properties": few})
    matcher = cache().compile(params).start()
    assert matcher.try_consume_tokens(list(b'{"p00499": 1}')) == 13, "and those can be followed"


def test_r03_a_grammar_that_ends_its_helper_is_refused_and_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R03: whatever the bounds miss costs one request; here the helper ends at every grammar."""
    trial = GrammarTrial()
    trial._helper = HelperProcess("tests.unit.grammar.test_trial")
    monkeypatch.setattr(checks, "_trial", lambda: trial)
    for _ in range(2):
        said = refusal(StructuredOutputsParams(regex="a+"))
        assert "it ended by SIGABRT" in said
        assert "split it" in said
    assert trial._helper.num_deaths == 1
    assert "ended its helper process" in caplog.text


def test_r03_a_grammar_that_is_known_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = GrammarTrial()
    monkeypatch.setattr(checks, "_trial", lambda: trial)
    params = StructuredOutputsParams(json=references(LINKS["items"], 50))
    check_structure(params)
    assert trial._helper.pid is not None
    trial.close()
    check_structure(params)
    assert trial._helper.pid is None, "the verdict is kept"


def test_r03_a_closed_engine_leaves_no_helper() -> None:
    grammars = cache()
    grammars.compile(StructuredOutputsParams(regex="a+"))
    helper = grammars._load().trial._helper
    assert helper.pid is not None
    GrammarCompiles(grammars).close()
    assert helper.pid is None


def test_r03_the_engine_compiles_nothing_that_its_trial_did_not_survive() -> None:
    grammars = cache()
    grammars._load().trial._helper = HelperProcess("tests.unit.grammar.test_trial")
    with pytest.raises(RequestError, match="it ended by SIGABRT"):
        grammars.compile(StructuredOutputsParams(regex="a+"))
    assert grammars.find(StructuredOutputsParams(regex="a+")) is None


if __name__ == "__main__":
    os.abort()
