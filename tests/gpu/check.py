"""Parity on a GPU without pytest: `python -m tests.gpu.check [KIND ...]`. Exits 1 on a difference.

Models of one process share what it compiles, which is most of the time; experts and the two dtypes
share little, so they have processes of their own, all at once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

DTYPES = ("float32", "bfloat16")


def main(kinds: list[str]) -> int:
    import torch

    from tests.gpu.parity import KINDS

    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 2
    wanted = kinds or list(KINDS)
    groups = [[k for k in wanted if ("moe" in k) == is_sparse] for is_sparse in (False, True)]
    running = [
        subprocess.Popen([sys.executable, "-m", "tests.gpu.check", "--some", dtype, *group])
        for dtype in DTYPES
        for group in groups
        if group
    ]
    failed = sum(process.wait() != 0 for process in running)
    print("all agree" if not failed else f"{failed} of {len(running)} processes disagree")
    return int(failed > 0)


def some(dtype: str, kinds: list[str]) -> int:
    from tests.gpu.parity import check

    failed = 0
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(check(Path(folder), kind, dtype), flush=True)
            except Exception:
                traceback.print_exc(limit=-3)
                failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(some(arguments[1], arguments[2:]) if arguments[:1] == ["--some"] else main(arguments))
