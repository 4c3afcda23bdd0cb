"""Builds a SentencePiece tokenizer (of kind BPE) from what a GGUF file says about itself.

Takes the header's lists of pieces, scores and kinds; gives a `tokenizers.Tokenizer` that cuts
texts as SentencePiece itself does: first the pieces that a model's makers defined, the longest
there is at each place; then, between them, the two neighbours that make the piece with the
highest score are joined until none are left; a character without a piece is spelled in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from manyroots.files.gguf_tokens import BYTE, NORMAL, USER_DEFINED, special_token

_SPACE = "\u2581"
"""How pieces spell a space."""


def build(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    metadata: Mapping[str, Any],
) -> Tokenizer:
    """The tokenizer, without its marked tokens and its first one."""
    unknown = special_token(metadata, "unknown")
    is_known = isinstance(unknown, int) and 0 <= unknown < len(pieces)
    tokenizer = Tokenizer(
        BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges(pieces, scores, kinds),
            unk_token=pieces[unknown] if is_known else None,
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    spelled: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    marked: list[Any] = [normalizers.Replace(" ", _SPACE)]
    # llama.cpp's default for such files: Llama 2's texts begin with a space, Gemma's do not.
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        marked.insert(0, normalizers.Prepend(_SPACE))
        spelled.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(marked)
    tokenizer.decoder = decoders.Sequence(spelled)
    return tokenizer


def as_in_texts(pieces: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """The pieces, those that makers defined with real spaces: they are looked for in the text as
    it comes. Newer files have them so already."""
    return [
        piece.replace(_SPACE, " ") if kind == USER_DEFINED else piece
        for piece, kind in zip(pieces, kinds, strict=True)
    ]


def merges(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Which neighbours are joined, first of all the most important.

    SentencePiece has no such list, only scores: any two neighbours that make a piece together may
    be joined. Of the ways to make one piece, the one with the shortest beginning comes first, as
    in the lists that the makers of Llama and Gemma publish.
    """
    normal = {
        piece: score
        for piece, score, kind in zip(pieces, scores, kinds, strict=True)
        if kind == NORMAL
    }
    best_first = sorted(normal, key=lambda piece: -normal[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in best_first
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
