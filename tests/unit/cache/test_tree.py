"""The radix tree: matching is exact and read-only, runs split where prompts part."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from manyroots.cache.tree import PrefixTree
from manyroots.ids import Namespace, StepId

BASE = Namespace(adapter=None, salt=None)
SALTED = Namespace(adapter=None, salt="s")
PAGE = 2


def keys(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def insert(
    tree: PrefixTree, namespace: Namespace, tokens: list[int], first_page: int, lengthen: bool
) -> list[int]:
    """Index a whole prompt; returns the pages that were added."""
    count = len(tokens) // PAGE
    pages = np.arange(first_page, first_page + count, dtype=np.int32)
    inserted = tree.insert(
        tree.root, namespace, keys(tokens[: count * PAGE]), 0, pages, StepId(1), lengthen=lengthen
    )
    return [int(page) for page in inserted.added]


Tokens = st.lists(st.integers(0, 1), max_size=12)
Entry = st.tuples(st.sampled_from([BASE, SALTED]), Tokens, st.booleans())


@settings(max_examples=300, deadline=None)
@given(st.lists(Entry, max_size=12), st.sampled_from([BASE, SALTED]), Tokens)
def test_r02_matches_equal_a_dictionary_of_prefixes(
    entries: list[tuple[Namespace, list[int], bool]], namespace: Namespace, prompt: list[int]
) -> None:
    """R02: whatever was inserted, a match is the longest prefix that a dictionary holds."""
    tree = PrefixTree(PAGE)
    oracle: dict[tuple[Namespace, tuple[int, ...]], int] = {}
    next_page = 0
    for space, tokens, lengthen in entries:
        count = len(tokens) // PAGE
        if count == 0:
            continue
        new = [
            (space, tuple(tokens[: (i + 1) * PAGE]))
            for i in range(count)
            if (space, tuple(tokens[: (i + 1) * PAGE])) not in oracle
        ]
        added = insert(tree, space, tokens, next_page, lengthen)
        assert added == list(range(next_page + count - len(new), next_page + count))
        oracle.update(zip(new, added, strict=True))
        next_page += count
    expected = []
    for end in range(PAGE, len(prompt) + 1, PAGE):
        page = oracle.get((namespace, tuple(prompt[:end])))
        if page is None:
            break
        expected.append(page)
    walk = tree.match(namespace, keys(prompt), len(prompt) // PAGE)
    assert walk.pages.tolist() == expected
    assert sorted(int(p) for node in tree.nodes() for p in node.pages) == sorted(oracle.values())


def test_n04_no_tokens_can_forge_a_namespace() -> None:
    """N04: all-zero prompts and the largest ids in one namespace are not found in another."""
    tree = PrefixTree(PAGE)
    insert(tree, SALTED, [0, 0, 0, 0], 0, lengthen=False)
    insert(tree, SALTED, [2**31 - 1] * 4, 2, lengthen=False)
    for tokens in ([0, 0, 0, 0], [2**31 - 1] * 4):
        assert tree.match(BASE, keys(tokens), 2).depth == 0
        assert tree.match(SALTED, keys(tokens), 2).depth == 2


def test_n03_a_namespace_costs_no_page_and_no_depth() -> None:
    """N03: base and salted prompts take the same number of pages and match to the same depth."""
    for namespace in (BASE, SALTED):
        tree = PrefixTree(PAGE)
        assert len(insert(tree, namespace, [1, 2, 3, 4], 0, lengthen=False)) == 2
        assert tree.match(namespace, keys([1, 2, 3, 4]), 2).depth == 2
