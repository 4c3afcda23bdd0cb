"""Which tokens may come next, held against a search through all of them (G01)."""

from __future__ import annotations

import numpy as np

from manyroots.grammar.rows import GrammarRows
from manyroots.structured_outputs import StructuredOutputsParams
from tests.helpers.seeded import Draw, for_seeds
from tests.unit.grammar.tiny_grammars import EOS, VOCAB, allowed, cache, vocabulary

CHOICES = ("stop", "stops", "still", "hello world", "hello", "größe", "a")
PIECES = vocabulary().pieces
GRAMMARS = cache()
PROMPT = [5, 6, 7]


def expected(so_far: bytes) -> set[int]:
    """Tokens whose bytes continue one of the choices, and the end after a whole one."""
    texts = [choice.encode() for choice in CHOICES]
    found = {
        token
        for token in range(256 + 2, VOCAB)
        if PIECES[token] and any(text.startswith(so_far + PIECES[token]) for text in texts)
    }
    found |= {
        byte for byte in range(256) if any(t.startswith(so_far + bytes([byte])) for t in texts)
    }
    return found | ({EOS} if so_far in texts else set())


@for_seeds(20)
def test_g01_masks_allow_exactly_what_continues_a_choice(draw: Draw) -> None:
    """G01: by any tokens that spell it, and the end exactly where one is whole."""
    grammar = GRAMMARS.compile(StructuredOutputsParams(choice=CHOICES))
    rows = GrammarRows(VOCAB)
    rows.begin(3, grammar, len(PROMPT))
    tokens, so_far = list(PROMPT), b""
    while True:
        masks, failures = rows.masks({3: np.array(tokens, np.int32)})
        assert not failures
        assert allowed(masks[0]) == expected(so_far)
        token = draw.choice(sorted(allowed(masks[0])))
        if token == EOS:
            break
        tokens.append(token)
        so_far += PIECES[token]
    assert so_far.decode() in CHOICES


def test_g01_many_rows_at_once_get_what_each_gets_alone() -> None:
    wanted = [StructuredOutputsParams(regex=f"[a-z]{{{n}}}x|{n}+") for n in range(1, 9)]
    together, alone = GrammarRows(VOCAB), GrammarRows(VOCAB)
    for row, params in enumerate(wanted):
        for rows in (together, alone):
            rows.begin(row, GRAMMARS.compile(params), len(PROMPT))
    known = {row: np.array([*PROMPT, ord("a")][: 3 + row % 2], np.int32) for row in range(8)}
    masks, _ = together.masks(known)
    for row in range(8):
        assert (masks[row] == alone.masks({row: known[row]})[0]).all()


def test_g01_tokens_that_a_grammar_does_not_know_are_one_rows_failure() -> None:
    rows = GrammarRows(VOCAB)
    for row in (0, 1):
        rows.begin(row, GRAMMARS.compile(StructuredOutputsParams(choice=("ab",))), 0)
    masks, failures = rows.masks({0: np.array([ord("z")]), 1: np.array([ord("a")])})
    assert set(failures) == {0}
    assert "can't go on" in failures[0]
    assert allowed(masks[1]) == {ord("b")}


def test_g01_a_sequence_that_comes_back_is_where_it_was() -> None:
    """After a retraction, a row begins with the output so far."""
    grammar = GRAMMARS.compile(StructuredOutputsParams(choice=("abc",)))
    rows = GrammarRows(VOCAB)
    rows.begin(0, grammar, len(PROMPT))
    masks, _ = rows.masks({0: np.array([*PROMPT, ord("a"), ord("b")])})
    assert allowed(masks[0]) == {ord("c")}


def test_g01_no_end_before_min_tokens_unless_nothing_else_is_left() -> None:
    rows = GrammarRows(VOCAB)
    rows.begin(
        0, GRAMMARS.compile(StructuredOutputsParams(regex="a*")), 0, min_tokens=2, stop_ids=(EOS,)
    )
    for count, may_end in ((0, False), (1, False), (2, True)):
        masks, _ = rows.masks({0: np.full(count, ord("a"), np.int32)})
        assert (EOS in allowed(masks[0])) == may_end
    rows.begin(
        0, GRAMMARS.compile(StructuredOutputsParams(regex="a")), 0, min_tokens=9, stop_ids=(EOS,)
    )
    masks, _ = rows.masks({0: np.array([ord("a")], np.int32)})
    assert allowed(masks[0]) == {EOS}
