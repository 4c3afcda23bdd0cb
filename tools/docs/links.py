"""Links of Markdown files: where they point, and which of them are dead.

Takes files of the repository; knows nothing of the site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_FENCE = re.compile(r" *(```|~~~)")
_HEADING = re.compile(r"#{1,6} +(.*)")


@dataclass(frozen=True, slots=True)
class Link:
    line: int
    target: str
    """As it is written, without the anchor."""
    anchor: str


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line outside of fenced blocks."""
    is_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            yield number, line


def links(text: str) -> Iterator[Link]:
    """Those to other files and headings; not those to other hosts."""
    for number, line in prose(text):
        for found in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target, _, anchor = found[2].partition("#")
            if not re.match(r"[a-z]+:", target):
                yield Link(number, target, anchor)


def mapped(text: str, change: Callable[[str], str]) -> str:
    """The text with each link's target changed, outside of fenced blocks."""
    lines = text.splitlines()
    for number, line in prose(text):
        lines[number - 1] = LINK.sub(lambda found: found[1] + change(found[2]) + found[3], line)
    return "\n".join(lines) + "\n"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as repository pages make them."""
    found: set[str] = set()
    for _, line in prose(text):
        if heading := _HEADING.match(line):
            plain = LINK.sub(lambda m: re.sub(r"!?\[|\]\(", "", m[1]), heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            number = 0
            while slug + (f"-{number}" if number else "") in found:
                number += 1
            found.add(slug + (f"-{number}" if number else ""))
    return found


def target_of(page: Path, link: Link) -> Path:
    """The file or folder that a link of a page points at."""
    return Path(os.path.normpath(page.parent / link.target)) if link.target else page


def dead_links(page: Path) -> list[str]:
    """Links of a page whose file or heading is not there, with their lines."""
    found = []
    for link in links(page.read_text()):
        target = target_of(page, link)
        if not target.exists():
            found.append(f"{page}:{link.line}: there is no {link.target}")
        elif link.anchor and not _has(target, link.anchor):
            found.append(f"{page}:{link.line}: {target} has no heading #{link.anchor}")
    return found


def _has(target: Path, anchor: str) -> bool:
    return target.suffix != ".md" or anchor in anchors(target.read_text())


def markdown_files() -> list[Path]:
    """Every page of the repository."""
    folders = ("docs", "manyroots", "tests", "deploy", "examples", "tools")
    below = [file for folder in folders for file in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *below])
