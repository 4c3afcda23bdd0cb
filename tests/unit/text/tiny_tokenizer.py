"""A byte-level tokenizer of 300 tokens, built in a millisecond: every byte is a token."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from manyroots.text.pieces import _BYTE_LEVEL
from manyroots.text.tokenizer import SpecialTokens, Tokenizer

BOS, EOS = "<|begin|>", "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}hm {% endif %}{% endif %}"
)


def tiny_backend() -> Backend:
    """Ids 0-255 are the bytes themselves; then the marks, then a few words."""
    vocabulary = dict(_BYTE_LEVEL)
    merges: list[tuple[str, str]] = []
    next_id = 258
    for word in ("hello", "Ġworld", "stop"):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = next_id
                merges.append((word[: end - 1], word[end - 1]))
                next_id += 1
    vocabulary |= {BOS: 256, EOS: 257}
    backend = Backend(BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in (BOS, EOS)])
    return backend


def tiny_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    return Tokenizer(tiny_backend(), SpecialTokens(bos=BOS, eos=EOS), template)
