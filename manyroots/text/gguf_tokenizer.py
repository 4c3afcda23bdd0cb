"""Builds a byte-level BPE tokenizer from what a GGUF file says about itself.

Takes the header's values; gives a `tokenizers.Tokenizer`. transformers can convert GGUF too, but
splits every text by GPT-2's rule, whatever `tokenizer.ggml.pre` says: other token boundaries
than the model was trained with. Here the rule is looked up, and an unknown one is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from manyroots.errors import ModelError

_CONTROL = 3
_USER_DEFINED = 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


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


_RULES = {
    "gpt-2": _Rule(None),
    "smollm": _Rule(None, single_digits=True),
    "llama-bpe": _Rule(_LLAMA3, whole_words=True),
    "qwen2": _Rule(_QWEN2, nfc=True),
}


def is_byte_level(metadata: Mapping[str, Any]) -> bool:
    """Whether this file's tokenizer is of the kind that `build` can make."""
    return metadata.get("tokenizer.ggml.model") == "gpt2"


def build(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that the file describes; `path` is for error messages only."""
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _RULES:
        raise ModelError(
            f"{path} splits text by the rule {name!r}; known are {', '.join(_RULES)}. "
            "Name the model's original tokenizer with --tokenizer."
        )
    rule = _RULES[name]
    tokens = _required(metadata, "tokenizer.ggml.tokens", path)
    merges = [
        (left, right)
        for left, _, right in (m.partition(" ") for m in _required(metadata, _MERGES, path))
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.whole_words)
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(
            f"the tokenizer in {path} is broken: {error}. Download the file again, or name "
            "another tokenizer with --tokenizer."
        ) from error
    tokenizer = Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _add_marked_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []))
    _add_bos(tokenizer, tokens, metadata)
    return tokenizer


_MERGES = "tokenizer.ggml.merges"


def _required(metadata: Mapping[str, Any], key: str, path: Path) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(
            f"{path} has no usable {key}. Name the model's original tokenizer with --tokenizer."
        )
    return value


def _add_marked_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special (skipped in output); user-defined ones are only unsplittable."""
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_bos(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any]) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    # Llama 3's converter wrote no flag; its models were trained with the token.
    wanted = metadata.get(
        "tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    if wanted and isinstance(bos, int) and 0 <= bos < len(tokens):
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
