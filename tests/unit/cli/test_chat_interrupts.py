"""Ctrl-C at the prompt of `manyroots chat` clears a line, and leaves at an empty one (S05)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from manyroots.cli import chat as command


class _Llm:
    info = SimpleNamespace(model_name="tiny")

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> _Llm:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream_chat(self, messages: list[Any], *_: Any, **__: Any) -> Iterator[str]:
        asked.append(messages[-1]["content"])
        yield "yes"


asked: list[str] = []


@pytest.mark.parametrize(("typed", "expected"), [("half", ["hello"]), ("", [])])
def test_s05_an_interrupt_clears_a_line_that_is_half_typed(
    typed: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.clear()
    lines = iter([KeyboardInterrupt(), "hello", EOFError()])

    def read(*_: Any) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(command, "LLM", _Llm)
    monkeypatch.setattr(command.Console, "input", read)
    monkeypatch.setattr(command, "readline", SimpleNamespace(get_line_buffer=lambda: typed))
    assert command.chat({}, {}, None, None) == 0
    assert asked == expected
