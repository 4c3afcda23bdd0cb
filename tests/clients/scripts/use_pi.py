"""pi: three turns of one session, one with a forced call (npm @mariozechner/pi-coding-agent)."""

from __future__ import annotations

import json

from agents import COMMAND, three_turns
from reporting import KEY, MODEL, main


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        more = ["--continue"] if number else []
        return [COMMAND, "-p", "--provider", "manyroots", "--model", MODEL, *more, prompt]

    def files(url: str) -> dict[str, str]:
        provider = {
            "baseUrl": f"{url}/v1",
            "api": "openai-completions",
            "apiKey": KEY,
            "models": [{"id": MODEL, "reasoning": True}],  # sends the role developer, and an effort
        }
        return {".pi/agent/models.json": json.dumps({"providers": {"manyroots": provider}})}

    three_turns(command, environment=lambda url: {"PI_OFFLINE": "1"}, files=files, tool="read")


if __name__ == "__main__":
    main([turns])
