"""Checks whether a model on this machine would serve an adapter, without starting an engine.

Takes a folder and the model's settings; gives the result of reading the adapter. The model is built
without memory for its weights, so only its shapes exist. Embedding and head are read if the
adapter's file repeats them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from manyroots.config import ModelSettings
from manyroots.lora.spec import AdapterSpec
from manyroots.models.base_weights import base_rows
from manyroots.models.decoder import Decoder
from manyroots.models.load import describe
from manyroots.models.source import resolve_source
from manyroots.store.adapter_files import read_folder
from manyroots.store.adapter_layouts import Layouts


@dataclass(frozen=True, slots=True)
class Inspection:
    """An adapter in the form that a model serves."""

    spec: AdapterSpec
    unchecked: tuple[str, ...]
    """Base weights that its file repeats, if the model's own are missing and cannot be compared."""


def check_adapter(folder: Path, settings: ModelSettings, max_rank: int) -> Inspection:
    """Raises AdapterError with the reason if the model would not serve it."""
    source = resolve_source(settings)
    spec, dtype = describe(source), torch.bfloat16
    targets = Decoder(spec, dtype=dtype, device=torch.device("meta")).adapter_targets()
    layouts = Layouts(targets, max_rank=max_rank, dtype=dtype, vocab_size=spec.vocab_size)
    adapter, weights = read_folder(folder, layouts)
    assert weights.form is not None, "it was read from files"
    repeated = [target for target, _ in weights.form.base_copies]
    own = base_rows(source, spec, dtype) if repeated else None
    if own is not None:
        read_folder(folder, layouts, base=own)
    return Inspection(adapter, tuple(name for name in repeated if name not in (own or {})))
