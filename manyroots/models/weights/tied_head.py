"""Whether a checkpoint's head is its embedding, if the config ties them: transformers' rule.

A config may tie the two although the checkpoint has both. If they are equal, they are one;
otherwise the config is wrong and both are used. If only the head is there, it is also the
embedding. The comparison uses the served numbers, in the engine's dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from manyroots.models.weights import safetensors

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ENDINGS = ("embed_tokens.weight", "embeddings.weight", HEAD)
"""Endings of their names in any checkpoint; the second is Nemotron-H's."""
Translate = Callable[[Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]]
_ROWS_AT_ONCE = 4096
"""Rows of a large vocabulary; some tens of megabytes."""


def is_tied(folder: Path, dtype: torch.dtype, translate: Translate) -> bool:
    """For a folder whose config ties them; `translate` gives its tensors the names used here."""
    found = dict(translate(safetensors.ending_with(folder, ENDINGS)))
    if not {EMBEDDING, HEAD} <= found.keys():
        return True
    if _are_equal(found[EMBEDDING], found[HEAD], dtype):
        return True
    logger.warning(
        "%s has an %s that differs from its %s, although its config ties them; each is used as "
        "it is. Set tie_word_embeddings to false in config.json.", folder, HEAD, EMBEDDING,
    )  # fmt: skip
    return False


def with_embedding(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a tied model, with the head as the embedding if there is no other."""
    head, has_embedding = None, False
    for name, tensor in weights:
        if name == HEAD:
            head = tensor
            continue
        has_embedding = has_embedding or name == EMBEDDING
        yield name, tensor
    if head is not None and not has_embedding:
        yield EMBEDDING, head


def _are_equal(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    if one.shape != other.shape:
        return False
    pieces = zip(torch.split(one, _ROWS_AT_ONCE), torch.split(other, _ROWS_AT_ONCE), strict=True)
    return all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in pieces)
