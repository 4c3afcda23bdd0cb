"""The check of prose finds what it is for; `make prose` runs it over the repository."""

from __future__ import annotations

from tools.docs.links import ROOT
from tools.docs.prose import (
    faults_in,
    markdown_faults,
    python_faults,
    sources,
    sources_beside,
)


def test_d04_all_folders_are_read() -> None:
    """D04."""
    assert len(sources()) > 200
    folders = {path.relative_to(ROOT).parts[0] for path in sources_beside()}
    assert folders == {"tests", "tools", "examples"}


def test_d04_words_to_avoid_are_found() -> None:
    """D04."""
    assert [fault.split(":")[0] for fault in faults_in("Nobody waits behind whoever came.")] == [
        "'Nobody'", "'whoever'", "'behind'",
    ]  # fmt: skip
    assert list(faults_in("A whole row that waits behind a proxy, whose end is near")) == []


def test_code_and_names_are_no_prose() -> None:
    page = "Run `who` now.\n\n```sh\nfor who in a b; do echo behind; done\n```\n"
    assert list(markdown_faults(page)) == []
    source = "behind = nobody(who)\nx = f'{behind}'\n"
    assert list(python_faults(source)) == []


def test_d04_texts_of_tests_are_data_and_docstrings_are_not() -> None:
    """D04."""
    source = '''
"""Nobody reads this."""

NAME = "nobody"
"""Whoever waits."""


class Row:
    # behind
    """Everybody."""

    def name(self) -> str:
        """Somebody."""
        assert self.find("who", [
            "anybody"
        ])
        return "whom"
'''
    found = [fault.split("'")[1] for _, fault in python_faults(source, has_data=True)]
    assert found == ["Nobody", "Whoever", "behind", "Everybody", "Somebody"]
    assert len(list(python_faults(source))) == len(found) + 4


def test_lines_of_faults_are_told() -> None:
    long = "a" * 60 + " " + "b" * 60
    assert [line for line, _ in markdown_faults(f"# A\n\n{long}\n| {long} |\nwho\n")] == [3, 5]
    text = '"""One.\n\nTwo, which nobody reads.\n"""\n# whoever\n'
    assert [line for line, _ in python_faults(text)] == [3, 5]
