"""Runs a script's checks and says how each went; no dependency, since every client has a venv.

`main(checks)` runs functions in order, prints one JSON line for each, and exits with 1 if any
failed. The server's address, the model's name and the key come from the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable

URL = os.environ.get("MANYROOTS_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("MANYROOTS_MODEL", "smollm2-135m-instruct")
KEY = os.environ.get("MANYROOTS_KEY", "none")
V1 = f"{URL}/v1"
TOKENIZER = os.environ.get("MANYROOTS_TOKENIZER", "")
"""A folder, for clients that count tokens themselves."""


def main(checks: list[Callable[[], None]]) -> None:
    wanted = set(sys.argv[1:])
    num_failed = 0
    for check in checks:
        name = check.__name__
        if wanted and name not in wanted:
            continue
        begin = time.monotonic()
        error = None
        try:
            check()
        except Exception as failure:  # whatever a client raises is its verdict
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"[:300]
            num_failed += 1
        seconds = round(time.monotonic() - begin, 2)
        print(json.dumps({"check": name, "error": error, "seconds": seconds}), flush=True)
    sys.exit(1 if num_failed else 0)
