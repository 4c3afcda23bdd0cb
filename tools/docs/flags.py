"""docs/reference/flags.md: every command and flag, from the parser that reads them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from manyroots.cli.main import _parser
from manyroots.flag_aliases import ACCEPTED, MISSING, MODEL, RENAMED
from tools.docs.markdown import NOTICE, code, table

HEAD = f"""\
# Flags: every command and its options

{NOTICE}
A flag may also stand in the file of `--config`, under its name without the dashes. The command line
wins over the file. `LLM(...)` in Python takes the settings of the engine under the same names, with
underscores.
"""


def commands(
    parser: argparse.ArgumentParser, words: str = "manyroots"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command that can be run, by its words."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield words, parser
    for action in below:
        for name, inner in action.choices.items():
            yield from commands(inner, f"{words} {name}")


def _row(action: argparse.Action) -> tuple[str, str, str, str]:
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    shown = ", ".join(code(name) for name in names) or code(str(action.metavar or action.dest))
    if action.choices is not None:
        value = ", ".join(code(str(choice)) for choice in action.choices)
    elif isinstance(action, argparse.BooleanOptionalAction):
        value = f"or {code('--no-' + names[0].removeprefix('--'))}"
    elif action.nargs == 0:
        value = ""
    else:
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        value = code(metavar) if action.option_strings else ""
    text = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
    found = re.fullmatch(r"(.*?) \[([^\[\]]*)\]", text, re.S)
    if found:
        return shown, value, code(found[2]) if found[2] != "None" else "", found[1]
    given = action.default not in (None, argparse.SUPPRESS, False) and action.nargs != 0
    return shown, value, code(str(action.default)) if given else "", text


def _section(words: str, parser: argparse.ArgumentParser, seen: dict[str, str]) -> str:
    """A command. `seen`: tables that another command has had, with where."""
    parts = [f"\n## {words}\n"]
    if parser.description:
        parts.append(f"\n{parser.description}\n")
    same = []
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.dest != "help"]
        if not actions:
            continue
        rows = table(("flag", "value", "default", "effect"), map(_row, actions))
        is_settings = group.title not in ("options", "positional arguments")
        if is_settings and rows in seen:
            same.append(f"[{group.title}](#{seen[rows]})")
            continue
        title = f"{words}: {group.title}"
        seen[rows] = re.sub(r"[^a-z -]", "", title).replace(" ", "-")
        parts.append(f"\n### {title}\n\n{rows}" if is_settings else f"\n{rows}")
    if same:
        parts.append(f"\nIt also takes the flags of {', '.join(same)}.\n")
    return "".join(parts)


def page() -> str:
    seen: dict[str, str] = {}
    parts = [HEAD]
    parts += [_section(words, parser, seen) for words, parser in commands(_parser()[0])]
    parts.append("\n## Flags of vLLM and SGLang\n\n`manyroots serve` renames these:\n\n")
    renamed = ((code(name), code(ours) if ours != MODEL else "`MODEL`")
               for name, ours in RENAMED.items())  # fmt: skip
    parts.append(table(("flag", "here"), renamed))
    parts.append("\nIt accepts these without effect, and says so on stderr:\n\n")
    accepted = (
        (code(name), ", ".join(code(value) for value in flag.only), flag.note)
        for name, flag in ACCEPTED.items()
    )
    parts.append(table(("flag", "values", "reason"), accepted))
    parts.append("\nIt refuses these with exit code 2:\n\n")
    parts.append(table(("flag", "remedy"), ((code(name), text) for name, text in MISSING.items())))
    return "".join(parts)
