"""Models in several GGUF files are read as one, or refused with what is wrong with which."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch

from manyroots.config import EngineSettings, ModelSettings
from manyroots.engine.preflight import check_start
from manyroots.engine.tiers import model_identity
from manyroots.errors import ModelError
from manyroots.models.source import ModelSource, resolve_source
from manyroots.text.generation_config import sampling_defaults
from tests.unit.models.gguf_writing import write_gguf
from tests.unit.models.tiny import load_tiny, save_tiny, tensors_of, tiny_config


def resolve(path: Path) -> ModelSource:
    return resolve_source(ModelSettings(model=str(path)))


def write_parts(folder: Path, *, name: str = "tiny") -> list[Path]:
    """All parts of a small model, the first in front."""
    theirs = save_tiny(folder / "checkpoint", "llama")
    write_gguf(folder / f"{name}.gguf", theirs.config, theirs.state_dict(), tensors_per_part=8)
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("by_folder", [False, True])
def test_parts_are_the_model_that_they_were_made_from(by_folder: bool, tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    assert [part.name for part in parts] == [
        f"tiny-{number:05}-of-{len(parts):05}.gguf" for number in range(1, len(parts) + 1)
    ]
    assert len(parts) > 2
    passed = tmp_path if by_folder else parts[0]
    check_start(EngineSettings(model=ModelSettings(model=str(passed))))
    source = resolve(passed)
    assert source.path == parts[0]
    assert source.name == (tmp_path.name if by_folder else "tiny")
    ours, whole = tensors_of(load_tiny(passed)), tensors_of(load_tiny(tmp_path / "checkpoint"))
    assert ours.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, ours[name]), name
    assert not sampling_defaults(str(source.path), "auto").values


def test_pages_in_storage_are_those_of_all_parts(tmp_path: Path) -> None:
    """A later part with other weights is another model, whatever the first one says."""
    parts = write_parts(tmp_path)
    before = model_identity(resolve(parts[0]), "auto", 0)
    content = bytearray(parts[-1].read_bytes())
    content[-1] ^= 1
    parts[-1].write_bytes(content)
    assert model_identity(resolve(parts[0]), "auto", 0) != before


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[1].unlink()
    with pytest.raises(ModelError, match=rf"first of \d parts, of which {parts[1].name} is not"):
        resolve(tmp_path)


def test_a_later_part_names_the_first(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    with pytest.raises(ModelError, match=rf"is part 2 of \d; pass the first, {parts[0].name}"):
        resolve(parts[1])


def test_parts_that_were_renamed_say_what_they_must_be_called(tmp_path: Path) -> None:
    first = write_parts(tmp_path)[0]
    with pytest.raises(ModelError, match=r"-00001-of-0000\d\.gguf\. Rename them, or join them"):
        resolve(first.rename(tmp_path / "mine.gguf"))


def test_a_part_that_is_another_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    shutil.copy(parts[2], parts[1])
    with pytest.raises(ModelError, match=rf"{parts[1].name} does not hold part 2 of"):
        resolve(parts[0])


def test_parts_that_have_not_all_tensors_are_refused(tmp_path: Path) -> None:
    """As where two models were cut at other places: here the second part stands for the third."""
    parts = write_parts(tmp_path)
    second, third = (b"split.no" + struct.pack("<IH", 2, number) for number in (1, 2))
    content = parts[1].read_bytes()
    assert second in content
    parts[2].write_bytes(content.replace(second, third))
    with pytest.raises(ModelError, match="different tensors of"):
        resolve(parts[0])


def test_a_file_is_called_as_the_link_to_it_is(tmp_path: Path) -> None:
    """In the hub's cache files are links to what is named by its digest."""
    write_gguf(tmp_path / "0123abcd.gguf", tiny_config())
    link = tmp_path / "tiny-Q8.gguf"
    link.symlink_to(tmp_path / "0123abcd.gguf")
    assert resolve(link).name == "tiny-Q8"
