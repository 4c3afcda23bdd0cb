"""--yarn-factor gives the context and the rotation of a config that says so itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyroots.config import ModelSettings
from manyroots.errors import ConfigError, ModelError
from manyroots.models.load import describe
from manyroots.models.source import resolve_source
from tests.unit.models.tiny import LLAMA3, save_tiny


def test_a_stretched_model_is_one_whose_config_has_yarn(tmp_path: Path) -> None:
    save_tiny(tmp_path / "plain", "llama")
    save_tiny(tmp_path / "written", "llama")
    file = tmp_path / "written" / "config.json"
    config = json.loads(file.read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config["rope_parameters"] |= yarn
    file.write_text(json.dumps(config))
    plain = describe(resolve_source(ModelSettings(model=str(tmp_path / "plain"))))
    settings = ModelSettings(model=str(tmp_path / "plain"), yarn_factor=4.0)
    stretched = describe(resolve_source(settings))
    assert stretched == describe(resolve_source(ModelSettings(model=str(tmp_path / "written"))))
    assert (plain.max_position_embeddings, stretched.max_position_embeddings) == (256, 1024)
    assert plain.ropes != stretched.ropes


def test_a_context_that_is_stretched_already_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", rope_parameters=LLAMA3)
    with pytest.raises(ModelError, match="llama3"):
        resolve_source(ModelSettings(model=str(tmp_path), yarn_factor=4.0))


@pytest.mark.parametrize("factor", [0.5, 65.0, float("nan")])
def test_factors_that_make_no_sense(factor: float) -> None:
    with pytest.raises(ConfigError, match="--yarn-factor"):
        ModelSettings(yarn_factor=factor)
