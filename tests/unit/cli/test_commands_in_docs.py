"""Commands that README and docs tell users to run are taken by the command line as they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyroots.bench.traffic_cases import CASES
from manyroots.cli.main import _parse

ROOT = Path(__file__).parents[3]
DOCS = [
    page
    for page in sorted(ROOT.glob("docs/**/*.md"))
    if page.name != "requirements.md" and page.parent.name != "reference"
]
PAGES = [
    ROOT / "README.md",
    *DOCS,
    *ROOT.glob("manyroots/*/README.md"),
    *ROOT.glob("tests/**/*.md"),
]
SHORT = {
    "$D ": "manyroots bench decode --model-config qwen3-8b ",
    "$T ": "manyroots bench traffic --model-config qwen3-8b ",
}
"""What docs/performance.md abbreviates."""
STANDS_FOR = {"--model-config NAME": "--model-config qwen3-8b", "...": ""}
COMMAND = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?manyroots ((?:serve|bench|simulate|conformance) .*)$"
)


def commands(page: Path) -> Iterator[str]:
    """Whole lines of blocks of code, and code within a line."""
    text = page.read_text()
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in (*lines, *inline):
        for short, long in (SHORT | STANDS_FOR).items():
            line = line.replace(short, long)
        found = COMMAND.match(line.strip())
        if found:
            yield found[1]


FOUND = [(page.name, command) for page in PAGES for command in dict.fromkeys(commands(page))]


@pytest.mark.parametrize(("page", "command"), FOUND)
def test_a_command_in_the_docs_is_one(page: str, command: str) -> None:
    """D01."""
    words = shlex.split(command, comments=True)
    if words[-1:] == ["--help"] or words == ["bench", "WHAT"]:
        return
    try:
        arguments = _parse(words)
    except SystemExit:
        pytest.fail(f"{page}: manyroots {command}")
    if words[1] == "traffic":
        assert set(arguments.case) - {"NAME"} <= set(CASES), command


def test_modules_that_the_docs_have_run_are_there() -> None:
    """D01."""
    named = {
        module
        for page in (*PAGES, ROOT / "docs/requirements.md")
        for module in re.findall(r"python -m ((?:tests|manyroots)[\w.]*\w)", page.read_text())
    }
    assert len(named) > 10
    for module in sorted(named):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_the_search_finds_commands_of_every_kind() -> None:
    kinds = {command.split()[0] for _, command in FOUND}
    benches = {command.split()[1] for _, command in FOUND if command.startswith("bench ")}
    assert kinds == {"serve", "bench", "simulate", "conformance"}
    assert {"decode", "traffic", "kernels", "serve", "http", "offline", "tiers"} <= benches
    assert len(FOUND) > 60
