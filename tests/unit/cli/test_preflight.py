"""What can't work is told at once: before torch is imported or anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from manyroots.config import engine_settings
from manyroots.engine import preflight
from manyroots.errors import ConfigError
from tests.helpers.patience import PATIENCE_S

WITHOUT_TORCH = """
import json, os, sys
sys.modules["torch"] = None
sys.modules["transformers"] = None
import manyroots.api.server
import manyroots.text.generation_config
from manyroots.cli.main import main
from manyroots.engine import preflight
codes = []
for arguments, gpus, told in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(told, os.O_CREAT | os.O_WRONLY), 2)
        preflight.count_gpus = lambda: gpus
        sys.exit(main(arguments))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
"""Each command in a fork of one process: the imports take most of the time."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text("{}")
    (root / "empty").mkdir()
    (root / "weights.bin").write_text("")
    broken = root / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    (broken / "adapter_model.safetensors").write_bytes(b"no")
    return root


CASES = {
    "no model": ("serve ROOT/nowhere", "nowhere", 0),
    "a folder without a model": ("serve ROOT/empty", "neither a config.json", 0),
    "a file that is no model": ("serve ROOT/weights.bin", "only .gguf files", 0),
    "no GPU": ("serve ROOT/model --device cuda", "no GPU here", 0),
    "fewer GPUs": ("serve ROOT/model --tensor-parallel-size 4", "there are 2 GPUs", 2),
    "no template": ("serve ROOT/model --chat-template ROOT/x.jinja", "--chat-template", 0),
    "no tokenizer": ("serve ROOT/model --tokenizer ROOT/x", "--tokenizer", 0),
    "no generation config": ("serve ROOT/model --generation-config ROOT/x", "--generation", 0),
    "no adapter": ("serve ROOT/model --enable-lora --lora-modules a=ROOT/x", "a=", 0),
    "no adapter's config": ("serve ROOT/model --enable-lora --lora-modules a=ROOT/empty", "a=", 0),
    "no folder for adapters": ("serve ROOT/model --enable-lora --lora-dirs ROOT/x", "x", 0),
    "a broken adapter to answer with": ("chat ROOT/model --lora a=ROOT/broken", "can't be used", 0),
    "one in generate": ("generate hi --model ROOT/model --lora a=ROOT/broken", "can't be used", 0),
    "no model to chat with": ("chat ROOT/nowhere", "nowhere", 0),
    "no model to generate with": ("generate hi --model ROOT/nowhere", "nowhere", 0),
}


@pytest.fixture(scope="module")
def told(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code of each command, and its errors."""
    folder = tmp_path_factory.mktemp("told")
    commands = [
        (command.replace("ROOT", str(files)).split(), gpus, str(folder / name))
        for name, (command, _, gpus) in CASES.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(commands),
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    codes = json.loads(done.stdout.splitlines()[-1])
    texts = [(folder / name).read_text() for name in CASES]
    return dict(zip(CASES, zip(codes, texts, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_told_without_torch(
    case: str, told: dict[str, tuple[int, str]]
) -> None:
    code, errors = told[case]
    assert code == 2, errors
    assert CASES[case][1] in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("kind", ["nowhere", "long"])
def test_a_temporary_folder_that_cannot_hold_the_socket_is_told(
    kind: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = files / ("x" * 100 if kind == "long" else "nowhere")
    if kind == "long":
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match="TMPDIR"):
        preflight.check_start(engine_settings({"model": str(files / "model")}))


def test_a_broken_adapter_among_others_is_a_warning(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests are refused; a server's other adapters are served."""
    modules = [f"a={files / 'broken'}"]
    given = {"model": str(files / "model"), "enable_lora": True, "lora_modules": modules}
    preflight.check_start(engine_settings(given))
    assert "a=" in caplog.text
    with pytest.raises(ConfigError, match="can't be used"):
        preflight.check_start(engine_settings(given), needed="a")


@pytest.mark.parametrize("path", ["s3://bucket/sql", "hf://owner/sql", "owner-of-hub/sql"])
def test_a04_an_adapter_from_elsewhere_is_not_looked_for_on_disk(
    files: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """A04: its files are checked when they are fetched."""
    given = {"model": str(files / "model"), "enable_lora": True, "lora_modules": [f"a={path}"]}
    preflight.check_start(engine_settings(given), needed="a")
    assert "a=" not in caplog.text
