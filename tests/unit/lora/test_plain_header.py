"""A header read without a JSON parser is what the parser would give, or is left to the parser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from manyroots.errors import AdapterError
from manyroots.lora.files.header import read_header
from manyroots.lora.files.opened import AdapterFile
from manyroots.lora.files.plain_header import parse_plain
from tests.helpers.seeded import Draw, for_seeds

TENSORS = {
    "model.layers.0.mlp.experts.10.up_proj.lora_A.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
    "model.layers.0.mlp.experts.9.up_proj.lora_A.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
    "model.q_proj.lora_B.weight": torch.zeros(5, 2),
    "some other thing": torch.zeros(7, dtype=torch.float16),
}


def saved(folder: Path, metadata: dict[str, str] | None) -> bytes:
    """The header that the library writes."""
    save_file(TENSORS, folder / "file", metadata=metadata)
    raw = (folder / "file").read_bytes()
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


def as_json_says(folder: Path, header: bytes) -> list[tuple[object, ...]] | None:
    """The tensors by the parser alone, in a file that has as much data; None if it refuses."""
    # White space first is JSON, and no form that is read without the parser.
    raw = b" " + header
    num_bytes = sum(tensor.nbytes for tensor in TENSORS.values())
    path = folder / "by_json"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(num_bytes))
    assert parse_plain(raw) is None
    try:
        with AdapterFile(path) as file:
            return list(read_header(file).tensors)
    except AdapterError:
        return None


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"a": "b", "c": "d, {not nested"}])
def test_what_the_library_writes_needs_no_parser(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    header = saved(tmp_path, metadata)
    found = parse_plain(header)
    if metadata is not None and "c" in metadata:
        assert found is None
        return
    assert found == as_json_says(tmp_path, header)
    assert found is not None
    assert {entry.name for entry in found} == set(TENSORS)


@for_seeds(400)
def test_a_changed_header_is_read_as_the_parser_reads_it_or_left_to_it(
    tmp_path_factory: pytest.TempPathFactory, draw: Draw
) -> None:
    folder = tmp_path_factory.mktemp("headers")
    header = saved(folder, draw.choice([None, {"format": "pt"}]))
    start = draw.integer(0, len(header))
    end = draw.integer(start, min(start + 3, len(header)))
    text = draw.text('0123456789,:[]{}"\\. aF\u00e9\x7f', most=4)
    changed = header[:start] + text.encode() + header[end:]
    found = parse_plain(changed)
    if found is not None:
        num_bytes = sum(tensor.nbytes for tensor in TENSORS.values())
        wanted = as_json_says(folder, changed)
        # The header alone does not say whether the file has as much data as this.
        assert found == wanted or (wanted is None and found[-1].end != num_bytes)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: {**h, "__metadata__": h["model.q_proj.lora_B.weight"]},
        lambda h: {name: {**about, "extra": 1} for name, about in h.items()},
        lambda h: {name: {**about, "dtype": "I8"} for name, about in h.items()},
        lambda h: dict(reversed(h.items())),
        lambda h: {"x" * 1025: next(iter(h.values()))},
        lambda h: {"a\\b": next(iter(h.values()))},
        lambda h: {},
    ],
)
def test_any_other_form_is_left_to_the_parser(tmp_path: Path, change: object) -> None:
    assert callable(change)
    fields = change(json.loads(saved(tmp_path, None)))
    assert parse_plain(json.dumps(fields, separators=(",", ":")).encode()) is None


def test_a_name_that_is_there_twice_is_left_to_the_parser() -> None:
    about = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    twice = '{"a":' + about % (0, 4) + ',"a":' + about % (4, 8) + "}"
    assert parse_plain(twice.encode()) is None
    assert parse_plain(twice.replace('"a"', '"b"', 1).encode()) is not None
