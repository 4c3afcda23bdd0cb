"""`manyroots chat`: a conversation in the terminal, streamed word by word.

A line is a message; /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends the
answer under way. Earlier turns are found in the prefix cache.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console

from manyroots.llm import LLM
from manyroots.sampling import SamplingParams


def chat(engine: dict[str, Any], sampling: dict[str, Any], system: str | None) -> int:
    console = Console(highlight=False)
    params = SamplingParams(**sampling)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with LLM(**engine) as llm:
        console.print(f"[bold]{llm.info.model_name}[/bold]. /reset, /exit, Ctrl-C to interrupt.")
        while True:
            try:
                line = console.input("[bold green]> [/bold green]").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return 0
            if line == "/exit":
                return 0
            if line == "/reset":
                messages = list(opening)
                continue
            if line:
                messages.append({"role": "user", "content": line})
                messages.append(
                    {"role": "assistant", "content": _answer(console, llm, messages, params)}
                )


def _answer(
    console: Console, llm: LLM, messages: list[dict[str, str]], params: SamplingParams
) -> str:
    said = ""
    try:
        for piece in llm.stream_chat(messages, params):
            said += piece
            console.print(piece, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim](interrupted)[/dim]", end="")
    console.print()
    return said
