"""Whatever the bytes of an adapter's files are, reading ends with an adapter or an AdapterError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyroots.errors import AdapterError
from manyroots.lora.files.config import parse_config
from manyroots.store.adapter_files import read_adapter
from tests.adapter_folders import CONFIG, WEIGHTS, Recipe, config_of, tiny_targets, write_adapter

TARGETS = tiny_targets(num_layers=1, num_experts=2)
FIELDS = sorted({*config_of(Recipe(), TARGETS), "use_qalora", "alora_invocation_tokens", "what"})

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


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
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_w12_changed_bytes_are_read_or_refused(
    folder: Path, good: dict[str, bytes], name: str, data: st.DataObject
) -> None:
    """W12: a few bytes changed, mostly in the header, and perhaps the end cut off."""
    raw = bytearray(good[name])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(raw), 4000) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    keep = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    _write(folder, {**good, name: bytes(raw[:keep])})
    read(folder)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_w12_headers_of_any_json_are_read_or_refused(
    folder: Path, good: dict[str, bytes], data: st.DataObject
) -> None:
    """W12: one field of one tensor is something else, or there is one more tensor."""
    raw = good[WEIGHTS]
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    if data.draw(st.booleans()):
        entry = header[data.draw(st.sampled_from(sorted(header)))]
        entry[data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = data.draw(
            json_values
        )
    else:
        name = data.draw(st.text(max_size=20) | st.sampled_from(sorted(header)))
        like = header[data.draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))]
        header[name + data.draw(st.sampled_from(["", ".lora_A.weight"]))] = like
    text = json.dumps(header).encode()
    changed = len(text).to_bytes(8, "little") + text + raw[8 + length :]
    _write(folder, {**good, WEIGHTS: changed})
    read(folder)


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3))
def test_w12_configs_of_any_values_are_read_or_refused(changes: dict[str, Any]) -> None:
    """W12: each field may be of any type."""
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
