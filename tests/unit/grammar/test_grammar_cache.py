"""Compiled grammars: made once, bounded, and never evicted while a request holds one (G01)."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from manyroots.errors import RequestError
from manyroots.grammar.cache import GrammarCache
from manyroots.grammar.vocabulary import Vocabulary
from manyroots.structured_outputs import StructuredOutputsParams
from tests.unit.grammar.tiny_grammars import cache, vocabulary


def number(n: int) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=f"a{{{n}}}")


def test_g01_a_grammar_is_compiled_once_and_the_vocabulary_loaded_once() -> None:
    loads = []

    def load() -> Vocabulary:
        loads.append(threading.current_thread())
        return vocabulary()

    grammars = GrammarCache(load)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(grammars.compile, [number(1), number(2)] * 4))
    assert len(loads) == 1
    assert grammars.compile(number(1)) is grammars.compile(number(1)) is grammars.find(number(1))


def test_g01_only_so_many_are_kept_and_those_that_are_held() -> None:
    grammars = cache(max_grammars=2)
    held = grammars.compile(number(1))
    for n in range(2, 6):
        grammars.compile(number(n))
    gc.collect()
    assert grammars.find(number(1)) is held
    assert grammars.find(number(3)) is None
    assert grammars.find(number(5)) is not None


def test_g01_only_so_much_text_is_kept() -> None:
    """G01: of large grammars fewer, since each takes memory by its size; none twice."""
    grammars = cache(max_characters=1000)

    def large(number: int) -> StructuredOutputsParams:
        return StructuredOutputsParams(choice=(f"{number} " + "a" * 300,))

    for n in (1, 2, 3, 4, 3, 3, 3):
        grammars.compile(large(n))
    gc.collect()
    kept = [n for n in range(1, 5) if grammars.find(large(n)) is not None]
    assert kept == [3, 4]
    small = [number(n) for n in range(5)]
    for each in small:
        grammars.compile(each)
    gc.collect()
    assert all(grammars.find(each) is not None for each in small)
    held = grammars.compile(StructuredOutputsParams(choice=("b" * 2000,)))
    gc.collect()
    assert grammars.find(StructuredOutputsParams(choice=("b" * 2000,))) is held
    assert [grammars.find(each) for each in small] == [None] * 5


def test_g01_what_cannot_be_compiled_says_why() -> None:
    with pytest.raises(RequestError, match=r"regex can't be honoured: .*look-around"):
        cache().compile(StructuredOutputsParams(regex="a(?=b)"))


def test_g01_a_grammar_in_which_nothing_can_be_said_is_refused() -> None:
    with pytest.raises(RequestError, match="can't be honoured"):
        cache().compile(StructuredOutputsParams(json={"$ref": "#"}))
