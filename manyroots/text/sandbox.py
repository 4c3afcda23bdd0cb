"""Runs a chat template where it can do no harm and must come to an end.

Takes a template's source and values; gives the rendered text. Templates come with a model, so
they are somebody's code: jinja2's immutable sandbox keeps them off Python's internals, and this
adds what it lacks, limits on time and size. Every loop and macro is made to check the clock when
the template is compiled, so that even an empty loop ends; no thread has to be killed.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SOURCE_CHARACTERS = 2**20
MAX_RENDERED_CHARACTERS = 2**24
MAX_RENDER_S = 0.75
"""Of the rendering thread's own CPU time, so that a busy machine does not fail good requests."""
_MAX_POWER = 64
_MAX_WIDTH = 10_000
_NUMBER = re.compile(r"[0-9]{1,9}")


class TemplateLimitError(Exception):
    """A template that takes too long or grows too large."""


class Sandbox:
    """One compiled template. Safe to render from several threads at once."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateSyntaxError, or TemplateLimitError for an oversized source."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateLimitError(
                f"it has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are allowed"
            )
        environment = _Environment()
        tree = environment.parse(source)
        self.variables = frozenset(meta.find_undeclared_variables(tree)) - frozenset(
            environment.globals
        )
        """Names that the template expects from outside."""
        _insert_checks(tree, environment)
        self._environment = environment
        self._template = environment.from_string(tree)

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises jinja2.TemplateError, TemplateLimitError, or what the template's code provokes."""
        self._environment.limits.deadline = time.thread_time() + MAX_RENDER_S
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(dict(values)):
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)


class _Limits(threading.local):
    """The deadline of the rendering that this thread is doing."""

    deadline = 0.0


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the filters and functions that model templates are written against."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        # These two flags are part of how templates are written: without them every line break
        # after a statement would end up in the prompt.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.limits = _Limits()
        self.filters["tojson"] = _to_json
        for name in ("center", "indent"):
            self.filters[name] = _with_checked_widths(self.filters[name])
        # Templates use "%" or "~"; this one would bring another way to pad.
        del self.filters["format"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def check_time(self) -> None:
        if time.thread_time() > self.limits.deadline:
            raise TemplateLimitError(f"it did not finish within {MAX_RENDER_S} s")

    def check_value(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict):
            _check_size(len(value))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= _MAX_POWER and abs(right) <= _MAX_POWER):
            raise TemplateLimitError(f"it computes a power beyond {_MAX_POWER}")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    _check_size(len(text) * times)
        if operator == "%":
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(getattr(function, "__self__", None), str):  # center, ljust, zfill, ...
            _check_widths(*arguments, *named.values())
        return super().call(context, function, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only passes it on."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _insert_checks(tree: nodes.Template, environment: _Environment) -> None:
    """Make every loop and macro check the clock, and every assignment the size of its value."""
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for block in blocks:
        block.body.insert(0, nodes.ExprStmt(_call("check_time")))
    for assign in tree.find_all(nodes.Assign):
        assign.node = _call("check_value", assign.node)
    tree.set_environment(environment)


def _call(method: str, *arguments: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None, lineno=1)


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARACTERS:
        raise TemplateLimitError(f"it makes more than {MAX_RENDERED_CHARACTERS} characters")


def _with_checked_widths(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        _check_widths(*arguments, *named.values())
        return function(*arguments, **named)

    return checked


def _check_widths(*values: Any) -> None:
    """Padding makes a long text in a single call, which no clock can interrupt."""
    if any(isinstance(value, int) and value > _MAX_WIDTH for value in values):
        raise TemplateLimitError(f"it pads a text by more than {_MAX_WIDTH} characters")


def _check_format(text: Any) -> None:
    """The same for widths written into a format string."""
    if isinstance(text, str) and any(int(n) > _MAX_WIDTH for n in _NUMBER.findall(text)):
        raise TemplateLimitError(f"it pads a text by more than {_MAX_WIDTH} characters")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """jinja2's own filter escapes HTML, which is not what a model should read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
