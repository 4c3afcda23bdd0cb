"""Builds a tokenizer from what a GGUF file says about itself: byte-level BPE or SentencePiece.

Takes the header's values; gives a `tokenizers.Tokenizer`. transformers can convert GGUF too, but
splits every text by GPT-2's rule, whatever `tokenizer.ggml.pre` says: other token boundaries
than the model was trained with. Here the rule is looked up, and an unknown one is an error. And it
leaves out the first token that the file asks for, without which Gemma's output is garbage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from manyroots.errors import ModelError
from manyroots.files.gguf_tokens import (
    BYTE_LEVEL,
    CONTROL,
    NORMAL,
    SENTENCEPIECE,
    UNKNOWN,
    USER_DEFINED,
    special_token,
)
from manyroots.text import gguf_sentencepiece

_SPECIAL, _UNSPLIT = (CONTROL, UNKNOWN), (USER_DEFINED,)
T = TypeVar("T")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""That of Mistral's models since Nemo."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a model splits text before merging, by its name in `tokenizer.ggml.pre`."""

    pattern: str | None
    """None is GPT-2's own pattern."""
    single_digits: bool = False
    """Digits are split off first, one by one."""
    nfc: bool = False
    whole_words: bool = False
    """A word that is a token is taken as it is, without merging."""
    adds_bos: bool = False
    """What a file means that does not say whether texts have a first token: Llama 3's converter
    wrote none. All of these models were trained with it."""

    def pre_tokenizer(self) -> Any:
        steps: list[Any] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is None:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        else:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_OF_LLAMA3 = _Rule(_LLAMA3, whole_words=True, adds_bos=True)
_OF_SMOLLM = _Rule(None, single_digits=True)
_RULES = {
    "gpt-2": _Rule(None),
    "smollm": _OF_SMOLLM,
    "starcoder": _OF_SMOLLM,
    "refact": _OF_SMOLLM,
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "smaug-bpe": _Rule(_LLAMA3),
    "qwen2": _Rule(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Rule(_QWEN2),
    "tekken": _Rule(_TEKKEN, whole_words=True, adds_bos=True),
}


def can_build(metadata: Mapping[str, Any]) -> bool:
    """Whether this file's tokenizer is of a kind that `build` can make."""
    return metadata.get("tokenizer.ggml.model") in (BYTE_LEVEL, SENTENCEPIECE)


def build(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that the file describes; `path` is for error messages only."""
    tokens = _listed(metadata, "tokenizer.ggml.tokens", path, str)
    is_sentencepiece = metadata["tokenizer.ggml.model"] == SENTENCEPIECE
    if is_sentencepiece or "tokenizer.ggml.token_type" in metadata:
        kinds = _listed(metadata, "tokenizer.ggml.token_type", path, int, size=len(tokens))
    else:
        kinds = [NORMAL] * len(tokens)
    if is_sentencepiece:
        tokens = gguf_sentencepiece.as_in_texts(tokens, kinds)
    try:
        if is_sentencepiece:
            scores = _listed(metadata, "tokenizer.ggml.scores", path, float, size=len(tokens))
            tokenizer = gguf_sentencepiece.build(tokens, scores, kinds, metadata)
        else:
            tokenizer = _byte_level(tokens, metadata, path)
    except ModelError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(
            f"the tokenizer in {path} is broken: {error}. Download the file again, or name "
            "another tokenizer with --tokenizer."
        ) from error
    _add_marked_tokens(tokenizer, tokens, kinds)
    _add_bos(tokenizer, tokens, metadata)
    return tokenizer


def _byte_level(tokens: list[str], metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _RULES:
        raise ModelError(
            f"{path} splits text by the rule {name!r}; known are {', '.join(_RULES)}. "
            "Name the model's original tokenizer with --tokenizer."
        )
    rule = _RULES[name]
    merges = [
        (left, right)
        for left, _, right in (
            merge.partition(" ") for merge in _listed(metadata, "tokenizer.ggml.merges", path, str)
        )
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed(
    metadata: Mapping[str, Any],
    key: str,
    path: Path,
    kind: type[T],
    *,
    size: int | None = None,
) -> list[T]:
    value = metadata.get(key)
    if (
        not isinstance(value, list)
        or not all(isinstance(item, kind) for item in value)
        or size not in (None, len(value))
    ):
        raise ModelError(
            f"{path} has no usable {key}. Name the model's original tokenizer with --tokenizer."
        )
    return value


def _add_marked_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special (skipped in output); user-defined ones are only unsplittable."""

    special, unsplit = (
        [
            AddedToken(token, special=wanted is _SPECIAL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in wanted
        ]
        for wanted in (_SPECIAL, _UNSPLIT)
    )
    # All at once: the search for them is built anew with each call, and Gemma has thousands.
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(unsplit)


def _add_bos(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any]) -> None:
    bos = special_token(metadata, "bos")
    # llama.cpp takes it for granted with SentencePiece, too.
    is_sentencepiece = metadata["tokenizer.ggml.model"] == SENTENCEPIECE
    taken_for_granted = is_sentencepiece or _RULES[metadata["tokenizer.ggml.pre"]].adds_bos
    wanted = metadata.get("tokenizer.ggml.add_bos_token", taken_for_granted)
    if wanted and isinstance(bos, int) and 0 <= bos < len(tokens):
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
