"""`python -m tools.docs.prose`: words to avoid, and lines that are too long.

Reads the prose of the repository: Markdown outside of fenced blocks and code, comments and texts of
the package, and comments and docstrings of other Python files, whose texts are data. Gives a line
for each fault, with a better word.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tools.docs.links import ROOT, markdown_files, prose
from tools.docs.pages import QUICK, SLOW

MAX_COLUMNS = 100
AVOID = {
    r"nobody|no one": "no request, no caller: name the thing",
    r"whoever|whomever": "the code that, a request that",
    r"everybody|somebody|anybody": "all requests, another process: name the thing",
    r"who|whom": "that, which",
    r"behind": "after (time), below or in front of (space)",
    r"for want of": "because it lacks, without",
    r"out of account": "disabled, not counted",
    r"turn and turn about": "alternately",
    r"have to do with": "concern",
}
"""What to avoid, and what to write instead."""
_WORDS = {re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.I): say for words, say in AVOID.items()}
_UNBROKEN = re.compile(r"\]\(|`[^`]{40,}`")
"""Links and whole commands, which stay on one line."""
_ALLOWED = re.compile(r"behind (?:a|the|your) proxy", re.I)

BESIDE = ("tests", "tools", "examples")
"""Folders beside manyroots/ whose comments and docstrings are checked."""
GENERATED = {ROOT / path for path in QUICK | SLOW}
QUOTED = {
    ROOT / "manyroots" / "bench" / "words.py",  # a list of English words to make prompts of
    ROOT / "docs" / "requirement-tests.md",
}


def faults_in(line: str) -> Iterator[str]:
    """Words of a line that are to be avoided."""
    text = _ALLOWED.sub("", line)
    for words, say in _WORDS.items():
        for found in words.finditer(text):
            yield f"'{found[0]}': write {say}"


def markdown_faults(text: str, *, is_generated: bool = False) -> Iterator[tuple[int, str]]:
    """Line and fault. Tables, links and generated pages may be wider."""
    for number, line in prose(text):
        plain = re.sub(r"`[^`]*`", "", line)
        yield from ((number, fault) for fault in faults_in(plain))
        is_free = is_generated or line.lstrip().startswith(("|", "<!--")) or _UNBROKEN.search(line)
        if len(line) > MAX_COLUMNS and not is_free:
            yield number, f"{len(line)} columns; wrap at {MAX_COLUMNS}"


def python_faults(text: str, *, has_data: bool = False) -> Iterator[tuple[int, str]]:
    """Line and fault in comments and texts; names of variables are not prose. With `has_data`, only
    comments and texts that are statements count."""
    if next(faults_in(text), None) is None:
        return  # most files; their tokens take far longer
    begins_statement = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_data = token.type != tokenize.COMMENT and not begins_statement
        if token.type in _PROSE and not (has_data and is_data):
            for offset, line in enumerate(token.string.splitlines()):
                for fault in faults_in(re.sub(r"`[^`]*`|\{[^{}]*\}", "", line)):
                    yield token.start[0] + offset, fault
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins_statement = token.type in _BEFORE_STATEMENTS


_PROSE = {
    tokenize.COMMENT,
    tokenize.STRING,
    getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),  # from Python 3.12 on
}
_BEFORE_STATEMENTS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def sources() -> list[Path]:
    """Python files of the package."""
    return sorted(path for path in (ROOT / "manyroots").rglob("*.py") if path not in QUOTED)


def sources_beside() -> list[Path]:
    """Python files of tests, tools and examples."""
    return sorted(path for folder in BESIDE for path in (ROOT / folder).rglob("*.py"))


def faults() -> list[str]:
    """Every fault, as `file:line: fault`."""
    found = []
    for path in markdown_files():
        if path in QUOTED:
            continue
        is_generated = path in GENERATED
        for number, fault in markdown_faults(path.read_text(), is_generated=is_generated):
            found.append(f"{path.relative_to(ROOT)}:{number}: {fault}")
    for path, has_data in [(p, False) for p in sources()] + [(p, True) for p in sources_beside()]:
        for number, fault in python_faults(path.read_text(), has_data=has_data):
            found.append(f"{path.relative_to(ROOT)}:{number}: {fault}")
    return found


if __name__ == "__main__":
    listed = faults()
    print("\n".join(listed) or "The prose has no fault.")
    sys.exit(bool(listed))
