"""SentencePiece's BPE in plain words, from its C++ source; and GGUF files with such a vocabulary.

Slow and short. The rule was checked against the `sentencepiece` package itself with Gemma 3's
vocabulary: 63,407 texts, 1,365,176 tokens, no difference.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _, BYTE = range(1, 7)
UNK, BOS, EOS = 0, 1, 2


@dataclass(frozen=True)
class Vocabulary:
    """Pieces with scores and kinds; bytes are always among them."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[int, ...]
    has_prefix: bool
    """Whether a space is put in front of every text."""

    def index(self, piece: str, kind: int) -> int | None:
        return _places(self).get((piece, kind))


@functools.cache
def _places(words: Vocabulary) -> dict[tuple[str, int], int]:
    return {key: place for place, key in enumerate(zip(words.pieces, words.kinds, strict=True))}


def vocabulary(
    normal: Sequence[str], defined: Sequence[str] = (), *, has_prefix: bool = False
) -> Vocabulary:
    """`normal` is in the order in which they were learnt, characters anywhere in it."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ("<unk>", "<s>", "</s>", *defined, *spelled, *normal)
    kinds = [UNKNOWN, CONTROL, CONTROL, *[USER_DEFINED] * len(defined), *[BYTE] * 256]
    scores = [-1000.0] * (3 + len(defined)) + [0.0] * 256
    learnt = [-float(place) for place in range(len(normal))]
    return Vocabulary(pieces, (*scores, *learnt), (*kinds, *[NORMAL] * len(normal)), has_prefix)


def encode(text: str, words: Vocabulary) -> list[int]:
    """Token ids, without a first one; no special token is looked for."""
    if words.has_prefix and text:
        text = " " + text
    text = text.replace(" ", "▁")
    symbols: list[tuple[str, bool]] = []
    while text:
        defined = [
            piece.replace(" ", "▁")
            for piece, kind in zip(words.pieces, words.kinds, strict=True)
            if kind == USER_DEFINED and text.startswith(piece.replace(" ", "▁"))
        ]
        symbol = max(defined, key=len, default=text[0])
        symbols.append((symbol, bool(defined)))
        text = text[len(symbol) :]
    _join(symbols, words)
    return [token for symbol, is_defined in symbols for token in _ids(symbol, is_defined, words)]


def _join(symbols: list[tuple[str, bool]], words: Vocabulary) -> None:
    """The neighbours whose piece has the highest score, the leftmost of equals, again and again."""
    while True:
        best: tuple[float, int] | None = None
        for place, ((left, kept), (right, also_kept)) in enumerate(itertools.pairwise(symbols)):
            index = words.index(left + right, NORMAL)
            if kept or also_kept or index is None:
                continue
            if best is None or words.scores[index] > best[0]:
                best = words.scores[index], place
        if best is None:
            return
        place = best[1]
        joined = symbols[place][0] + symbols[place + 1][0]
        symbols[place : place + 2] = [(joined, False)]


def _ids(symbol: str, is_defined: bool, words: Vocabulary) -> list[int]:
    if is_defined:
        index = words.index(symbol, USER_DEFINED)
        if index is None:
            index = words.index(symbol.replace("▁", " "), USER_DEFINED)
    else:
        index = words.index(symbol, NORMAL)
    if index is not None:
        return [index]
    spelled = (words.index(f"<0x{byte:02X}>", BYTE) for byte in symbol.encode())
    return [byte for byte in spelled if byte is not None]


def write_file(
    path: Path, words: Vocabulary, *, add_bos: bool | None = None, has_ids: bool = True
) -> Path:
    """A GGUF file with nothing but this tokenizer; `add_bos`: None writes no such key, nor any id
    of a special token if there are to be none."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words.pieces)
    writer.add_token_scores(words.scores)
    writer.add_token_types(words.kinds)
    writer.add_unk_token_id(UNK)
    if has_ids:
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(EOS)
    writer.add_add_space_prefix(words.has_prefix)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
