"""Sets of tokens that masks take as a whole."""

from __future__ import annotations

import json

import numpy as np
import pytest

from manyroots.grammar.cache import GrammarCache
from manyroots.grammar.rows import GrammarRows
from manyroots.grammar.vocabulary import Vocabulary
from manyroots.structured_outputs import StructuredOutputsParams

WORDS = [b"a" * length for length in range(2, 34)] + [
    "é".encode(), "éé".encode(), b'"', b'",', b'"}', b'ab"', b'ab"}', b" a", b"\n ", b"\\n", b'\\"',
    b"a\\", b'{"name', b'": "', b"ab\x00", "aaaaaaaé".encode(),
]  # fmt: skip
PIECES = [bytes([byte]) for byte in range(256)] + WORDS + [b"<end>"]
END = len(PIECES) - 1


def _vocabulary() -> Vocabulary:
    return Vocabulary(PIECES, (END,), (END,), lambda text: list(text.encode()))


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
