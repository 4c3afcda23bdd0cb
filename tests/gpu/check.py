"""Parity on a GPU without pytest: `python -m tests.gpu.check [KIND ...]`. Exits 1 on a difference.

Each model is checked in a process of its own, all at once: most of the time is compilation.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

DTYPES = ("float32", "bfloat16")


def main(kinds: list[str]) -> int:
    import torch

    from tests.gpu.parity import KINDS

    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 2
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.check", "--one", kind, dtype],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for kind in kinds or KINDS
        for dtype in DTYPES
    ]
    failed = 0
    for process in running:
        output, _ = process.communicate()
        failed += process.returncode != 0
        print(output.strip() if process.returncode == 0 else output[-2500:], flush=True)
    print(f"{len(running) - failed} of {len(running)} agree", flush=True)
    return int(failed > 0)


def one(kind: str, dtype: str) -> int:
    from tests.gpu.parity import check

    with tempfile.TemporaryDirectory() as folder:
        print(check(Path(folder), kind, dtype))
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(one(*arguments[1:]) if arguments[:1] == ["--one"] else main(arguments))
