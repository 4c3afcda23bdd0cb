"""Whether a model on this machine would serve an adapter: asked without starting an engine.

Takes a folder and the model's settings; gives what reading the adapter would give. The model is
built without memory for its weights, so that only its shapes are there.
"""

from __future__ import annotations

from pathlib import Path

import torch

from manyroots.config import ModelSettings
from manyroots.lora.spec import AdapterSpec
from manyroots.models.decoder import Decoder
from manyroots.models.load import describe
from manyroots.models.source import resolve_source
from manyroots.store.adapter_files import read_adapter


def check_adapter(folder: Path, settings: ModelSettings, max_rank: int) -> AdapterSpec:
    """The adapter as this model serves it; AdapterError says why it would not."""
    spec = describe(resolve_source(settings))
    model = Decoder(spec, dtype=torch.bfloat16, device=torch.device("meta"))
    adapter, _ = read_adapter(
        folder,
        model.adapter_targets(),
        max_rank=max_rank,
        dtype=torch.bfloat16,
        vocab_size=spec.vocab_size,
    )
    return adapter
