"""`manyroots bench publish` measures what it says, on a model small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyroots.cli.main import main


@pytest.mark.parametrize("flags", [(), ("--pinned",)])
def test_revisions_are_published_beside_streams_and_timed(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    file = tmp_path / "report.json"
    code = main(
        [
            "bench", "publish", "--model-config", "tiny-qwen3", "--streams", "2",
            "--revisions", "2", "--stream-prompt-len", "8", "--prompt-len", "8",
            "--num-gpu-blocks-override", "200", "--max-loras", "2",
            "--lora-cache-dir", str(tmp_path), "--json", str(file), *flags,
        ]
    )  # fmt: skip
    assert code == 0
    report = json.loads(file.read_text())
    first, published = report["tensors_to_first_token_ms"], report["tensors_to_published_ms"]
    assert 0 < published["p50"] < first["p50"] <= first["max"]
    assert report["adapter_bytes"] > 0
    assert report["workload"]["pinned"] is bool(flags)
