"""The systems measured beside ours compute the same model."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from manyroots.bench import peer_process
from manyroots.bench.peers import TransformersPeer
from manyroots.config import ModelSettings
from manyroots.process import torch_allocator
from manyroots.process.torch_allocator import PURGE_DELAY
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


@pytest.mark.parametrize("given", [None, "77"])
def test_a_peer_has_the_callers_allocator_setting_never_ours(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PURGE_DELAY, raising=False)
    monkeypatch.setattr(torch_allocator, "_is_set_here", False)
    if given is not None:
        monkeypatch.setenv(PURGE_DELAY, given)
    torch_allocator.keep_freed_memory()
    assert os.environ[PURGE_DELAY] == (given or "1000")
    assert peer_process._environment().get(PURGE_DELAY) == given


def test_a_peer_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    asked = json.dumps((asdict(ModelSettings(model="/no/where")), "float32", "cpu", {}))
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    monkeypatch.setattr(sys, "stdout", said)
    peer_process._serve()
    assert "no such file or folder" in json.loads(said.getvalue())["error"]
