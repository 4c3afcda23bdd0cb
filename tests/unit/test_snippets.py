"""Every fenced block of the README and the docs is run by a test, or says why it is not.

The line before a block is an HTML comment, which a page does not show:

    <!-- run -->                 tests/e2e/test_snippets.py runs it
    <!-- run by tests/... -->    that test reads the page and runs it
    <!-- not run: reason -->     a reader can see why
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.snippets import PAGES, ROOT, TUTORIALS, snippets

MARKS = re.compile(r"<!-- (run|run by (\S+)|not run: (\S.{9,}))(?<! ) -->")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for snippet in snippets(page):
        where = f"{snippet.page}, line {snippet.line}"
        found = MARKS.fullmatch(snippet.mark)
        assert found, f"{where}: put <!-- run --> or <!-- not run: reason --> before this block"
        if found[2] is not None:
            test = ROOT / found[2]
            assert test.exists(), f"{where}: there is no {found[2]}"
            assert page.name in test.read_text(), f"{where}: {found[2]} does not read {page.name}"


def test_d01_every_tutorial_has_blocks_that_run() -> None:
    """D01."""
    tutorials = sorted(TUTORIALS.glob("*.md"))
    assert len(tutorials) >= 5
    for page in tutorials:
        assert any(s.mark.startswith("<!-- run") for s in snippets(page)), page.name


def test_the_blocks_are_found() -> None:
    found = [snippet for page in PAGES for snippet in snippets(page)]
    assert len(found) > 20
    assert sum(snippet.mark == "<!-- run -->" for snippet in found) > 5
    assert {"sh", "python", "json"} <= {snippet.language for snippet in found}
