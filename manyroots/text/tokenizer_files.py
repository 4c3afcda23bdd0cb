"""Finds and loads a tokenizer: a folder, a GGUF file or a hub id.

Gives a `Tokenizer`. Code that a checkpoint brings along is never run: `trust_remote_code` stays
False, and a tokenizer that needs it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manyroots.errors import ModelError
from manyroots.files.gguf_header import read_metadata
from manyroots.files.gguf_parts import model_files
from manyroots.files.gguf_tokens import special_token
from manyroots.files.git_lfs import remedy_of
from manyroots.text import gguf_tokenizer
from manyroots.text.tokenizer import SpecialTokens, Tokenizer

_PLAIN, _FOR_TOOLS = "default", "tool_use"
"""What checkpoints with several templates call those of plain chats and of chats with tools."""
_WHOLE = "tokenizer.json"
"""The file that has a tokenizer with all its rules."""
_TOKENIZER_FILES = (_WHOLE, "tokenizer.model", "vocab.json", "tokenizer_config.json")
_TEKKEN = "tekken.json"
_OF_PROCESSORS = "chat_template.json"
"""Where checkpoints that also see have their template, some of them there alone."""


def load_tokenizer(source: str, *, revision: str | None = None) -> Tokenizer:
    """Load from `source`; `revision` is the branch, tag or commit of a hub id."""
    path = Path(source)
    if path.is_file():
        return _from_gguf(path)
    if path.is_dir() and not any((path / name).exists() for name in _TOKENIZER_FILES):
        return _from_gguf(_only_gguf(path))
    return _from_transformers(source, revision=revision)


def _only_gguf(folder: Path) -> Path:
    files = model_files(folder)
    if (folder / _TEKKEN).exists() and not files:
        raise ModelError(
            f"{folder} has its tokenizer as {_TEKKEN} alone, a format that this version does not "
            "read. Name a folder or hub id of the same model with a tokenizer.json with "
            "--tokenizer."
        )
    if len(files) != 1:
        raise ModelError(
            f"{folder} holds none of {', '.join(_TOKENIZER_FILES)} and {len(files)} .gguf files. "
            "Name a tokenizer folder or hub id with --tokenizer."
        )
    return files[0]


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_metadata(path)
    if not gguf_tokenizer.can_build(metadata):
        return _from_transformers(str(path.parent), gguf_file=path.name)
    tokens = metadata.get("tokenizer.ggml.tokens", [])

    def name(kind: str) -> str | None:
        index = special_token(metadata, kind)
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    special = SpecialTokens(
        bos=name("bos"), eos=name("eos"), pad=name("padding"), unk=name("unknown")
    )
    template = metadata.get("tokenizer.chat_template")
    for_tools = metadata.get(f"tokenizer.chat_template.{_FOR_TOOLS}")
    return Tokenizer(
        gguf_tokenizer.build(metadata, path),
        special,
        template if isinstance(template, str) else None,
        for_tools if isinstance(for_tools, str) else None,
    )


def _has_own_rules(source: str, options: Mapping[str, Any]) -> bool:
    """Whether there is a tokenizer.json, in a folder or on the hub."""
    from transformers.utils import cached_file

    if "gguf_file" in options:
        return False
    try:
        return cached_file(source, _WHOLE, revision=options["revision"]) is not None
    except (OSError, ValueError):  # no such file or name: the loader reports it
        return False


def _lacks_sentencepiece(folder: Path) -> bool:
    has_other = any((folder / name).exists() for name in (_WHOLE, "vocab.json"))
    is_alone = (folder / "tokenizer.model").exists() and not has_other
    return is_alone and find_spec("sentencepiece") is None


def _kind_of(source: str, options: Mapping[str, Any]) -> Any:
    """The class of transformers that reads a tokenizer. Each is imported where it is needed: a GGUF
    file needs neither, and the second one takes seconds and brings torch along."""
    if _has_own_rules(source, options):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    # Chooses a class by the names in two configs, and most classes take the tokens of the file
    # alone and bring their own rules for splitting and decoding, whatever it says.
    from transformers import AutoTokenizer

    return AutoTokenizer


def _from_transformers(source: str, **options: Any) -> Tokenizer:
    try:
        kind = _kind_of(source, options)
        loaded = kind.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises whatever the file at hand provokes
        if _lacks_sentencepiece(Path(source)):
            raise ModelError(
                f"{source} has its tokenizer as tokenizer.model alone, and the sentencepiece "
                "package, which reads it, is not installed; pip install sentencepiece protobuf, or "
                "name a folder with a tokenizer.json with --tokenizer."
            ) from error
        remedy = "Name another folder or hub id with --tokenizer"
        for name in _TOKENIZER_FILES:
            if (said := remedy_of(Path(source) / name, remedy)) != remedy:
                remedy = f"Of {name}: {said}"
        raise ModelError(
            f"no tokenizer could be loaded from {source!r}: {error}. {remedy}."
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"the tokenizer of {source!r} ({type(loaded).__name__}) has no fast form. "
            "Convert it to a tokenizer.json, and name its folder with --tokenizer."
        )
    special = SpecialTokens(
        bos=loaded.bos_token, eos=loaded.eos_token, pad=loaded.pad_token, unk=loaded.unk_token
    )
    _refuse_empty(backend, special, source)
    template: str | Mapping[str, str] | None = loaded.chat_template or _of_processor(source)
    if isinstance(template, Mapping):
        [only] = template.values() if len(template) == 1 else [None]
        return Tokenizer(backend, special, template.get(_PLAIN, only), template.get(_FOR_TOOLS))
    return Tokenizer(backend, special, template)


def _refuse_empty(backend: Any, special: SpecialTokens, source: str) -> None:
    """Without a file of tokens, transformers makes a tokenizer that has the special ones alone."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    names = {special.bos, special.eos, special.pad, special.unk, *added}
    if not set(backend.get_vocab(with_added_tokens=True)) - names:
        raise ModelError(
            f"the tokenizer of {source!r} has no tokens but special ones; its tokenizer.json or "
            "tokenizer.model is missing. Download or copy it, or name another with --tokenizer."
        )


def _of_processor(source: str) -> str | None:
    file = Path(source) / _OF_PROCESSORS
    try:
        template = json.loads(file.read_text())["chat_template"] if file.is_file() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{file} is no JSON object with a chat_template ({error!r}); repair or remove it."
        ) from error
    return template if isinstance(template, str) else None
