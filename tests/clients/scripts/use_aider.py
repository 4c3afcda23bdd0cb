"""aider: three turns of one chat (pip aider-chat). It offers no tools."""

from __future__ import annotations

import sys
from pathlib import Path

from agents import three_turns
from reporting import KEY, MODEL, main

COMMAND = str(Path(sys.executable).parent / "aider")
FLAGS = (
    "--no-check-update", "--no-show-release-notes", "--analytics-disable", "--yes-always",
    "--no-show-model-warnings", "--no-pretty", "--no-auto-commits", "--no-gitignore",
)  # fmt: skip


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        more = ["--restore-chat-history"] if number else []
        return [COMMAND, "--model", f"openai/{MODEL}", *FLAGS, *more, "--message", prompt]

    def environment(url: str) -> dict[str, str]:
        return {
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    three_turns(command, environment=environment)


if __name__ == "__main__":
    main([turns])
