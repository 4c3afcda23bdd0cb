"""Adapter names are what the message says: letters, digits, '-', '_', '.', and '/' between."""

from __future__ import annotations

import pytest

from manyroots.adapter_names import name_fault


@pytest.mark.parametrize("name", ["sql", "team/sql-v1.2", "A_b", "0", "a" * 128])
def test_s03_good_names(name: str) -> None:
    assert name_fault(name) is None


@pytest.mark.parametrize(
    "name", ["", "a b", "x:y", "ä", "名", "a\n", " a", "a/", "/a", "a//b", "../a", "a/./b", "a\\b",
             "a" * 129, 'a"', "a%2f"]
)  # fmt: skip
def test_s03_names_that_are_refused_with_what_is_allowed(name: str) -> None:
    fault = name_fault(name)
    assert fault is not None
    assert "letters (a to z)" in fault or "from 1 to 128" in fault
