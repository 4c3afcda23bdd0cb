"""Arguments one after the other, each a plain text between marks, told as one JSON object.

Takes a tool's schema; tells the writer JSON: strings as they come, all else when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator

from manyroots.text.chat_output import AnswerWriter
from manyroots.text.formats.argument_types import ArgumentSchema, as_json, inside_text

ReadText = Callable[[Callable[[str], None]], Generator[None, None, bool]]
"""Hands on a value's text as it comes; gives whether it came to its end."""


class TextArguments:
    """The arguments of one call."""

    def __init__(self, writer: AnswerWriter, schema: ArgumentSchema) -> None:
        self.schema = schema
        self.keys: set[str] = set()
        """Those that were told."""
        self._tell = writer.arguments
        self._before = "{"

    def value(
        self,
        key: str,
        read: ReadText,
        *,
        trailing: str = "",
        is_text: bool | None = None,
        spell: Callable[[str, ArgumentSchema], str] = as_json,
    ) -> Generator[None, None, bool]:
        """Tell one argument; gives whether it came to its end. `trailing`: layout after the text,
        left out where it is there. `is_text`: whether it is a string; by the schema if None.
        `spell`: the JSON of a text that may be more than a string."""
        schema = self.schema.property(key)
        begin = f"{self._before}{json.dumps(key, ensure_ascii=False)}: "
        self.keys.add(key)
        self._before = ", "
        if not (schema.is_text if is_text is None else is_text):
            parts: list[str] = []
            is_whole = yield from read(parts.append)
            if is_whole:
                text = "".join(parts).removesuffix(trailing)
                self._tell(begin + spell(text, schema))
            return is_whole
        self._tell(f'{begin}"')
        held = ""

        def tell(text: str) -> None:
            nonlocal held
            text = held + text
            held = trailing if trailing and text.endswith(trailing) else ""
            self._tell(inside_text(text.removesuffix(trailing)))

        is_whole = yield from read(tell)
        self._tell('"' if is_whole else "")
        return is_whole

    def end(self) -> None:
        self._tell("{}" if self._before == "{" else "}")
