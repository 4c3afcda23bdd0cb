"""A chat becomes one prompt, by the model's own template.

Takes messages as a caller sent them; gives the text to tokenize (its special tokens are part of
it: encode it without adding any). The template comes from the model or from the operator's file,
never from a request. What keeps it off Python is `sandbox.py`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from manyroots.errors import ConfigError, ModelError, RequestError
from manyroots.text.chat_messages import ROLES, check_messages
from manyroots.text.folded_messages import foldings
from manyroots.text.formats.choice import ChatFormat, choose_format
from manyroots.text.sandbox import Sandbox
from manyroots.text.tokenizer import Tokenizer
from manyroots.text.tools import NO_TOOLS, ToolUse
from manyroots.text.tools_as_text import tell_calls, tell_tools

_END_MARK = "\ue000manyroots-end-of-final-message\ue001"
_MAX_OPTION_CHARACTERS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""gpt-oss knows low, medium and high; others become the nearest."""
SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Options of templates that turn reasoning on and off."""


_ROLE = re.compile(r"""role(?:['"]\])?\s*(?:==|!=)\s*['"](\w+)['"]""")
"""A role that a template asks for by name."""
_ASKS_FOR_NONE = re.compile(r"""\bcontent(['"]\])?\s*(is|==)\s*[nN]one\b""")


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        format: ChatFormat | None = None,
        for_tools: ChatTemplate | None = None,
    ) -> None:
        """`format`: how the model writes calls and reasoning; told from the source if not given.
        `for_tools`: the template of chats with tools, where that is another."""
        try:
            self._sandbox = Sandbox(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"the chat template can't be used: {error}. Give another with --chat-template."
            ) from error
        self._for_tools = for_tools
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._known_roles = frozenset(_ROLE.findall(source)) - set(ROLES)
        self._knows_tools = "tools" in self._sandbox.variables
        self._knows_calls = "tool_calls" in source
        self._asks_for_none = _ASKS_FOR_NONE.search(source) is not None
        self.format = format or choose_format(source)
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
        reasoning_effort: str | None = None,
        use: ToolUse = NO_TOOLS,
    ) -> str:
        """The prompt. `continue_final_message` leaves the last message open for the model."""
        if self._for_tools is not None and use.is_on and use.declarations:
            return self._for_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                options=options,
                reasoning_effort=reasoning_effort,
                use=use,
            )
        checked = check_messages(messages, known_roles=self._known_roles)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt are both true; "
                    "set add_generation_prompt to false.",
                    field="continue_final_message",
                )
            checked[-1]["content"] += _END_MARK
        checked = [self._fitted(message) for message in checked]
        declarations = use.declarations if use.is_on else []
        if declarations and not self._knows_tools:
            checked = tell_tools(checked, declarations)
        if not self._knows_calls:
            checked = tell_calls(checked)
        values = {
            **self._special_tokens,
            **self._effort(reasoning_effort),
            **self._checked_options(options or {}),
            "tools": declarations or None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render_folded(values, checked)
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

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as this family's template reads it."""
        fit, calls = self.format.tools.fit_id, message.get("tool_calls")
        if "tool_call_id" in message:
            message["tool_call_id"] = fit(message["tool_call_id"])
        if calls:
            message["tool_calls"] = [call | {"id": fit(call["id"])} for call in calls]
        if calls and not message["content"] and "reasoning_content" in message:
            # As gpt-oss calls it; its reasoning is wanted again while its calls are carried out.
            message["thinking"] = message["reasoning_content"]
        if calls and not message["content"] and self._asks_for_none:
            # DeepSeek's knows calls by it; most others would print it.
            message["content"] = None
        return message

    def _render_folded(self, values: Mapping[str, Any], messages: list[dict[str, Any]]) -> str:
        """Rendered as they are, or else with fewer roles where that is what the template takes."""
        try:
            return self._render(values, messages)
        except RequestError:
            for folded in foldings(messages):
                if folded != messages:
                    with contextlib.suppress(RequestError):
                        return self._render(values, folded)
            raise

    def _render(self, values: Mapping[str, Any], messages: list[dict[str, Any]]) -> str:
        try:
            try:
                return self._sandbox.render({**values, "messages": messages})
            except TypeError:
                # A few templates join arguments to text; most are written for the object.
                spelled = [_with_spelled_arguments(message) for message in messages]
                if spelled == messages:
                    raise
                return self._sandbox.render({**values, "messages": spelled})
        except Exception as error:  # a template is code: it can fail in any way on odd messages
            raise RequestError(
                f"the chat template refuses these messages: {str(error)[:500]}", field="messages"
            ) from error

    def follows_effort(self, effort: str) -> bool:
        """Whether `reasoning_effort` changes what this template writes. Where it does not, it is
        ignored: it is a hint, and agents send it to every model."""
        if effort == "none" and self.format.thinking is None:
            return True  # what happens anyway
        return "reasoning_effort" in self.options or bool(SWITCHES & self.options)

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """What `reasoning_effort` means to this template: its own word, a switch, or nothing."""
        if effort is None:
            return {}
        if effort not in EFFORTS:
            raise RequestError(
                f"reasoning_effort is {effort[:60]!r}; choose one of {', '.join(EFFORTS)}.",
                field="reasoning_effort",
            )
        if "reasoning_effort" in self.options:
            if self.format.tools.prefix is not None:
                effort = _HARMONY_EFFORTS.get(effort, effort)
            return {"reasoning_effort": effort}
        return dict.fromkeys(SWITCHES & self.options, effort != "none")

    def _checked_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            if name in SWITCHES and self._is_so_anyway(value):
                continue
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

    def _is_so_anyway(self, thinks: Any) -> bool:
        """Whether reasoning is on, or off, whatever a request says of it."""
        marks, has_own = self.format.thinking, self.format.tools.prefix is not None
        return (thinks is False and marks is None) or (thinks is True and bool(marks or has_own))


def _with_spelled_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append(call | {"function": function | {"arguments": text}})
    return message | {"tool_calls": calls}


def load_chat_template(
    tokenizer: Tokenizer,
    path: str | None,
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ChatTemplate | None:
    """The operator's file if there is one, else the model's own; None for a model without. The
    parsers' names are those of the flags."""
    source, tool_source = tokenizer.chat_template, tokenizer.tool_template
    if path is not None:
        tool_source = None
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--chat-template {path!r} can't be read: {error}.") from error
    if source is None:
        return None
    chosen = choose_format(tool_source or source, tool_call_parser, reasoning_parser)
    names = tokenizer.special_tokens.for_template()
    for_tools = None if tool_source is None else ChatTemplate(tool_source, names, chosen)
    return ChatTemplate(source, names, chosen, for_tools)
