"""Grammars over the tiny vocabulary, in which every byte is a token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from manyroots.grammar.cache import GrammarCache
from manyroots.grammar.vocabulary import Vocabulary
from tests.unit.text.tiny_tokenizer import tiny_tokenizer

VOCAB, BOS, EOS = 300, 256, 257


def vocabulary() -> Vocabulary:
    tokenizer = tiny_tokenizer()
    return Vocabulary(
        pieces=[tokenizer.token_bytes(token) for token in range(VOCAB)],
        special_ids=tokenizer.special_ids,
        eos_ids=(EOS,),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def cache(**options: int) -> GrammarCache:
    return GrammarCache(vocabulary, **options)


def allowed(mask: npt.NDArray[np.int32]) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB]).tolist())
