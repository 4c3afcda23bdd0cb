"""The true bytes of a vocabulary's pieces.

Takes a `tokenizers.Tokenizer`; gives what each token adds to a text, as bytes, for the two ways
that language models spell bytes: byte-level BPE (every byte is a printable character) and
SentencePiece (a marker for the space, `<0x0A>` for single bytes). None for other ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_bytes(tokenizer: Tokenizer) -> list[bytes] | None:
    """For each token id its bytes; ids without a token give b""."""
    steps = _decoder_steps(tokenizer)
    kinds = {step.get("type") for step in steps}
    spell: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        spell = _from_byte_level
    elif "ByteFallback" in kinds:
        spell = _sentencepiece_by(steps)
    else:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        pieces[index] = spell(token)  # added ones too: their decoder makes no difference
    return pieces


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder: Any = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling: printable Latin-1 stands for itself, the other bytes follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:  # not spelled in the alphabet: the decoder takes such a token literally
        return token.encode()


def _sentencepiece_by(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """With this decoder's own marker of spaces; most have the same one, a few none."""
    replaced = list(_replacements(steps))

    def spell(token: str) -> bytes:
        match = _BYTE_PIECE.fullmatch(token)
        if match:
            return bytes([int(match[1], 16)])
        for marker, content in replaced:
            token = token.replace(marker, content)
        return token.encode()

    return spell


def _replacements(steps: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for step in steps:
        if step["type"] == "Metaspace":
            yield step["replacement"], " "
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            yield step["pattern"]["String"], step["content"]
