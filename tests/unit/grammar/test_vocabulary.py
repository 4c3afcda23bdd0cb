"""Sets of tokens that masks take as a whole, and masks that are put together from such sets."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from manyroots.grammar.cache import GrammarCache
from manyroots.grammar.rows import GrammarRows
from manyroots.grammar.vocabulary import Vocabulary
from manyroots.structured_outputs import StructuredOutputsParams

WORDS = [b"a" * length for length in range(2, 34)] + [
    "é".encode(), "éé".encode(), b'"', b'",', b'"}', b'ab"', b'ab"}', b" a", b"\n ", b"\\n", b'\\"',
    b"a\\", b'{"name', b'": "', b"ab\x00", "aaaaaaaé".encode(),
    b'","aaaa', b'a","a"', b'","', b'":"aaaaa', b'a":"aa"}',
]  # fmt: skip
PIECES = [bytes([byte]) for byte in range(256)] + WORDS + [b"<end>"]
END = len(PIECES) - 1


def _vocabulary() -> Vocabulary:
    return Vocabulary(PIECES, (END,), (END,), lambda text: list(text.encode()))


# (a schema, whether its strings need no walk)
SCHEMAS: list[tuple[dict[str, Any], bool]] = [
    ({"type": "array", "minItems": 9, "items": {"type": "string", "maxLength": 5}}, True),
    (
        {"type": "array", "minItems": 9, "items": {"type": ["string", "null"], "maxLength": 3}},
        True,
    ),
    (
        {
            "type": "array",
            "minItems": 9,
            "items": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        },
        True,
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 4}},
            "required": ["a"],
            "additionalProperties": {"type": "string", "maxLength": 3},
        },
        True,
    ),
    ({"type": "array", "minItems": 9, "items": {"enum": ["aaaa", "aab"], "maxLength": 9}}, True),
    (
        {
            "type": "array",
            "minItems": 9,
            "items": {"anyOf": [{"enum": ["aaaaaa"]}, {"type": "string", "maxLength": 3}]},
        },
        False,
    ),
    ({"type": "array", "minItems": 9, "items": {"type": "string", "pattern": "^a[ab]*$"}}, False),
]


@pytest.mark.parametrize(("schema", "needs_no_walk"), SCHEMAS)
def test_g01_masks_in_bounded_strings_are_those_of_a_walk(
    schema: dict[str, Any], needs_no_walk: bool
) -> None:
    """G01: near the end of a string the mask is put together from sets of tokens. The matcher
    itself finds the same, in random texts of tokens that end strings and begin others."""
    grammar = GrammarCache(_vocabulary).compile(StructuredOutputsParams(json=json.dumps(schema)))
    rng = random.Random(1)
    num_filled = 0
    for _ in range(6):
        strings = grammar.start_strings(0)
        assert (strings is not None) == needs_no_walk
        matcher, tokens = grammar.start(), np.zeros(0, np.int32)
        for _ in range(30):
            mask = np.frombuffer(matcher.deep_copy().compute_bitmask(), np.uint32)
            made = np.zeros_like(mask)
            if strings is not None and strings.fill(matcher, tokens, made):
                num_filled += 1
                assert (made == mask).all()
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:END]
            if not bits.any():
                break
            token = rng.choice(np.flatnonzero(bits).tolist())
            matcher.consume_tokens([token])
            tokens = np.append(tokens, np.int32(token))
    # Words of an enum are no text: what may follow depends on the letters before.
    assert (num_filled > 0) == (needs_no_walk and "enum" not in str(schema))


@pytest.mark.parametrize("length", [0, 1, 2, 7, 12, 31, 40])
def test_g01_a_bounded_string_takes_exactly_the_tokens_that_fit(length: int) -> None:
    """G01: held against each token tried alone, at every number of characters that are left."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": length}},
        "required": ["name"],
    }
    wanted = StructuredOutputsParams(json=json.dumps(schema))
    grammar = GrammarCache(_vocabulary).compile(wanted)
    rows = GrammarRows(len(PIECES))
    for taken in range(length + 1):
        tokens = list(b'{"name": "' + b"x" * taken)
        rows.begin(0, grammar, 0)
        masks, failures = rows.masks({0: np.array(tokens, np.int32)})
        assert not failures
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")[: len(PIECES)]
        for token, allowed in enumerate(bits.tolist()):
            trial = grammar.start()
            assert trial.try_consume_tokens([*tokens, token]) == len(tokens) + allowed, (
                taken,
                PIECES[token],
            )
