"""Settings of adapters: every way to write them, and those that can't work named by flag (W01)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyroots.adapter_names import LoraModule
from manyroots.config import LoraSettings, engine_settings
from manyroots.engine.adapter_folders import check_folders
from manyroots.errors import ConfigError
from manyroots.server_config import ServerSettings, check_together

SQL = LoraModule("sql", "/x/sql")


@pytest.mark.parametrize(
    "written",
    [
        "sql=/x/sql",
        ["sql=/x/sql"],
        '{"name": "sql", "path": "/x/sql"}',
        [{"name": "sql", "path": "/x/sql"}],
        SQL,
        (SQL,),
    ],
)
def test_an_adapter_may_be_written_in_several_ways(written: Any) -> None:
    settings = engine_settings({"enable_lora": True, "lora_modules": written})
    assert settings.lora.lora_modules == (SQL,)


def test_a_path_may_hold_an_equals_sign_and_json_a_parent() -> None:
    written = ["a=/x/rank=8", '{"name": "b", "path": "/y", "base_model_name": "p"}']
    settings = engine_settings({"enable_lora": True, "lora_modules": written})
    assert settings.lora.lora_modules == (
        LoraModule("a", "/x/rank=8"),
        LoraModule("b", "/y", "p"),
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_modules": ["a=b"]}, "--lora-modules is given without --enable-lora"),
        ({"lora_dirs": ["x"]}, "--lora-dirs is given without --enable-lora"),
        ({"enable_lora": True, "lora_modules": ["a=x", "a=y"]}, "'a' twice"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "name=folder"),
        ({"enable_lora": True, "lora_modules": ["=a"]}, "name=folder"),
        ({"enable_lora": True, "lora_modules": ["a="]}, "name=folder"),
        ({"enable_lora": True, "lora_modules": ["{a"]}, "not JSON"),
        ({"enable_lora": True, "lora_modules": ['{"name": "a"}']}, "name and path"),
        ({"enable_lora": True, "lora_modules": [{"name": "a", "path": 3}]}, "strings"),
        ({"enable_lora": True, "lora_modules": [{"name": "a", "path": "b", "c": "d"}]}, "nothing"),
        ({"enable_lora": True, "lora_modules": [3]}, "name and path"),
        ({"enable_lora": True, "lora_modules": 3}, "must be a list"),
        ({"enable_lora": True, "lora_modules": ["a//b=c"]}, "reads like a path"),
        ({"enable_lora": True, "lora_modules": ["a\n=c"]}, "other characters than"),
        ({"enable_lora": True, "lora_modules": ["x" * 129 + "=c"]}, "129 characters"),
        ({"max_loras": -1}, "--max-loras is -1"),
        ({"max_cpu_loras": -1}, "--max-cpu-loras is -1"),
        ({"max_loras": 8, "max_cpu_loras": 4}, "--max-cpu-loras is 4"),
        ({"max_lora_rank": 0}, "--max-lora-rank is 0"),
        ({"max_lora_rank": 5000}, "--max-lora-rank is 5000"),
    ],
)
def test_w01_what_cannot_work_names_its_flag(values: dict[str, Any], message: str) -> None:
    """W01"""
    with pytest.raises(ConfigError, match=message):
        engine_settings(values)


@pytest.mark.parametrize(
    ("server", "lora", "message"),
    [
        ({"enable_lora_endpoints": True}, {}, "needs --admin-key"),
        ({"admin_key": ""}, {}, "--admin-key is empty"),
        ({"admin_key": "k", "api_key": "k"}, {}, "the same"),
        ({"enable_lora_endpoints": True, "admin_key": "k"}, {}, "without --enable-lora"),
        (
            {"enable_lora_endpoints": True, "admin_key": "k"},
            {"enable_lora": True},
            "needs --lora-dirs",
        ),
    ],
)
def test_s03_endpoints_need_a_key_and_folders(
    server: dict[str, Any], lora: dict[str, Any], message: str
) -> None:
    """S03"""
    with pytest.raises(ConfigError, match=message):
        check_together(engine_settings(lora), ServerSettings(**server))


def test_s03_endpoints_with_all_they_need(tmp_path: Path) -> None:
    """S03"""
    engine = engine_settings({"enable_lora": True, "lora_dirs": str(tmp_path)})
    check_together(engine, ServerSettings(enable_lora_endpoints=True, admin_key="k"))
    check_folders(engine.lora, {"base"})


def folders(tmp_path: Path, name: str, path: str) -> None:
    module = LoraModule(name, str(tmp_path / path))
    check_folders(LoraSettings(enable_lora=True, lora_modules=(module,)), {"base", "served"})


def test_w01_folders_are_looked_for_at_start(tmp_path: Path) -> None:
    """W01: but nothing in them is read."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "adapter_config.json").write_text("not even JSON")
    folders(tmp_path, "a", "good")
    with pytest.raises(ConfigError, match="no such folder"):
        folders(tmp_path, "a", "nowhere")
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        folders(tmp_path, "a", "empty")
    for name in ("base", "served"):
        with pytest.raises(ConfigError, match="what the base model is called"):
            folders(tmp_path, name, "good")
    with pytest.raises(ConfigError, match="--lora-dirs"):
        check_folders(LoraSettings(enable_lora=True, lora_dirs=(str(tmp_path / "no"),)), ())
