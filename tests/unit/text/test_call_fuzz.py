"""Every format of tool calls against its own writer: a slice of `python -m
tests.soaks.call_fuzz`."""

from __future__ import annotations

import pytest

from manyroots.text.formats.argument_types import ArgumentSchema
from manyroots.text.formats.reader import Reader
from tests.soaks.call_fuzz import WRITERS, Case

CASES = 12


@pytest.mark.parametrize("place", range(len(WRITERS)), ids=list(WRITERS))
def test_g02_what_a_writer_writes_is_read_back_however_it_is_cut(place: int) -> None:
    for turn in range(CASES):
        seed = place + turn * len(WRITERS)
        try:
            Case(seed).check()
        except Exception as error:
            error.add_note(f"python -m tests.soaks.call_fuzz --first {seed} --cases 1")
            raise


def _failures(parser: str) -> int:
    """How many cases of a writer fail."""
    place = list(WRITERS).index(parser)
    count = 0
    for turn in range(60):
        try:
            Case(place + turn * len(WRITERS)).check()
        except Exception:
            count += 1
    return count


def test_the_fuzz_sees_strings_that_become_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ArgumentSchema, "types", property(lambda schema: frozenset({"string", "number"}))
    )
    assert _failures("qwen3_coder")


def test_the_fuzz_sees_half_a_mark_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "_possible_mark", lambda reader, marks, longest: len(reader._text))
    assert _failures("hermes")
