"""Folders of storms: gone when their process ends, and of one that was killed when the next begins.

Takes what a storm is called; gives a new folder. Its name has the process's number.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path


def storm_folder(kind: str) -> Path:
    """An empty folder for this process alone; folders of this kind whose process is gone go."""
    prefix = f"manyroots-{kind}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        owner = re.fullmatch(rf"{prefix}(\d+)-\w+", left.name)
        if owner and not _runs(int(owner[1])):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
