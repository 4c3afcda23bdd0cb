"""A chat becomes one prompt, by the model's own template.

Takes messages as a caller sent them; gives the text to tokenize (its special tokens are part of
it: encode it without adding any). The template comes from the model or from the operator's file,
never from a request. What keeps it off Python is `sandbox.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from manyroots.errors import ConfigError, ModelError, RequestError
from manyroots.text.chat_messages import check_messages
from manyroots.text.sandbox import Sandbox
from manyroots.text.tokenizer import Tokenizer

_END_MARK = "\ue000manyroots-end-of-final-message\ue001"
_MAX_OPTION_CHARACTERS = 1024


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._sandbox = Sandbox(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"the chat template can't be used: {error}. Give another with --chat-template."
            ) from error
        self._special_tokens = dict(special_tokens)
        self._has_developer_role = "developer" in source
        reserved = {"messages", "tools", "documents", "add_generation_prompt", *special_tokens}
        self.options = self._sandbox.variables - reserved
        """Names that a request may set through chat_template_kwargs."""

    def render(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `continue_final_message` leaves the last message open for the model."""
        checked = check_messages(messages, has_developer_role=self._has_developer_role)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt are both true; "
                    "set add_generation_prompt to false.",
                    field="continue_final_message",
                )
            checked[-1]["content"] += _END_MARK
        text = self._render(
            {
                **self._special_tokens,
                **self._checked_options(options or {}),
                "messages": checked,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        if not continue_final_message:
            return text
        before, mark, _ = text.rpartition(_END_MARK)
        if not mark:
            raise RequestError(
                "the chat template drops the final message, so it can't be continued; "
                "set continue_final_message to false.",
                field="continue_final_message",
            )
        return before

    def _render(self, values: Mapping[str, Any]) -> str:
        try:
            return self._sandbox.render(values)
        except Exception as error:  # a template is code: it can fail in any way on odd messages
            raise RequestError(
                f"the chat template refuses these messages: {str(error)[:500]}", field="messages"
            ) from error

    def _checked_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            if name not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise RequestError(
                    f"chat_template_kwargs has {name[:60]!r}; this template knows {known}.",
                    field="chat_template_kwargs",
                )
            plain = value is None or isinstance(value, bool | int | float | str)
            if not plain or len(str(value)) > _MAX_OPTION_CHARACTERS:
                raise RequestError(
                    f"chat_template_kwargs.{name} must be a number, a boolean, null or a string "
                    f"of at most {_MAX_OPTION_CHARACTERS} characters.",
                    field="chat_template_kwargs",
                )
        return dict(options)


def load_chat_template(tokenizer: Tokenizer, path: str | None) -> ChatTemplate | None:
    """The operator's file if there is one, else the model's own; None for a model without."""
    source = tokenizer.chat_template
    if path is not None:
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--chat-template {path!r} can't be read: {error}.") from error
    if source is None:
        return None
    return ChatTemplate(source, tokenizer.special_tokens.for_template())
