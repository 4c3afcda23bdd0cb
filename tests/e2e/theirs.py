"""The default model as transformers computes it, with the numbers of our reading of its file, which
`unit/models/test_gguf_loading.py` compares with transformers' own; that takes half a minute."""

from __future__ import annotations

from typing import Any

import torch

from manyroots.bench.peers import transformers_model
from manyroots.config import ModelSettings
from manyroots.models.load import load_model
from manyroots.models.source import resolve_source


def default_model() -> Any:
    source, cpu = resolve_source(ModelSettings()), torch.device("cpu")
    own = load_model(source, dtype=torch.float32, device=cpu, load_format="auto", seed=0)
    return transformers_model(own, source)
