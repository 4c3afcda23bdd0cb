"""Tokens that a caller allows or forbids one by one, beside grammars and early ends."""

from __future__ import annotations

import numpy as np
import pytest

from manyroots.grammar.rows import GrammarRows
from manyroots.grammar.token_rules import TokenRules
from manyroots.sampling import ThinkingBudget
from manyroots.structured_outputs import StructuredOutputsParams
from tests.helpers.seeded import Draw, for_seeds
from tests.unit.grammar.tiny_grammars import EOS, VOCAB, allowed, cache

PROMPT = [1, 2, 3]


def begun(rules: TokenRules, **more: object) -> GrammarRows:
    rows = GrammarRows(VOCAB)
    rows.begin(0, None, len(PROMPT), rules=rules, **more)  # type: ignore[arg-type]
    return rows


def next_tokens(rows: GrammarRows, output: list[int]) -> set[int]:
    masks, failures = rows.masks({0: np.array([*PROMPT, *output], np.int32)})
    assert not failures
    return allowed(masks[0])


@for_seeds(30)
def test_masks_leave_what_no_rule_forbids(draw: Draw) -> None:
    """Of few tokens, so that sequences begin, go on, overlap and end all the time."""
    some = range(1, 5)
    allows = sorted({draw.choice(range(VOCAB)) for _ in range(40)} | set(some))
    given = None if draw.choice([True, False]) else allows
    forbidden = [
        tuple(draw.choice(some) for _ in range(draw.choice([1, 2, 2, 3, 4]))) for _ in range(6)
    ]
    rows = begun(TokenRules(VOCAB, given, forbidden))
    output: list[int] = []
    for _ in range(40):
        expected = {
            token
            for token in (range(VOCAB) if given is None else given)
            if not any(tuple([*output, token][-len(bad) :]) == bad for bad in forbidden)
        }
        assert next_tokens(rows, output) == expected
        output.append(draw.choice(some))


def test_a_sequence_that_began_in_the_prompt_is_not_said_by_the_output() -> None:
    rows = begun(TokenRules(VOCAB, None, [(PROMPT[-1], 9)]))
    assert 9 in next_tokens(rows, [])
    assert 9 not in next_tokens(rows, [PROMPT[-1]])


def test_no_end_before_min_tokens_and_none_that_is_not_allowed() -> None:
    rows = begun(TokenRules(VOCAB, [7, EOS], []), min_tokens=2, stop_ids=(EOS,))
    assert next_tokens(rows, []) == next_tokens(rows, [7]) == {7}
    assert next_tokens(rows, [7, 7]) == {7, EOS}
    assert next_tokens(begun(TokenRules(VOCAB, [7], []), stop_ids=(EOS,)), []) == {7}


def test_a_grammar_and_rules_must_both_allow_a_token() -> None:
    rows = GrammarRows(VOCAB)
    grammar = cache().compile(StructuredOutputsParams(regex="[abc]+"))
    rows.begin(0, grammar, len(PROMPT), rules=TokenRules(VOCAB, None, [(ord("b"),), (97, 99)]))
    free = GrammarRows(VOCAB)
    free.begin(0, grammar, len(PROMPT))
    for output in ([], [97], [97, 97]):
        both = next_tokens(rows, output)
        without = {98, 99} if output else {98}
        assert both == next_tokens(free, output) - without


def test_who_has_no_token_left_fails_alone_and_is_told_why() -> None:
    rows = begun(TokenRules(VOCAB, [7], [(7, 7)]))
    rows.begin(1, None, 0, rules=TokenRules(VOCAB, [8], []))
    start = np.array([*PROMPT, 7], np.int32)
    masks, failures = rows.masks({0: start, 1: np.array([8], np.int32)})
    assert set(failures) == {0}
    assert "allowed_token_ids" in failures[0]
    assert "bad_words" in failures[0]
    assert allowed(masks[1]) == {8}


def test_bits_behind_the_vocabulary_are_no_tokens() -> None:
    """300 tokens take ten words, whose last bits stand for no token."""
    rows = begun(TokenRules(VOCAB, None, [(token,) for token in range(VOCAB)]))
    _, failures = rows.masks({0: np.array(PROMPT, np.int32)})
    assert set(failures) == {0}


@pytest.mark.parametrize("is_begun", [True, False])
def test_g03_reasoning_ends_behind_its_budget(is_begun: bool) -> None:
    """G03: the end is forced after so many tokens of it, in every block of reasoning, and nowhere
    else."""
    begin, end = 20, 21
    rows = begun(TokenRules(VOCAB, None, [], ThinkingBudget(3, begin, end, is_begun=is_begun)))
    thought = [1, 2, 3] if is_begun else [5, begin, 1, 2, 3]
    for length in range(len(thought)):
        assert len(next_tokens(rows, thought[:length])) == VOCAB, length
    assert next_tokens(rows, thought) == {end}
    answer = [*thought, end, 7, 7, 7, 7, 7]
    assert len(next_tokens(rows, answer)) == VOCAB
    again = [*answer, begin, 4, 4]
    assert len(next_tokens(rows, again)) == VOCAB
    assert next_tokens(rows, [*again, 4]) == {end}
    short = [*thought[:-1], end, 8, 8, 8]
    assert len(next_tokens(rows, short)) == VOCAB


def test_g03_a_budget_of_nothing_and_a_forbidden_end() -> None:
    rows = begun(TokenRules(VOCAB, None, [], ThinkingBudget(0, 20, 21, is_begun=True)))
    assert next_tokens(rows, []) == {21}
    rows = begun(TokenRules(VOCAB, None, [[21]], ThinkingBudget(0, 20, 21, is_begun=True)))
    _, failures = rows.masks({0: np.array(PROMPT, np.int32)})
    assert "leave no token" in failures[0]
