"""Reads embedding and head from a model's files without loading the model.

Takes a source and its spec; gives the weights that an adapter's file may repeat, by target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.models.registry import known_architecture
from manyroots.models.source import ModelSource, SourceKind
from manyroots.models.spec import ModelSpec
from manyroots.models.weights import gguf, safetensors
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.weights.tied_head import EMBEDDING, ENDINGS, HEAD, is_tied
from manyroots.store.adapter_base import BaseRows


def base_rows(
    source: ModelSource, spec: ModelSpec, dtype: torch.dtype
) -> dict[str, BaseRows] | None:
    """None if the weights are not on this machine, such as those of a hub id that was never
    served."""
    found = _of_gguf(source) if source.kind is SourceKind.GGUF else _of_folder(source, spec)
    if found is None:
        return None
    rows = {name: BaseRows(tensor, 0) for name, tensor in found.items()}
    embedding, head = rows.get(EMBEDDING), rows.get(HEAD)
    if spec.tie_word_embeddings and (head is None or _are_one(source, spec, dtype)):
        head = embedding = embedding or head
    named = {"model.embed_tokens": embedding, "lm_head": head}
    return {target: own for target, own in named.items() if own is not None}


def _of_folder(source: ModelSource, spec: ModelSpec) -> dict[str, Tensor] | None:
    try:
        safetensors.weight_files(source.path)
    except ModelError:
        return None
    translate = known_architecture(spec.architecture).translate
    return dict(translate(safetensors.ending_with(source.path, ENDINGS)))


def _of_gguf(source: ModelSource) -> dict[str, Tensor]:
    file = GGUFFile(source.path)
    names = {gguf.checkpoint_name(name, file, {}): name for name in gguf.OF_TOKENS}
    return {
        own: torch.from_numpy(file.read(name))
        for own, name in names.items()
        if name in file.tensors
    }


def _are_one(source: ModelSource, spec: ModelSpec, dtype: torch.dtype) -> bool:
    return is_tied(source.path, dtype, known_architecture(spec.architecture).translate)
