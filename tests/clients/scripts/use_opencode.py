"""opencode: three turns of one session, one with a forced call (npm opencode-ai)."""

from __future__ import annotations

import json

from agents import COMMAND, three_turns
from reporting import KEY, MODEL, main


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        more = ["--continue"] if number else []
        return [COMMAND, "run", "--model", f"manyroots/{MODEL}", *more, prompt]

    def files(url: str) -> dict[str, str]:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
            "models": {MODEL: {"name": MODEL}},
        }
        # Its updates and its list of models come from elsewhere.
        config = {"provider": {"manyroots": provider}, "autoupdate": False, "share": "disabled"}
        return {".config/opencode/opencode.json": json.dumps(config)}

    def environment(_: str) -> dict[str, str]:
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1"}

    three_turns(command, environment=environment, files=files, tool="glob")


if __name__ == "__main__":
    main([turns])
