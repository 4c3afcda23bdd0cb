"""The fenced blocks of the README and the docs, each with the comment before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    ROOT / "examples" / "README.md",
    ROOT / "tests" / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("manyroots/*/README.md")),
]
TUTORIALS = ROOT / "docs" / "tutorials"
_FENCE = re.compile(r"^ *```(\w*)$")


@dataclass(frozen=True, slots=True)
class Snippet:
    page: str
    """Its path below the repository."""
    line: int
    language: str
    mark: str
    """The nearest line before it that is not empty."""
    text: str


def snippets(page: Path) -> Iterator[Snippet]:
    lines = page.read_text().splitlines()
    start: int | None = None
    for i, line in enumerate(lines):
        if (found := _FENCE.match(line)) is None:
            continue
        if start is None:
            start, language = i, found[1]
            before = [text.strip() for text in lines[:i] if text.strip()]
            mark = before[-1] if before else ""
        else:
            text = "\n".join(lines[start + 1 : i])
            yield Snippet(page.relative_to(ROOT).as_posix(), start + 1, language, mark, text)
            start = None
    assert start is None, f"{page.name}: the block of line {start} has no end"
