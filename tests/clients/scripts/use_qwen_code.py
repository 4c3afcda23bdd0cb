"""Qwen Code: three turns of one session, one with a forced call (npm @qwen-code/qwen-code)."""

from __future__ import annotations

from agents import COMMAND, three_turns
from reporting import KEY, MODEL, main


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        more = ["--continue"] if number else []
        return [COMMAND, "-p", prompt, "--auth-type", "openai", "--chat-recording", *more]

    def environment(url: str) -> dict[str, str]:
        return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}

    three_turns(command, environment=environment, tool="list_directory")


if __name__ == "__main__":
    main([turns])
