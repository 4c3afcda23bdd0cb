"""OpenAI's Codex: three turns of one session, one with a forced call (npm @openai/codex)."""

from __future__ import annotations

from agents import COMMAND, three_turns
from reporting import KEY, MODEL, main

CONFIG = """\
model = "{model}"
model_provider = "manyroots"
[model_providers.manyroots]
name = "manyroots"
base_url = "{url}/v1"
env_key = "MANYROOTS_KEY"
wire_api = "responses"
"""


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        again = ["resume", "--last"] if number else []
        return [COMMAND, "exec", *again, "--skip-git-repo-check", prompt]

    def files(url: str) -> dict[str, str]:
        return {".codex/config.toml": CONFIG.format(model=MODEL, url=url)}

    three_turns(
        command, environment=lambda url: {"MANYROOTS_KEY": KEY}, files=files, tool="get_goal"
    )


if __name__ == "__main__":
    main([turns])
