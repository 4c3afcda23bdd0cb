"""Stop strings: found wherever the pieces are cut, and never shown by accident."""

from __future__ import annotations

import itertools

from manyroots.text.stops import StopChecker
from tests.helpers.seeded import Draw, for_seeds


def run(stops: list[str], parts: list[str], *, include: bool = False) -> tuple[str, str | None]:
    checker = StopChecker(stops, include_in_output=include)
    shown = ""
    for part in parts:
        checked = checker.push(part, may_stop=True)
        shown += checked.text
        if checked.stop is not None:
            return shown, checked.stop
    return shown + checker.flush(), None


def test_a_stop_string_is_found_across_pieces() -> None:
    assert run(["STOP"], ["ab S", "T", "OP cd"]) == ("ab ", "STOP")
    assert run(["STOP"], ["ab S", "T", "OP cd"], include=True) == ("ab STOP", "STOP")


def test_a_possible_beginning_is_held_back_until_it_is_clear() -> None:
    checker = StopChecker(["\n\n"], include_in_output=False)
    assert checker.push("a\n", may_stop=True).text == "a"
    assert checker.push("b", may_stop=True).text == "\nb"
    assert checker.push("\n", may_stop=True).text == ""
    assert checker.flush() == "\n"


def test_the_match_that_ends_first_wins() -> None:
    assert run(["abcd", "c"], ["xabcd"]) == ("xab", "c")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")


def test_nothing_ends_in_text_that_may_not_stop() -> None:
    checker = StopChecker(["ab"], include_in_output=False)
    assert checker.push("xab", may_stop=False).text == "xab"
    assert checker.push("a", may_stop=False).text == ""
    assert checker.push("b", may_stop=True).stop == "ab", "it ends where it may"


def test_a_match_that_was_let_pass_is_not_found_later() -> None:
    checker = StopChecker(["b", "abz"], include_in_output=False)
    assert checker.push("ab", may_stop=False).text == "", "could still become abz"
    checked = checker.push("c", may_stop=True)
    assert (checked.text, checked.stop) == ("abc", None)


def some_stops(draw: Draw, least: int) -> list[str]:
    return draw.list_of(lambda: draw.text("ab\n", least=1, most=4), least=least, most=3)


@for_seeds(500)
def test_the_cuts_make_no_difference(draw: Draw) -> None:
    text, stops, include = draw.text("ab\n", most=30), some_stops(draw, 1), draw.flag()
    cuts = draw.list_of(lambda: draw.integer(0, 30))
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert run(stops, parts, include=include) == run(stops, list(text), include=include)


@for_seeds(500)
def test_without_a_match_all_text_is_shown(draw: Draw) -> None:
    text, stops = draw.text("ab\n", most=30), some_stops(draw, 0)
    shown, stop = run(stops, list(text))
    if stop is None:
        assert shown == text
    else:
        assert text.startswith(shown + stop)
        assert all(s not in shown for s in stops)
