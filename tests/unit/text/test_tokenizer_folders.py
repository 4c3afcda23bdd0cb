"""Folders as strangers have them: what their tokenizer.json says counts, whatever is beside it.

The reference is the `tokenizers` package, which reads that one file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from manyroots.text.tokenizer import Tokenizer
from manyroots.text.tokenizer_files import load_tokenizer
from tests.unit.text.tiny_tokenizer import BOS, EOS, tiny_backend

CLASSES = (
    None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer", "Qwen2TokenizerFast",
    "GPT2Tokenizer", "GemmaTokenizerFast", "SomebodysOwnTokenizer",
)  # fmt: skip
MODEL_TYPES = ("llama", "qwen2", "mistral", "gemma3_text", "qwen3_5", "somebodys_own")
TEXTS = ("hello world, 12345!", "  two  spaces ", "日本語 é e\u0301 😀\n\n", f"hello{EOS}stop", "")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPELLED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def by_threes() -> Backend:
    """Byte-level BPE as Llama 3's, which takes digits by threes."""
    backend = tiny_backend()
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|[^\p{L}\p{N}]+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, as_bytes])
    backend.model = with_digits(backend)
    backend.post_processor = first(backend)
    return backend


def with_digits(backend: Backend) -> Any:
    """The tiny model with 12, 123, 45 and 2345 as tokens: which are used shows how it splits."""
    state = json.loads(backend.to_str())["model"]
    merges = [*map(tuple, state["merges"]), ("1", "2"), ("12", "3"), ("4", "5"), ("3", "45")]
    size = len(state["vocab"])
    words = {"".join(pair): size + place for place, pair in enumerate(merges[-4:])}
    return models.BPE(vocab=state["vocab"] | words, merges=merges)


def first(backend: Backend) -> Any:
    index = backend.token_to_id(BOS)
    return processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, index)])


def spelled_bytes() -> Backend:
    """SentencePiece as Gemma's, without a space in front."""
    words = ["<unk>", BOS, EOS, "▁", "▁▁", "hello", "▁world", "hell", "hel", "he", "h", "e", "l",
             "o", "▁w", "▁wo", "▁wor", "▁worl", "w", "r", "d", *BYTES]  # fmt: skip
    vocabulary = {word: index for index, word in enumerate(words)}
    merges = [("▁", "▁"), ("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o"), ("▁", "w"),
              ("▁w", "o"), ("▁wo", "r"), ("▁wor", "l"), ("▁worl", "d")]  # fmt: skip
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(SPELLED)
    backend.add_special_tokens(["<unk>", BOS, EOS])
    backend.post_processor = first(backend)
    return backend


def with_a_space_in_front() -> Backend:
    """As Llama 2's."""
    backend = spelled_bytes()
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(marks)
    backend.decoder = decoders.Sequence([*SPELLED, decoders.Strip(" ", 1, 0)])
    return backend


def unigram() -> Backend:
    """As T5's, with its end token after every text."""
    words = ["<unk>", BOS, EOS, "▁", "▁hello", "▁world", "▁two", "▁spaces", ",", "!", "1", "stop"]
    backend = Backend(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([BOS, EOS])
    index = backend.token_to_id(EOS)
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, index)]
    )
    return backend


def saved(folder: Path, backend: Backend, **config: Any) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize(
    "build", [by_threes, spelled_bytes, with_a_space_in_front, unigram], ids=lambda b: b.__name__
)
def test_a_tokenizer_json_counts_whatever_the_configs_call_it(
    build: Callable[[], Backend], model_type: str, tmp_path: Path
) -> None:
    """Of most classes' names transformers makes a tokenizer that splits by the class's own rules:
    a Qwen2 with Llama 3's tokenizer got its digits one by one, one with Gemma's no spaces."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for kind in CLASSES:
        ours = saved(tmp_path, build(), tokenizer_class=kind, bos_token=BOS, eos_token=EOS)
        theirs = Backend.from_file(str(tmp_path / "tokenizer.json"))
        for text in TEXTS:
            for adds in (True, False):
                ids = theirs.encode(text, add_special_tokens=adds).ids
                assert ours.encode(text, add_special_tokens=adds) == ids, (kind, text)
            for skips in (True, False):
                whole = theirs.decode(ids, skip_special_tokens=skips)
                assert ours.decode(ids, skip_special_tokens=skips) == whole, (kind, text)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_file_says_whether_the_first_token_is_added(is_first: bool, tmp_path: Path) -> None:
    """And not the config, as for transformers."""
    backend = tiny_backend()
    if is_first:
        backend.post_processor = first(backend)
    ours = saved(tmp_path, backend, add_bos_token=not is_first, bos_token=BOS)
    assert ours.encode("hello", add_special_tokens=True) == [256] * is_first + [261]


ADDED = {"content": "<tool>", "special": False, "normalized": False, "lstrip": False,
         "rstrip": False, "single_word": False}  # fmt: skip


def test_more_tokens_may_be_in_the_config(tmp_path: Path) -> None:
    index = tiny_backend().get_vocab_size()
    ours = saved(tmp_path, tiny_backend(), added_tokens_decoder={str(index): ADDED})
    assert ours.encode("hello<tool>", add_special_tokens=False) == [261, index]
    assert index not in ours.special_ids


def test_names_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    names = {"bos_token": BOS, "eos_token": ADDED | {"content": EOS}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    ours = saved(tmp_path, tiny_backend())
    assert (ours.special_tokens.bos, ours.special_tokens.eos) == (BOS, EOS)


PLAIN, TOOLS = "{{ messages[0].content }}", "{{ tools }}"


@pytest.mark.parametrize(
    ("told", "plain", "for_tools"),
    [
        (PLAIN, PLAIN, None),
        ({"default": PLAIN, "tool_use": TOOLS, "rag": "{{ documents }}"}, PLAIN, TOOLS),
        ({"chatml": PLAIN}, PLAIN, None),
        ({"chatml": PLAIN, "alpaca": TOOLS}, None, None),
        ({"tool_use": TOOLS}, TOOLS, TOOLS),
        (None, None, None),
    ],
    ids=["one", "named", "one of another name", "none of them plain", "for tools alone", "none"],
)
def test_templates_are_found_in_every_place(
    told: Any, plain: str | None, for_tools: str | None, tmp_path: Path
) -> None:
    """As text or as a list in tokenizer_config.json, or as files. One alone is that of chats,
    whatever it is called."""
    is_named = isinstance(told, dict)
    written = [{"name": n, "template": t} for n, t in told.items()] if is_named else told
    found = saved(tmp_path, tiny_backend(), chat_template=written)
    assert (found.chat_template, found.tool_template) == (plain, for_tools)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in (told if is_named else {"default": told}).items():
        folder = "" if name == "default" else "additional_chat_templates/"
        place = f"{folder}{'chat_template' if name == 'default' else name}.jinja"
        if text is not None:
            (tmp_path / place).write_text(text)
    found = saved(tmp_path, tiny_backend())
    assert (found.chat_template, found.tool_template) == (plain, for_tools)
