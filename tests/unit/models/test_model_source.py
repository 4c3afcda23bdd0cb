"""From the name a user gives to files and a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from manyroots.config import DEFAULT_MODEL, ModelSettings
from manyroots.errors import ModelError
from manyroots.models import source
from manyroots.models.load import describe
from manyroots.models.source import ModelSource, SourceKind, resolve_source
from tests.unit.models.gguf_writing import write_gguf
from tests.unit.models.tiny import tiny_config


def resolve(model: object, **changes: Any) -> ModelSource:
    return resolve_source(ModelSettings(model=str(model), **changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    tiny_config().save_pretrained(path)
    return path


def test_a_folder_is_known_by_its_name(folder: Path) -> None:
    found = resolve(folder)
    assert (found.kind, found.path, found.name) == (SourceKind.FOLDER, folder, "my-model")
    assert found.config.hidden_size == 48


def test_end_tokens_come_from_both_configs(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert resolve(folder).eos_token_ids == (7, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert resolve(folder).eos_token_ids == (9, 2)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_generation_config_is_named(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        resolve(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "llama", "dtype": "float7"}'])
def test_a_broken_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json can't be used"):
        resolve(folder)


def test_a_model_type_that_is_not_served_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match=r"is 'no-such-model'; this version serves DeepseekV2For"):
        describe(resolve(folder))


def test_a_gguf_file_and_a_folder_with_only_it_are_the_same(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.Q8.gguf", tiny_config())
    direct, by_folder = resolve(file), resolve(tmp_path)
    assert direct.path == by_folder.path == file
    assert direct.kind is by_folder.kind is SourceKind.GGUF
    assert direct.name == "tiny.Q8"


def test_a_folder_with_both_formats_loads_what_load_format_says(folder: Path) -> None:
    file = write_gguf(folder / "model.gguf", tiny_config())
    assert resolve(folder).kind is SourceKind.FOLDER
    assert resolve(folder, load_format="gguf").path == file


def test_several_gguf_files_are_listed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(tmp_path / f"{name}.gguf", tiny_config())
    with pytest.raises(ModelError, match=r"several .gguf files \(a.gguf, b.gguf\)"):
        resolve(tmp_path)


def test_a_folder_with_nothing_of_use_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config.json nor exactly one .gguf"):
        resolve(tmp_path)
    with pytest.raises(ModelError, match=r"has no .gguf file"):
        resolve(tmp_path, load_format="gguf")


def test_a_single_file_must_be_gguf(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"only .gguf files"):
        resolve(folder / "config.json")


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such", "gone.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_never_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve(name)


def test_a_hub_id_fetches_weights_only_where_they_are_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot(
        hub_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        assert (hub_id, revision) == ("org/name", "v1")
        names = ["model-1.safetensors", "original/model.safetensors", "consolidated.safetensors"]
        fetched = filter_repo_objects(
            [*names, "config.json"], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert set(fetched) <= {"model-1.safetensors", "config.json"}
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (folder / "model.safetensors").touch()
    assert resolve("org/name", revision="v1").name == "org/name"
    resolve("org/name", revision="v1", load_format="dummy")
    assert "*.safetensors" in asked[0]
    assert "*.safetensors" not in asked[1]
    assert not [pattern for pattern in asked[0] if pattern.endswith((".bin", ".pt"))]


def test_a_hub_id_without_safetensors_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a repository of GGUF files, or of pickles, nothing but small files is fetched."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(ModelError, match=r"'org/name-GGUF' has no safetensors.*pass its path"):
        resolve("org/name-GGUF")
    assert resolve("org/name-GGUF", load_format="dummy").name == "org/name-GGUF"


def test_a_hub_id_that_can_not_be_fetched_names_it_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("cannot find the requested files")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"'org/name' at revision 'v2'.*pass the folder"):
        resolve("org/name", revision="v2")


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "gemma3-270m"])
def test_a_packaged_models_name_means_its_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "packaged.gguf", tiny_config())
    monkeypatch.setattr(source, "packaged_model_path", {name: file}.__getitem__)
    found = resolve(name)
    assert (found.path, found.name) == (file, name)


def test_an_adapters_folder_is_told_from_a_models(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter and no model.*--lora-modules"):
        resolve(tmp_path)


def test_an_adapter_beside_a_model_is_said_to_be_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformers would apply it."""
    (folder / "adapter_config.json").write_text("{}")
    resolve(folder)
    assert "adapter beside the model" in caplog.text
