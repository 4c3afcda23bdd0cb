"""Programs that tests need beside Python, from Debian's packages, installed where they are missing.

Takes a package and the names of its command; gives the command's path, or None where it is missing
and can't be installed (no root, no apt, no network): then the test says what it leaves out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache

LIMIT_S = 150
_OPTIONS = (
    "-o", "DPkg::Lock::Timeout=120",  # several tests may install at once
    "-o", "Acquire::http::Timeout=10", "-o", "Acquire::Retries=1",
)  # fmt: skip


@lru_cache
def command_of(package: str, *names: str) -> str | None:
    found = _found(names)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for arguments in (
            ("install", "-y", "-qq", "--no-install-recommends", package),
            ("update", "-qq"),
            ("install", "-y", "-qq", "--no-install-recommends", package),
        ):
            _apt(*arguments)
            found = _found(names)
            if found is not None:
                break
    return found


def _found(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def _apt(*arguments: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", *_OPTIONS, *arguments]
    try:
        subprocess.run(command, env=environment, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return
