"""mini-swe-agent: three sessions of three steps, one with a forced call of its only tool.

A random model never submits, so that each session ends by its limit of steps. The forced command
is fixed, since the agent runs what it is given.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agents import three_turns
from reporting import KEY, MODEL, main

COMMAND = str(Path(sys.executable).parent / "mini")


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        configs = ["-c", "mini.yaml", "-c", "agent.step_limit=3"]
        ending = ["--yolo", "--exit-immediately", "--output", f"{number}.json"]
        return [COMMAND, "--model", f"openai/{MODEL}", "--task", prompt, *configs, *ending]

    def environment(url: str) -> dict[str, str]:
        return {
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        }

    three_turns(command, environment=environment, tool="bash", arguments={"command": "echo hello"})


if __name__ == "__main__":
    main([turns])
