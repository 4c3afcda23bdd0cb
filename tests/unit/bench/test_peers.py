"""The systems measured beside ours compute the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyroots.bench.peers import TransformersPeer
from manyroots.config import ModelSettings
from tests.unit.models.tiny import save_tiny


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe-mixed"])
def test_the_transformers_peer_has_our_weights(kind: str, tmp_path: Path) -> None:
    saved = save_tiny(tmp_path, kind).state_dict()
    peer = TransformersPeer(ModelSettings(model=str(tmp_path)), "float32", "cpu", {})
    taken = peer._model.state_dict()
    assert taken.keys() == saved.keys()
    assert all(torch.equal(taken[name], saved[name]) for name in saved)
    _, tokens = peer.run([[5, 6, 7]], 4, None)
    assert len(tokens[0]) == 4
