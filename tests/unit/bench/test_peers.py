"""The systems measured beside ours compute the same model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import manyroots
from manyroots.bench import peer_process
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


@pytest.mark.parametrize(("is_ours", "given"), [(True, "10"), (False, "77")])
def test_a_peer_has_the_allocators_own_setting_or_the_users_never_ours(
    is_ours: bool, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manyroots, "sets_purge_delay", is_ours)
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "1000" if is_ours else "77")
    assert peer_process._environment()["MIMALLOC_PURGE_DELAY"] == given


def test_a_peer_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    asked = json.dumps((asdict(ModelSettings(model="/no/where")), "float32", "cpu", {}))
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    monkeypatch.setattr(sys, "stdout", said)
    peer_process._serve()
    assert "no such file or folder" in json.loads(said.getvalue())["error"]


def test_importing_the_package_keeps_freed_memory_for_a_second_unless_the_user_says_otherwise() -> (
    None
):
    code = "import manyroots, os; print(os.environ['MIMALLOC_PURGE_DELAY'])"
    for set_before, found in ((None, "1000"), ("5", "5")):
        env = {name: value for name, value in os.environ.items() if "MIMALLOC" not in name}
        env |= {} if set_before is None else {"MIMALLOC_PURGE_DELAY": set_before}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == found
