"""A --config file says each thing once, and typos are told from names."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyroots.cli.flags import with_config_file
from manyroots.config import ModelSettings
from manyroots.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 1\nseed: 2\n", "seed is given twice"),
        ("max-model-len: 64\nmax_model_len: 32\n", "max_model_len is given twice"),
        ("max_model_lenght: 64\n", "did you mean max_model_len for max_model_lenght?"),
        ("wizard: 64\n", "wizard, which no flag is called. See"),
    ],
)
def test_a_config_file_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        with_config_file({"config": str(file)}, [ModelSettings])
    assert says in str(caught.value)


def test_a_config_file_may_merge_and_nest(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seed: 1\nmax-model-len: 64\n")
    assert with_config_file({"config": str(file)}, [ModelSettings]) == {
        "seed": 1,
        "max_model_len": 64,
    }
