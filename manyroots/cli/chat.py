"""`manyroots chat`: a conversation in the terminal, streamed word by word.

A line is a message; /reset forgets the conversation, /exit or Ctrl-D leaves. Ctrl-C ends the
answer under way. At the prompt it clears a line that is half typed, and leaves at an empty one.
Earlier turns are found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

from rich.console import Console

from manyroots.adapter_names import LoRARequest
from manyroots.errors import RequestError
from manyroots.llm.llm import LLM
from manyroots.sampling import SamplingParams

try:
    import readline
except ImportError:  # not on every platform
    readline = None  # type: ignore[assignment]


def chat(
    engine: dict[str, Any], sampling: dict[str, Any], system: str | None, lora: str | None
) -> int:
    """`lora`: the name of an adapter among the engine's `lora_modules`."""
    console = Console(highlight=False)
    request = None if lora is None else LoRARequest(lora)
    params = SamplingParams(**sampling)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with LLM(**engine) as llm:
        name = llm.info.model_name + (f" with {lora}" if lora else "")
        console.print(f"[bold]{name}[/bold]. /reset, /exit, Ctrl-C to interrupt.")
        while True:
            try:
                line = console.input("[bold green]> [/bold green]").strip()
            except KeyboardInterrupt:
                console.print()
                if _half_typed():
                    continue
                return 0
            except EOFError:
                console.print()
                return 0
            if line == "/exit":
                return 0
            if line == "/reset":
                messages = list(opening)
                continue
            if line:
                messages.append({"role": "user", "content": line})
                pieces = llm.stream_chat(messages, params, lora_request=request)
                try:
                    said = _answer(console, pieces)
                except RequestError as error:  # as where the conversation has become too long
                    console.print(f"{error} /reset begins anew.", markup=False)
                    messages.pop()
                    continue
                messages.append({"role": "assistant", "content": said})


def _half_typed() -> str:
    """What stood on the line that an interrupt ended; nothing without an editor of lines."""
    return "" if readline is None else readline.get_line_buffer()


def _answer(console: Console, pieces: Generator[str]) -> str:
    said = ""
    try:
        # Closed here and now: an interrupt of the printing does not end the answer by itself.
        with closing(pieces):
            for piece in pieces:
                said += piece
                console.print(piece, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim](interrupted)[/dim]", end="")
    console.print()
    return said
