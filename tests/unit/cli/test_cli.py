"""The command line (S05): flags become settings, mistakes become one line and exit code 2."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from manyroots.adapter_names import LoraModule
from manyroots.cli.main import main
from manyroots.config import ENGINE_ROOMS, EngineSettings, LoraSettings, engine_settings
from manyroots.errors import ConfigError
from manyroots.options import flag_name
from manyroots.server_config import ServerSettings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineSettings, ServerSettings]]:
    """What `serve` was called with, without serving."""
    calls: list[tuple[EngineSettings, ServerSettings]] = []

    def record(engine: EngineSettings, server: ServerSettings) -> int:
        calls.append((engine, server))
        return 0

    monkeypatch.setattr("manyroots.api.server.serve", record)
    # Most of these name models and adapters that are nowhere.
    monkeypatch.setattr("manyroots.engine.preflight.check_start", lambda *_, **__: None)
    return calls


def test_s05_flags_are_named_as_users_know_them(served: list[Any]) -> None:
    """S05: vLLM's names, defaults where nothing is said."""
    flags = (
        "serve some/model --max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 256 "
        "--gpu-memory-utilization 0.5 --block-size 32 --served-model-name tiny --api-key k "
        "--dtype bfloat16 --seed 3 --no-enable-prefix-caching --port 9000"
    )
    assert main(flags.split()) == 0
    [(engine, server)] = served
    assert engine == engine_settings(
        {
            "model": "some/model", "max_model_len": 512, "max_num_seqs": 8,
            "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.5, "block_size": 32,
            "served_model_name": "tiny", "dtype": "bfloat16", "seed": 3,
            "enable_prefix_caching": False,
        }
    )  # fmt: skip
    assert server == ServerSettings(api_key="k", port=9000)


def test_s05_adapters_are_named_as_users_know_them(served: list[Any], tmp_path: Path) -> None:
    """S05, S03: --lora-modules takes several, several times, and JSON."""
    flags = [
        "serve", "some/model", "--enable-lora", "--lora-modules", "a=/x", "b=/y",
        "--lora-modules", '{"name": "c", "path": "/z", "base_model_name": "p"}', "--max-loras", "4",
        "--max-cpu-loras", "9", "--max-lora-rank", "64", "--lora-dirs", str(tmp_path), "/more",
        "--enable-lora-endpoints", "--admin-key", "k",
    ]  # fmt: skip
    assert main(flags) == 0
    [(engine, server)] = served
    assert engine.lora == LoraSettings(
        enable_lora=True,
        lora_modules=(LoraModule("a", "/x"), LoraModule("b", "/y"), LoraModule("c", "/z", "p")),
        max_loras=4,
        max_cpu_loras=9,
        max_lora_rank=64,
        lora_dirs=(str(tmp_path), "/more"),
    )
    assert (server.enable_lora_endpoints, server.admin_key) == (True, "k")


def test_adapters_may_come_from_a_config_file(served: list[Any], tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("enable-lora: true\nlora-modules:\n- a=/x\n- {name: b, path: /y}\n")
    assert main(["serve", "--config", str(config)]) == 0
    [(engine, _)] = served
    assert engine.lora.lora_modules == (LoraModule("a", "/x"), LoraModule("b", "/y"))


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        (["--lora", "a=/x"], (LoraModule("a", "/x"),)),
        (["--enable-lora", "--lora-modules", "a=/x", "--lora", "a"], (LoraModule("a", "/x"),)),
    ],
)
@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"]])
def test_s05_generate_and_chat_take_an_adapter(
    command: list[str],
    flags: list[str],
    modules: tuple[LoraModule, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S05"""
    calls: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> int:
        calls.append(arguments)
        return 0

    monkeypatch.setattr(f"manyroots.cli.{command[0]}.{command[0]}", record)
    monkeypatch.setattr("manyroots.engine.preflight.check_start", lambda *_, **__: None)
    assert main([*command, *flags]) == 0
    [arguments] = calls
    engine = next(item for item in arguments if isinstance(item, dict))
    assert arguments[-1] == "a"
    assert engine_settings(engine).lora == LoraSettings(enable_lora=True, lora_modules=modules)


def test_no_arguments_are_the_defaults(served: list[Any]) -> None:
    assert main(["serve"]) == 0
    assert served == [(EngineSettings(), ServerSettings())]


def test_the_api_key_may_come_from_the_environment(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYROOTS_API_KEY", "secret")
    main(["serve"])
    main(["serve", "--api-key", "other"])
    assert [server.api_key for _, server in served] == ["secret", "other"]


def test_the_admin_key_may_come_from_the_environment(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYROOTS_ADMIN_KEY", "secret")
    main(["serve"])
    assert [server.admin_key for _, server in served] == ["secret"]


def test_a_config_file_gives_what_the_command_line_does_not(
    served: list[Any], tmp_path: Path
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("model: a/b\nmax-num-seqs: 7\nport: 9001\nblock_size: 32\n")
    assert main(["serve", "--config", str(config), "--port", "9002"]) == 0
    [(engine, server)] = served
    assert engine.model.model == "a/b"
    assert engine.scheduler.max_num_seqs == 7
    assert engine.cache.block_size == 32
    assert server.port == 9002


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size", "3"], "--block-size is 3"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization is 1.5"),
        (["--port", "99999"], "--port is 99999"),
        (["--api-key", ""], "--api-key is empty"),
        (["--lora-modules", "a=b"], "without --enable-lora"),
        (["--enable-lora-endpoints"], "needs --admin-key"),
        (["--enable-lora-endpoints", "--admin-key", "k"], "without --enable-lora"),
        (["--config", "/does/not/exist.yaml"], "can't be read"),
    ],
)
def test_settings_that_cannot_work_name_their_flag(
    flags: list[str], message: str, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    assert message in capsys.readouterr().err
    assert served == []


def test_an_unknown_name_in_a_config_file_is_refused(
    served: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("max_num_seq: 7\n")
    assert main(["serve", "--config", str(config)]) == 2
    assert "max_num_seq" in capsys.readouterr().err


def test_every_setting_has_a_flag_and_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    for cls in (*ENGINE_ROOMS.values(), ServerSettings):
        for field in dataclasses.fields(cls):
            assert field.metadata["help"], field.name
            if field.name != "model":
                assert flag_name(field.name) in shown


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("api_key: 1234", "api_key is 1234; it must be text"),
        ("admin-key: true", "admin_key is True; it must be text"),
        ("served_model_name: 1.5", "served_model_name is 1.5; it must be text"),
        ("port: abc", "port is 'abc'; it must be a whole number"),
        ('port: "8000"', "port is '8000'; it must be a whole number"),
        ("port: true", "port is True; it must be a whole number"),
        ("port: 1.5", "port is 1.5; it must be a whole number"),
        ("port:", "port is None; it must be a whole number"),
        ("port: [1]", "port is [1]; it must be a whole number"),
        ("port: 99999", "--port is 99999; it must be from 0 to 65535"),
        ("block-size: 3", "--block-size is 3"),
        ("max_num_seqs: {a: 1}", "max_num_seqs is {'a': 1}; it must be a whole number"),
        ("gpu_memory_utilization: high", "gpu_memory_utilization is 'high'; it must be a number"),
        ("gpu_memory_utilization: .nan", "--gpu-memory-utilization is nan"),
        ("drain_timeout_s: true", "drain_timeout_s is True; it must be a number"),
        ("enable_lora: 1", "enable_lora is 1; it must be true or false"),
        ("enable_lora: 'no'", "enable_lora is 'no'; it must be true or false"),
        ("dtype: float64", "dtype is 'float64'; it must be one of auto, float32"),
        ("log_level: [info]", "log_level is ['info']; it must be text"),
        ("lora_dirs: 7", "lora_dirs is 7; it must be a list"),
        ("lora_modules: [7]", "lora_modules is [7]; it must be a list"),
    ],
)
def test_values_of_a_config_file_are_checked_as_flags_are(
    line: str, expected: str, served: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(line)
    assert main(["serve", "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert f"--config {config}: " in error
    assert expected in error
    assert served == []


def test_every_setting_may_come_from_a_file_as_its_default(
    served: list[Any], tmp_path: Path
) -> None:
    lines = []
    for cls in (*ENGINE_ROOMS.values(), ServerSettings):
        for field in dataclasses.fields(cls):
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            lines.append(f"{field.name}: {json.dumps(default)}")
    config = tmp_path / "serve.yaml"
    config.write_text("\n".join(lines))
    assert main(["serve", "--config", str(config)]) == 0
    assert served == [(EngineSettings(), ServerSettings())]


def test_settings_in_python_are_checked_alike() -> None:
    with pytest.raises(ConfigError, match="--max-model-len is '512'; it must be a whole number"):
        engine_settings({"max_model_len": "512"})
    with pytest.raises(ConfigError, match="--enable-lora is 1; it must be true or false"):
        engine_settings({"enable_lora": 1})


def test_s05_every_flag_of_the_server_is_in_the_docs() -> None:
    """S05: in README or docs, as itself or as --no-..."""
    root = Path(__file__).parents[3]
    text = "".join(path.read_text() for path in (root / "README.md", *root.glob("docs/*.md")))
    rooms = (*ENGINE_ROOMS.values(), ServerSettings)
    flags = [flag_name(field.name) for room in rooms for field in dataclasses.fields(room)]
    missing = [
        flag for flag in flags if flag not in text and flag.replace("--", "--no-", 1) not in text
    ]
    assert missing == []
