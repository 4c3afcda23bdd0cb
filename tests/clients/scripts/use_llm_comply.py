"""llm-comply: chats, responses and messages against the published schemas.

Its own checks and verdicts. Those with an image must fail with our refusal: no model here sees.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from reporting import KEY, MODEL, V1, main

COMMAND = Path(sys.executable).parent / "llm-comply"
FORMATS = ("openai-chat", "open-responses", "anthropic")


def verdicts(kind: str) -> dict[str, list[str]]:
    """By its id: what was wrong. What it skips for models of other makers is not among them."""
    told = subprocess.run(
        [COMMAND, "-u", V1, "-k", KEY, "-m", MODEL, "--format", kind, "--json", "--timeout", "600"],
        capture_output=True,
        text=True,
    )
    results = json.loads(told.stdout[told.stdout.index("{") :])["results"]
    return {
        result["id"]: result.get("errors", [])
        for result in results
        if result["status"] != "skipped"
    }


def check(name: str, errors: list[str]) -> Callable[[], None]:
    def run() -> None:
        if "image" in name:
            assert errors, "an image was taken"
            assert errors[0].startswith("HTTP 400"), errors
        else:
            assert not errors, "; ".join(errors)

    run.__name__ = name.replace("-", "_")
    return run


if __name__ == "__main__":
    found = {
        f"{kind}_{name}": errors for kind in FORMATS for name, errors in verdicts(kind).items()
    }
    main([check(name, errors) for name, errors in found.items()])
