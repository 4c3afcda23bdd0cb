"""Runs a chat template where it can't reach Python.

Takes a template's source and values; gives the rendered text. Templates come with a model, so they
are code of strangers: jinja2's immutable sandbox, as it is, keeps them off Python's internals and
from changing what they are given. What one costs is not limited: a model folder is the operator's,
and no request brings a template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Sandbox:
    """One compiled template. Safe to render from several threads at once."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = _environment()
        tree = environment.parse(source)
        self.variables = frozenset(meta.find_undeclared_variables(tree)) - frozenset(
            environment.globals
        )
        """Names that the template expects from outside."""
        self._template = environment.from_string(tree)

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises jinja2.TemplateError, or what the template's code provokes."""
        return self._template.render(dict(values))


def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with the filters and functions that model templates are written against."""
    # These two flags are part of how templates are written: without them every line break after a
    # statement would end up in the prompt.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only passes it on."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which is not what a model should read."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
