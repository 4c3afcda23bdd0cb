"""The built wheel, installed into an environment of its own, serves.

Takes seconds because nothing is fetched: the wheel is built without isolation, and the new
environment finds the dependencies that are installed here through a path file. A path file of
plain folders runs none of the hooks of an editable install, so `manyroots` can only be the wheel's.
CONTRIBUTING.md has the command that installs from the network.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from manyroots.config import DEFAULT_MODEL
from manyroots.version import __version__
from tests.e2e.conftest import running
from tests.helpers.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
FACTS = """
import json, os
before = dict(os.environ)
import manyroots
from importlib.metadata import version
from importlib.resources import files
page = files("manyroots.api.page") / "static"
print(json.dumps({
    "file": manyroots.__file__,
    "version": version("manyroots"),
    "has_types": (files("manyroots") / "py.typed").is_file(),
    "page": sorted(file.name for file in page.iterdir()),
    "is_environment_changed": dict(os.environ) != before,
}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def home(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    [wheel] = built.glob("*.whl")
    python = home / "bin" / "python"
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
            "--no-index", "--disable-pip-version-check", str(wheel),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [packages] = home.glob("lib/python*/site-packages")
    installed = [path for path in sys.path if any(Path(path).glob("*.dist-info"))]
    (packages / "dependencies.pth").write_text("\n".join(installed))
    return home


def _names(built: Path) -> set[str]:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_wheel_has_the_package_and_its_data_and_nothing_else(built: Path) -> None:
    names = _names(built)
    files = [path for path in (ROOT / "manyroots").rglob("*") if path.is_file()]
    # Processes of other tests may be compiling, through files with names of their own.
    files = [path for path in files if path.parent.name != "__pycache__"]
    known = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".md"}
    assert {name for name in names if name.startswith("manyroots/")} == known
    tops = {name.split("/")[0] for name in names}
    assert tops == {"manyroots", f"manyroots-{__version__}.dist-info"}
    assert not [name for name in names if "soak" in name]


def test_the_sdist_has_the_tests_and_the_docs(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"Makefile", "README.md", "docs/concepts.md", "tests/conftest.py"} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_d03_the_installed_package_has_its_version_its_types_and_the_page(
    home: Path, tmp_path: Path
) -> None:
    # In another folder: `python -c` imports from the one that it stands in.
    said = subprocess.run(
        [home / "bin" / "manyroots", "--version"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == f"manyroots {__version__}"
    found = subprocess.run(
        [home / "bin" / "python", "-c", FACTS],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    facts = json.loads(found.stdout)
    assert Path(facts["file"]).is_relative_to(home)
    assert facts["version"] == __version__
    assert facts["has_types"]
    static = ROOT / "manyroots" / "api" / "page" / "static"
    assert facts["page"] == sorted(file.name for file in static.iterdir())
    assert not facts["is_environment_changed"]


def test_d03_the_installed_command_serves_the_default_model(home: Path, tmp_path: Path) -> None:
    command = [str(home / "bin" / "manyroots")]
    flags = ("--num-gpu-blocks-override", "64")
    with running(*flags, command=command, cwd=tmp_path) as server:
        assert httpx.get(f"{server.url}/live", timeout=PATIENCE_S).status_code == 200
        server.wait_until_ready()
        models = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        assert [model["id"] for model in models] == [DEFAULT_MODEL]
        body = {
            "model": DEFAULT_MODEL,
            "prompt": "One, two, three,",
            "max_tokens": 4,
            "temperature": 0,
        }
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        assert "four" in answer["choices"][0]["text"]
        page = httpx.get(f"{server.url}/", headers={"accept": "text/html"}, timeout=PATIENCE_S)
        assert page.headers["content-type"].startswith("text/html")
