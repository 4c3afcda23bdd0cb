"""The tokenizer wrapper: true bytes, special tokens, and where tokenizers come from."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from manyroots.errors import ModelError, RequestError
from manyroots.files.gguf_header import read_metadata
from manyroots.text import tokenizer_files
from manyroots.text.tokenizer import SpecialTokens, Tokenizer
from manyroots.text.tokenizer_files import load_tokenizer
from tests.helpers.seeded import Draw, for_seeds
from tests.unit.text.tiny_tokenizer import BOS, EOS, tiny_backend, tiny_tokenizer

TINY = tiny_tokenizer()


@for_seeds(300)
def test_encode_then_decode_gives_the_text_back(draw: Draw) -> None:
    text = draw.text(most=30)
    ids = TINY.encode(text, add_special_tokens=False)
    assert TINY.decode(ids, skip_special_tokens=False) == text


@for_seeds(300)
def test_token_bytes_spell_the_text(draw: Draw) -> None:
    text = draw.text(most=30)
    ids = TINY.encode(text, add_special_tokens=False)
    assert b"".join(map(TINY.token_bytes, ids)) == text.encode()


def test_special_tokens_in_a_text_become_those_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"{BOS}hello{EOS}", add_special_tokens=False)
    assert ids[0] == 256
    assert ids[-1] == 257
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BOS}hello{EOS}"


def test_ids_without_a_token_add_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.vocab_size < 300


def test_a_lone_surrogate_is_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        tokenizer.encode("a\ud800b", add_special_tokens=False)
    assert caught.value.field == "prompt"


def test_a_tokenizer_file_that_truncates_is_told_not_to() -> None:
    backend = tiny_backend()
    backend.enable_truncation(max_length=2)
    long = Tokenizer(backend, TINY.special_tokens, None).encode("abcdef", add_special_tokens=False)
    assert len(long) == 6


NAMED_TEMPLATES = [
    {"name": "default", "template": "{{ messages[0].content }}"},
    {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    {"name": "rag", "template": "{{ documents }}"},
]


def write_gguf(
    path: Path,
    *,
    rule: str = "smollm",
    add_bos: bool | None = False,
    template: Any = "{{ messages[0].content }}",
) -> None:
    vocabulary = sorted(tiny_backend().get_vocab().items(), key=lambda item: item[1])
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if index in (256, 257) else 1 for _, index in vocabulary])
    writer.add_token_merges(["h e", "he l", "hel l", "hell o"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_a_gguf_file_brings_its_tokenizer_and_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    for source in (tmp_path / "m.gguf", tmp_path):
        loaded = load_tokenizer(str(source))
        assert loaded.encode("hello", add_special_tokens=True) == [261]
        assert loaded.chat_template == "{{ messages[0].content }}"
        assert loaded.special_tokens.eos == EOS
        assert loaded.eos_token_ids == (257,)
        assert loaded.special_ids == {256, 257}


def test_of_several_templates_that_of_chats_with_tools_is_kept_beside_the_plain_one(
    tmp_path: Path,
) -> None:
    write_gguf(tmp_path / "m.gguf", template=NAMED_TEMPLATES)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": NAMED_TEMPLATES}))
    for source in (tmp_path / "m.gguf", tmp_path):
        loaded = load_tokenizer(str(source))
        assert loaded.chat_template == NAMED_TEMPLATES[0]["template"]
        assert loaded.tool_template == NAMED_TEMPLATES[1]["template"]


def test_a_gguf_file_that_wants_a_first_token_gets_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", add_bos=True)
    loaded = load_tokenizer(str(tmp_path / "m.gguf"))
    assert loaded.encode("hello", add_special_tokens=True) == [256, 261]
    assert loaded.encode("hello", add_special_tokens=False) == [261]


def test_digits_are_split_off_before_spaces_are_joined(tmp_path: Path) -> None:
    """The rule of `smollm`: two spaces before a digit stay together."""
    write_gguf(tmp_path / "m.gguf")
    backend = load_tokenizer(str(tmp_path / "m.gguf"))._backend
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  42")]
    assert pieces == ["a", "ĠĠ", "4", "2"]


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("llama-bpe", ["iPhone", "'S", "Ġ", "123", "4", "Ġa", ".//Ċ", "/"]),
        ("llama3", ["iPhone", "'S", "Ġ", "123", "4", "Ġa", ".//Ċ", "/"]),
        ("smaug-bpe", ["iPhone", "'S", "Ġ", "123", "4", "Ġa", ".//Ċ", "/"]),
        ("qwen2", ["iPhone", "'S", "Ġ", "1", "2", "3", "4", "Ġa", ".//Ċ", "/"]),
        ("deepseek-r1-qwen", ["iPhone", "'S", "Ġ", "1", "2", "3", "4", "Ġa", ".//Ċ", "/"]),
        ("tekken", ["i", "Phone", "'S", "Ġ", "1", "2", "3", "4", "Ġa", ".//Ċ/"]),
        ("starcoder", ["iPhone", "'", "S", "Ġ", "1", "2", "3", "4", "Ġa", ".//", "Ċ", "/"]),
    ],
)
def test_a_file_splits_text_by_the_rule_that_it_names(
    rule: str, pieces: list[str], tmp_path: Path
) -> None:
    """And those that were trained with a first token get it where the file does not say."""
    write_gguf(tmp_path / "m.gguf", rule=rule, add_bos=None)
    loaded = load_tokenizer(str(tmp_path / "m.gguf"))
    split = loaded._backend.pre_tokenizer.pre_tokenize_str("iPhone'S 1234 a.//\n/")
    assert [piece for piece, _ in split] == pieces
    first = [256] * (rule in ("llama-bpe", "llama3", "tekken"))
    assert loaded.encode("hello", add_special_tokens=True) == [*first, 261]


def test_an_unknown_splitting_rule_is_refused_with_a_remedy(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", rule="mystery")
    with pytest.raises(ModelError, match=r"'mystery'.*--tokenizer"):
        load_tokenizer(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGU",
        b"PK\x03\x04" + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
        b"GGUF" + struct.pack("<IQQQ", 99, 0, 1, 1),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 5, 2**40),
    ],
)
def test_a_broken_gguf_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        read_metadata(path)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_sentencepiece_file_alone_says_what_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package is not there; transformers asks for another then."""
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setattr(tokenizer_files, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install sentencepiece.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_transformers_folder_loads(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast  # transformers has no types
    tokenizer = tokenizer(tokenizer_object=tiny_backend(), eos_token=EOS)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode(f"hello{EOS}", add_special_tokens=False)[-1] == 257
    assert loaded.chat_template == "{{ messages[0].content }}"
    assert loaded.eos_token_ids == (257,)


def test_a_folder_that_lost_its_tokens_says_so(tmp_path: Path) -> None:
    """Transformers makes a tokenizer of the special ones, which reads every text as nothing."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ModelError, match=r"no tokens but special ones; its tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_tekken_alone_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tekken\.json alone.*--tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_template_of_a_processor_counts_where_there_is_no_other(tmp_path: Path) -> None:
    """Some checkpoints that also see have theirs in chat_template.json alone."""
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast  # transformers has no types
    tokenizer(tokenizer_object=tiny_backend(), eos_token=EOS).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    file = tmp_path / "chat_template.json"
    file.write_text('{"chat_template": "{{ messages[0].content }}"}')
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages[0].content }}"
    file.write_text("[]")
    with pytest.raises(ModelError, match=r"chat_template\.json is no JSON object"):
        load_tokenizer(str(tmp_path))


def test_a_text_that_the_tokenizer_has_no_token_for_is_refused() -> None:
    """Its unknown token is named and not there."""
    backend = Backend(WordLevel({"hello": 0}, unk_token="<unk>"))
    tokenizer = Tokenizer(backend, SpecialTokens(), None)
    assert tokenizer.encode("hello", add_special_tokens=False) == [0]
    with pytest.raises(RequestError, match="can't encode the text"):
        tokenizer.encode("goodbye", add_special_tokens=False)
