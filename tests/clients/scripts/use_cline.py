"""Cline's CLI: three sessions, one with a forced call (npm cline).

It resumes a session in a terminal only, so each turn is a session of its own.
"""

from __future__ import annotations

from agents import COMMAND, three_turns
from reporting import KEY, MODEL, main


def turns() -> None:
    def command(number: int, prompt: str) -> list[str]:
        login = f'"$0" auth -p openai-compatible -k {KEY} -m {MODEL} -b "$SERVER/v1" && '
        task = f'"$0" -P openai-compatible -m {MODEL} "$1"'
        return ["sh", "-c", task if number else login + task, COMMAND, prompt]

    three_turns(command, environment=lambda url: {"SERVER": url}, tool="read_files")


if __name__ == "__main__":
    main([turns])
