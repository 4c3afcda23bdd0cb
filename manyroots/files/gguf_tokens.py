"""Which tokens a GGUF file means by its first, its last and its unknown one.

Takes the header's values; gives ids. Files may leave ids out: those of SentencePiece then mean
Llama 2's, to llama.cpp and here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""What `tokenizer.ggml.token_type` calls the kinds of tokens."""
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
"""What `tokenizer.ggml.model` calls them."""
_OF_LLAMA = {"unknown": 0, "bos": 1, "eos": 2}


def special_token(metadata: Mapping[str, Any], kind: str) -> Any:
    """The id as the file has it, which may be anything; None where there is no such token."""
    key = f"tokenizer.ggml.{kind}_token_id"
    if key in metadata:
        return metadata[key]
    index, kinds = _OF_LLAMA.get(kind), metadata.get("tokenizer.ggml.token_type")
    if metadata.get("tokenizer.ggml.model") != SENTENCEPIECE or index is None:
        return None
    # Of another vocabulary it may be a word.
    is_there = isinstance(kinds, list) and kinds[index : index + 1] in ([CONTROL], [UNKNOWN])
    return index if is_there else None
