"""gptme: three turns of one conversation with its tools by API, one with a forced call.

It samples greedily, and its session fails if an answer is empty.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agents import three_turns
from reporting import KEY, MODEL, main

COMMAND = str(Path(sys.executable).parent / "gptme")


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        flags = ["--non-interactive", "--tool-format", "tool", "--tools", "read", "--no-workspace"]
        return [COMMAND, *flags, "--name", "talk", "--model", f"local/{MODEL}", prompt]

    def environment(url: str) -> dict[str, str]:
        return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY}

    three_turns(command, environment=environment, tool="read", min_tokens=8)


if __name__ == "__main__":
    main([turns])
