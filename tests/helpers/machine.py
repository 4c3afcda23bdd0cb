"""Checks what the tests need of a machine, before they run: `python -m tests.helpers.machine`.

Fetches the two models if they are missing. Prints a line for each thing that is missing, with its
remedy, so that a run does not fail for it twenty minutes later.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from manyroots.errors import ModelError
from manyroots.models.packaged import PACKAGED, cache_folder, packaged_model_path

ROOM_GIB = 0.5
"""The least space that the folders of a run take: small models, adapters, copies of the package."""
ROOT = Path(__file__).parents[2]


def missing() -> Iterator[str]:
    yield from _without_room(Path(tempfile.gettempdir()), ROOM_GIB, "TMPDIR")
    yield from _without_room(ROOT, 0.1, "another checkout")
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        yield f"no port of 127.0.0.1 can be listened on ({error}); servers are tested there"
    for name, model in PACKAGED.items():
        try:
            packaged_model_path(name)
        except ModelError as error:
            yield f"{model.title}: {error}"


def _without_room(folder: Path, gib: float, remedy: str) -> Iterator[str]:
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / 2**30
    except OSError as error:
        yield f"{folder} can't be written to ({error}); use {remedy}"
        return
    if free < gib:
        yield f"{folder} has {free:.1f} GiB free of the {gib} that a run takes; use {remedy}"


def main() -> int:
    found = list(missing())
    for line in found:
        print(f"tests need: {line}", file=sys.stderr)
    if not found:
        print(f"models are in {cache_folder()}, folders of tests in {tempfile.gettempdir()}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
