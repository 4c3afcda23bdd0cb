"""Generated files of docs/ equal what the code and the tests give now."""

from __future__ import annotations

from tools.docs.pages import QUICK, stale


def test_d02_generated_pages_are_what_the_code_says() -> None:
    """D02."""
    assert stale(QUICK) == [], "run `make generated` and commit the result"
