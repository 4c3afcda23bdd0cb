"""Whatever the bytes of an adapter's files are, reading ends with an adapter or an AdapterError."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manyroots.errors import AdapterError
from manyroots.lora.files.config import parse_config
from manyroots.store.adapter_files import read_adapter
from tests.helpers.adapter_folders import (
    CONFIG,
    WEIGHTS,
    Recipe,
    config_of,
    tiny_targets,
    write_adapter,
)
from tests.helpers.seeded import Draw, for_seeds

TARGETS = tiny_targets(num_layers=1, num_experts=2)
FIELDS = sorted({*config_of(Recipe(), TARGETS), "use_qalora", "alora_invocation_tokens", "what"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    write_adapter(path, TARGETS)
    return path


@pytest.fixture(scope="module")
def good(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def read(folder: Path) -> None:
    """A refusal is an answer, and one that can be sent; any other exception is a mistake."""
    try:
        read_adapter(folder, TARGETS, max_rank=16, dtype=torch.bfloat16, vocab_size=64)
    except AdapterError as error:
        check_can_be_sent(error)


def check_can_be_sent(error: AdapterError) -> None:
    assert len(str(error).encode("utf-8")) < 10_000


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@for_seeds(200)
def test_w12_changed_bytes_are_read_or_refused(
    folder: Path, good: dict[str, bytes], name: str, draw: Draw
) -> None:
    """W12: a few bytes changed, mostly in the header, and perhaps the end cut off."""
    raw = bytearray(good[name])
    for _ in range(draw.integer(1, 4)):
        place = draw.integer(0, min(len(raw), 4000) - 1)
        raw[place] = draw.integer(0, 255)
    keep = len(raw) if draw.flag() else draw.integer(0, len(raw))
    _write(folder, {**good, name: bytes(raw[:keep])})
    read(folder)


@for_seeds(300)
def test_w12_headers_of_any_json_are_read_or_refused(
    folder: Path, good: dict[str, bytes], draw: Draw
) -> None:
    """W12: one field of one tensor is something else, or there is one more tensor."""
    raw = good[WEIGHTS]
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    if draw.flag():
        entry = header[draw.choice(sorted(header))]
        entry[draw.choice(("dtype", "shape", "data_offsets"))] = draw.json()
    else:
        name = draw.text(most=20) if draw.flag() else draw.choice(sorted(header))
        like = header[draw.choice(sorted(set(header) - {"__metadata__"}))]
        header[name + draw.choice(("", ".lora_A.weight"))] = like
    text = json.dumps(header).encode()
    changed = len(text).to_bytes(8, "little") + text + raw[8 + length :]
    _write(folder, {**good, WEIGHTS: changed})
    read(folder)


@for_seeds(1000)
def test_w12_configs_of_any_values_are_read_or_refused(draw: Draw) -> None:
    """W12: each field may be of any type."""
    changes = {draw.choice(FIELDS): draw.json() for _ in range(draw.integer(0, 3))}
    try:
        config = parse_config({**config_of(Recipe(), TARGETS), **changes})
    except AdapterError as error:
        check_can_be_sent(error)
    else:
        for name in TARGETS:
            assert config.rank_of(name) >= 1
            config.scaling_of(name)
        config.canonical()


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
