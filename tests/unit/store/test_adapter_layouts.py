"""Adapters that are alike are described once; each has its own weights and its own scaling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from manyroots.errors import AdapterError
from manyroots.store import adapter_layouts
from manyroots.store.adapter_files import foresee, read_adapter, read_folder
from manyroots.store.adapter_layouts import MAX_KEPT, Layouts
from tests.helpers.adapter_folders import Recipe, tiny_targets, write_adapter

TARGETS = tiny_targets(num_experts=3)
SIZES = {"max_rank": 16, "dtype": torch.float32, "vocab_size": 64}


@pytest.fixture
def layouts() -> Layouts:
    return Layouts(TARGETS, max_rank=16, dtype=torch.float32, vocab_size=64)


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows whenever a layout is worked out."""
    calls: list[int] = []
    plain = adapter_layouts.lay_out

    def counted(*args: object) -> object:
        calls.append(1)
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(adapter_layouts, "lay_out", counted)
    return calls


def test_the_second_of_two_alike_is_not_described_again_and_has_its_own_weights(
    tmp_path: Path, layouts: Layouts, laid_out: list[int]
) -> None:
    for seed in (1, 2):
        write_adapter(tmp_path / str(seed), TARGETS, Recipe(rank=8, seed=seed))
    read = [read_folder(tmp_path / str(seed), layouts) for seed in (1, 2)]
    assert len(laid_out) == 1
    for seed, (spec, weights) in zip((1, 2), read, strict=True):
        own_spec, own = read_adapter(tmp_path / str(seed), TARGETS, **SIZES)  # type: ignore[arg-type]
        assert spec == own_spec
        assert torch.equal(weights.buffer, own.buffer)
    assert read[0][0].digest != read[1][0].digest


def test_what_was_foreseen_is_not_described_when_it_is_wanted(
    tmp_path: Path, layouts: Layouts, laid_out: list[int]
) -> None:
    for seed in (1, 2):
        write_adapter(tmp_path / str(seed), TARGETS, Recipe(rank=8, seed=seed))
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "1", damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
    folders = [str(tmp_path / "gone"), str(tmp_path / "empty"), str(damaged), str(tmp_path / "1")]
    foresee(folders, layouts)
    assert len(laid_out) == 1
    for seed in (1, 2):
        spec, _ = read_folder(tmp_path / str(seed), layouts)
        assert spec == read_adapter(tmp_path / str(seed), TARGETS, **SIZES)[0]  # type: ignore[arg-type]
    assert len(laid_out) == 3, "only those that were read apart"
    with pytest.raises(AdapterError):
        read_folder(damaged, layouts)


def test_another_config_is_another_layout(
    tmp_path: Path, layouts: Layouts, laid_out: list[int]
) -> None:
    write_adapter(tmp_path / "a", TARGETS, Recipe(rank=8, seed=1))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    config = tmp_path / "b" / "adapter_config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "lora_alpha": 3 * fields["lora_alpha"]}))
    (one, _), (other, _) = (read_folder(tmp_path / name, layouts) for name in "ab")
    assert [p.scaling for p in other.pairs] == [pytest.approx(3 * p.scaling) for p in one.pairs]
    assert len(laid_out) == 2


def test_a_file_cut_short_is_refused_though_its_header_is_known(
    tmp_path: Path, layouts: Layouts
) -> None:
    write_adapter(tmp_path, TARGETS, Recipe(rank=8, seed=1))
    read_folder(tmp_path, layouts)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(AdapterError, match="not a whole safetensors file"):
        read_folder(tmp_path, layouts)


def test_few_layouts_are_kept(tmp_path: Path, layouts: Layouts, laid_out: list[int]) -> None:
    folders = [tmp_path / str(rank) for rank in range(1, MAX_KEPT + 2)]
    for rank, folder in enumerate(folders, 1):
        write_adapter(folder, TARGETS, Recipe(rank=rank, seed=rank))
        read_folder(folder, layouts)
    assert len(layouts._kept) == MAX_KEPT
    read_folder(folders[-1], layouts)
    assert len(laid_out) == MAX_KEPT + 1
    read_folder(folders[0], layouts)
    assert len(laid_out) == MAX_KEPT + 2
