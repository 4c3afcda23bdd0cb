"""Continue's CLI: three turns of one session, one with a forced call (npm @continuedev/cli)."""

from __future__ import annotations

from agents import COMMAND, three_turns
from reporting import KEY, MODEL, main

CONFIG = """\
name: local
version: 1.0.0
schema: v1
models:
  - name: manyroots
    provider: openai
    model: {model}
    apiBase: {url}/v1
    apiKey: {key}
    roles: [chat]
    capabilities: [tool_use]
"""


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        more = ["--resume"] if number else []
        return [
            "sh", "-c", '"$0" --config "$HOME/config.yaml" "$@"',
            COMMAND, "--auto", "-p", prompt, *more,
        ]  # fmt: skip

    def files(url: str) -> dict[str, str]:
        return {"config.yaml": CONFIG.format(model=MODEL, url=url, key=KEY)}

    def environment(_: str) -> dict[str, str]:
        return {"CONTINUE_TELEMETRY_ENABLED": "0"}

    three_turns(command, environment=environment, files=files, tool="List")


if __name__ == "__main__":
    main([turns])
