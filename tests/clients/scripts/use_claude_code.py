"""Claude Code: three turns, one with a forced call (npm @anthropic-ai/claude-code)."""

from __future__ import annotations

from agents import COMMAND, three_turns
from reporting import KEY, MODEL, main


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        more = ["--continue"] if number else []
        return [COMMAND, "-p", prompt, "--output-format", "json", *more]

    def environment(url: str) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }

    three_turns(command, environment=environment, tool="TaskList")


if __name__ == "__main__":
    main([turns])
