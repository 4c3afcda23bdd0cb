"""What is streamed is the whole decode, for each kind of tokenizer, with special tokens in between.

Each kind is built small. A SentencePiece decoder takes one space from the beginning of a text; a
completion is no beginning, so there the whole decode is the one after a word.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from manyroots.text.detokenizer import detokenizer_for
from manyroots.text.tokenizer import SpecialTokens, Tokenizer
from tests.helpers.seeded import Draw, seeds
from tests.unit.text.tiny_tokenizer import tiny_backend

SPECIAL = ("<s>", "</s>", "[CLS]")
ADDED = ("<tool>", "日本", "x y", "é", "▁z")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁Paris", "▁is", "not", "é", "!", "▁▁", "."]
STRIPPED = [decoders.Strip(" ", 1, 0)]
SPELLED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def byte_level() -> Backend:
    return tiny_backend()


def sentencepiece() -> Backend:
    """As Gemma's."""
    vocabulary = {token: index for index, token in enumerate([*WORDS, *BYTES])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(SPELLED)
    return backend


def sentencepiece_stripped() -> Backend:
    """As Llama 2's."""
    backend = sentencepiece()
    backend.decoder = decoders.Sequence([*SPELLED, *STRIPPED])
    return backend


def sentencepiece_of_another_marker() -> Backend:
    backend = sentencepiece()
    backend.decoder = decoders.Sequence([decoders.Replace("!", " "), *SPELLED[1:]])
    return backend


def sentencepiece_without_marker() -> Backend:
    backend = sentencepiece()
    backend.decoder = decoders.Sequence(SPELLED[1:])
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram([(word, -1.0) for word in WORDS], unk_id=0))
    backend.decoder = decoders.Metaspace()
    return backend


def unigram_with_bytes() -> Backend:
    pieces = [(token, -1.0) for token in [*WORDS, *BYTES]]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.decoder = decoders.Sequence(SPELLED)
    return backend


def wordpiece() -> Backend:
    words = ["[UNK]", "don", "##'", "##t", "go", "##ing", ".", ",", "é", "n't", "##\ufffd"]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    return backend


def wordpiece_as_spelled() -> Backend:
    backend = wordpiece()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def word_ends() -> Backend:
    """BPE of the first GPT: a mark after the last piece of a word."""
    words = ["a</w>", "b", "c</w>", "\ufffd", "d"]
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend


def without_decoder() -> Backend:
    return Backend(models.WordLevel({"a": 0, "b": 1, "\ufffd": 2}, unk_token="a"))


KINDS: list[Callable[[], Backend]] = [
    byte_level, sentencepiece, sentencepiece_stripped, sentencepiece_of_another_marker,
    sentencepiece_without_marker, unigram, unigram_with_bytes, wordpiece, wordpiece_as_spelled,
    word_ends, without_decoder,
]  # fmt: skip


def random_ids(draw: Draw, tokenizer: Tokenizer, backend: Backend) -> list[int]:
    """Any tokens, special ones and ids without a token among them. Bytes of SentencePiece come as
    whole characters, in whose middle special tokens may be. Of broken characters its decoder also
    drops the good bytes beside them, which a stream should not do."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    first_byte = vocabulary.get(BYTES[0])
    others = [i for i in range(tokenizer.vocab_size + 3) if i not in map(vocabulary.get, BYTES)]
    ids: list[int] = []
    for _ in range(draw.integer(0, 12)):
        if first_byte is not None and draw.flag():
            for byte in draw.choice("aé日😀\n").encode():
                ids.append(first_byte + byte)
                ids += draw.list_of(lambda: vocabulary[draw.choice(SPECIAL)], most=1)
        elif draw.random() < 0.3:
            ids.append(vocabulary[draw.choice(SPECIAL)])
        else:
            ids.append(draw.choice(others))
    return ids


@pytest.mark.parametrize("build", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_pieces_joined_are_the_whole_decode(
    build: Callable[[], Backend], skip: bool
) -> None:
    backend = build()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.add_tokens(list(ADDED))
    tokenizer = Tokenizer(backend, SpecialTokens(), None)
    word = [backend.token_to_id("▁Paris")] if build is sentencepiece_stripped else []
    for seed in seeds(100):
        ids = random_ids(Draw(seed), tokenizer, backend)
        if not skip:  # there a special token is text, and ends a character
            ids = _without_broken_characters(ids, backend)
        detokenizer = detokenizer_for(tokenizer, skip_special_tokens=skip)
        streamed = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
        before = tokenizer.decode(word, skip_special_tokens=skip)
        whole = tokenizer.decode([*word, *ids], skip_special_tokens=skip)
        assert before + streamed == whole, f"seed {seed}: {ids}"


def _without_broken_characters(ids: list[int], backend: Backend) -> list[int]:
    special = {backend.token_to_id(name) for name in SPECIAL}
    return [i for i in ids if i not in special] if backend.token_to_id(BYTES[0]) else ids
