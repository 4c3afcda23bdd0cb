"""SentencePiece vocabularies in GGUF files: cut as SentencePiece cuts, begun as models want it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from manyroots.errors import ModelError
from manyroots.files.gguf_header import read_metadata
from manyroots.files.gguf_tokens import NORMAL as NORMAL_KIND
from manyroots.files.gguf_tokens import special_token
from manyroots.text.detokenizer import detokenizer_for
from manyroots.text.tokenizer import Tokenizer
from manyroots.text.tokenizer_files import load_tokenizer
from tests.helpers.seeded import Draw
from tests.unit.text import plain_sentencepiece as plain
from tests.unit.text.plain_sentencepiece import BOS, EOS, Vocabulary, vocabulary, write_file

NORMAL = [
    "▁t", "he", "▁the", "▁a", "ab", "aba", "▁ab", "b▁", "▁▁▁", "é", "日本", "abab", "1", "2", "😀",
    "▁", "t", "h", "e", "a", "b", "日", "本", ".", "<", ">", "x", "0",
]  # fmt: skip
DEFINED = ["\n", "\n\n", "  ", "   ", "\t", "<b>", "</b>"]
TEXTS = [
    "", " ", "the", " the", "the  the", "a  b", "a   b", "    ab", "ab" * 7, "\n\n\n",
    "\t\nthe\r\n", "<b>ab</b>", "<b", "12.1", "日本日", "é\u0301", "😀🏽\u200d♂️", "\x00", "<0x0A>",
    "a▁b", "ẞ ﷺ", "</s",
]  # fmt: skip


def load(path: Path, words: Vocabulary, **options: Any) -> Tokenizer:
    return load_tokenizer(str(write_file(path / "m.gguf", words, **options)))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = detokenizer_for(tokenizer, skip_special_tokens=True)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@pytest.mark.parametrize("has_prefix", [False, True])
def test_texts_are_cut_as_sentencepiece_cuts_them(has_prefix: bool, tmp_path: Path) -> None:
    """Llama 2's kind, which puts a space before a text, knows no pieces of its makers: what such
    a piece in mid-text does to the space, SentencePiece and llama.cpp disagree about."""
    words = vocabulary(NORMAL, [] if has_prefix else DEFINED, has_prefix=has_prefix)
    tokenizer = load(tmp_path, words)
    draw = Draw(12)
    texts = TEXTS + [draw.text(most=30) for _ in range(300)]
    texts += ["".join(draw.choice("ab  \n.<b>é") for _ in range(20)) for _ in range(300)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == plain.encode(text, words), repr(text)
        whole = text.replace("▁", " ")
        assert tokenizer.decode(ids, skip_special_tokens=False) == whole
        assert streamed(tokenizer, ids) == (" " + whole if has_prefix and whole else whole)


def test_pieces_of_the_makers_may_be_spelled_either_way(tmp_path: Path) -> None:
    """Older converters left the marker for a space in them."""
    old = load(tmp_path, vocabulary(NORMAL, ["▁▁"]))
    new = load(tmp_path, vocabulary(NORMAL, ["  "]))
    for text in TEXTS:
        ids = old.encode(text, add_special_tokens=False)
        assert ids == new.encode(text, add_special_tokens=False)
    assert 3 in old.encode("a  b", add_special_tokens=False)


@pytest.mark.parametrize(("add_bos", "first"), [(True, [BOS]), (False, []), (None, [BOS])])
def test_the_first_token_comes_once_where_the_file_wants_it(
    add_bos: bool | None, first: list[int], tmp_path: Path
) -> None:
    """llama.cpp takes it for granted where the file does not say."""
    tokenizer = load(tmp_path, vocabulary(NORMAL, DEFINED), add_bos=add_bos)
    rest = tokenizer.encode("the ab", add_special_tokens=False)
    assert BOS not in rest
    assert tokenizer.encode("the ab", add_special_tokens=True) == [*first, *rest]
    assert tokenizer.encode("<s>the ab", add_special_tokens=True) == [BOS, *rest]
    assert tokenizer.encode("<s>the ab", add_special_tokens=False) == [BOS, *rest]
    twice = [BOS, BOS, *rest]
    assert tokenizer.encode("<s><s>the ab", add_special_tokens=True) == twice


def test_special_tokens_are_known_by_name_and_left_out_of_texts(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, vocabulary(NORMAL, DEFINED))
    assert tokenizer.special_ids == {plain.UNK, BOS, EOS}
    assert tokenizer.eos_token_ids == (EOS,)
    ids = tokenizer.encode("ab</s>\n\n", add_special_tokens=True)
    assert EOS in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab\n\n"
    assert tokenizer.chat_template is None


def test_a_file_that_names_no_special_tokens_means_those_of_llama(tmp_path: Path) -> None:
    """As to llama.cpp, unless other tokens are in their places."""
    words = vocabulary(NORMAL, DEFINED)
    tokenizer = load(tmp_path, words, has_ids=False)
    rest = tokenizer.encode("the ab", add_special_tokens=False)
    assert tokenizer.encode("the ab", add_special_tokens=True) == [BOS, *rest]
    assert tokenizer.eos_token_ids == (EOS,)
    metadata = read_metadata(tmp_path / "m.gguf")
    assert [special_token(metadata, kind) for kind in ("unknown", "bos", "eos", "eot")] == [
        plain.UNK, BOS, EOS, None,
    ]  # fmt: skip
    kinds = [NORMAL_KIND] * len(metadata["tokenizer.ggml.token_type"])
    assert special_token({**metadata, "tokenizer.ggml.token_type": kinds}, "bos") is None
    assert special_token({**metadata, "tokenizer.ggml.model": "gpt2"}, "bos") is None
    assert special_token({**metadata, "tokenizer.ggml.bos_token_id": 7}, "bos") == 7


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_lists_that_do_not_fit_together_are_refused(key: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "a", "b"])
    writer.add_token_scores([0.0] * (2 if key == "scores" else 3))
    writer.add_token_types([1] * (2 if key == "token_type" else 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"no usable tokenizer\.ggml\.{key}.*--tokenizer"):
        load_tokenizer(str(tmp_path / "m.gguf"))
