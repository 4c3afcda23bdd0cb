"""Incremental text: whole characters only, and all pieces together are the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from manyroots.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    detokenizer_for,
)
from manyroots.text.tokenizer import SpecialTokens, Tokenizer
from tests.helpers.seeded import Draw, for_seeds
from tests.unit.text.tiny_tokenizer import tiny_tokenizer

TINY = tiny_tokenizer()


def pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@for_seeds(300)
def test_all_pieces_together_equal_the_whole_decode(draw: Draw) -> None:
    """For any tokens, valid UTF-8 or not."""
    ids, skip = draw.list_of(lambda: draw.integer(0, 270), most=30), draw.flag()
    detokenizer = ByteDetokenizer(TINY, skip_special_tokens=skip)
    assert "".join(pieces(detokenizer, ids)) == TINY.decode(ids, skip_special_tokens=skip)


@for_seeds(300)
def test_no_piece_shows_an_unfinished_character(draw: Draw) -> None:
    text = draw.text(most=30)
    detokenizer = ByteDetokenizer(TINY, skip_special_tokens=True)
    parts = pieces(detokenizer, list(text.encode()))
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces(ByteDetokenizer(TINY, skip_special_tokens=True), list("é😀".encode())) == [
        "", "é", "", "", "", "😀", ""
    ]  # fmt: skip


def test_an_unfinished_character_shows_as_replacement_at_the_end() -> None:
    detokenizer = ByteDetokenizer(TINY, skip_special_tokens=True)
    assert pieces(detokenizer, list("😀".encode())[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_are_skipped_only_when_asked() -> None:
    ids = [104, 257, 105]
    assert "".join(pieces(ByteDetokenizer(TINY, skip_special_tokens=True), ids)) == "hi"
    assert "".join(pieces(ByteDetokenizer(TINY, skip_special_tokens=False), ids)) == "h<|end|>i"


def sentencepiece() -> Tokenizer:
    vocabulary = {"▁Paris": 0, "▁is": 1, "!": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    backend = Backend(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(backend, SpecialTokens(), None)


def test_sentencepiece_keeps_the_space_of_a_continuation() -> None:
    tokenizer = sentencepiece()
    emoji = [3 + byte for byte in "😀".encode()]
    parts = pieces(detokenizer_for(tokenizer, skip_special_tokens=True), [0, 1, *emoji, 2])
    assert parts == [" Paris", " is", "", "", "", "😀", "!", ""]


@for_seeds(200)
def test_other_tokenizers_decode_in_windows(draw: Draw) -> None:
    ids = draw.list_of(lambda: draw.integer(0, 3), most=30)
    backend = Backend(WordLevel({"a": 0, "##b": 1, "c": 2, "\ufffd": 3}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(backend, SpecialTokens(), None)
    detokenizer = detokenizer_for(tokenizer, skip_special_tokens=True)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert "".join(pieces(detokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("skip", [True, False])
def test_byte_tokenizers_get_the_byte_detokenizer(skip: bool) -> None:
    assert isinstance(detokenizer_for(TINY, skip_special_tokens=skip), ByteDetokenizer)
