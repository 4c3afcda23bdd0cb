"""The radix tree: matching is exact and read-only, runs split where prompts part."""

from __future__ import annotations

import numpy as np

from manyroots.cache.keys import PrefixKey
from manyroots.cache.planes import ABSENT
from manyroots.cache.publishing import nearest_attached
from manyroots.cache.transfers import Spot
from manyroots.cache.tree import PathHold, PrefixTree
from manyroots.ids import AdapterDigest, Namespace, StepId
from tests.helpers.seeded import Draw, for_seeds

PLAIN = Namespace(adapter=None, salt=None)
ADAPTER = Namespace(adapter=AdapterDigest(b"a"), salt=None)
BASE = PrefixKey(PLAIN)
SALTED = PrefixKey(Namespace(adapter=None, salt="s"))
ADAPTED = PrefixKey(ADAPTER)
ACTIVATED = [PrefixKey.activated(PLAIN, ADAPTER, begin, 2) for begin in (1, 2, 3)]
PAGE = 2


def keys(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def insert(tree: PrefixTree, key: PrefixKey, tokens: list[int], unit: int, lengthen: bool) -> None:
    """Index a whole prompt: page i gets unit + i, where it has none yet."""
    count = len(tokens) // PAGE
    path = tree.insert(
        tree.root, key, keys(tokens[: count * PAGE]), 0, count, StepId(1), lengthen=lengthen
    )
    for node in path:
        for place in range(min(count, node.end) - node.first):
            if node.units[0][place] == ABSENT:
                units = np.array([unit + node.first + place], np.int32)
                tree.set_units(node, 0, np.array([place]), units)


def match(tree: PrefixTree, key: PrefixKey, tokens: list[int]) -> list[int]:
    nodes, depth, _ = tree.walk(key, keys(tokens), len(tokens) // PAGE)
    units = [int(unit) for node in nodes for unit in node.units[0]]
    return units[:depth]


@for_seeds(600)
def test_r02_matches_equal_a_dictionary_of_prefixes(draw: Draw) -> None:
    """R02, N22, N23: whatever was inserted, also by keys whose adapter begins inside or after a
    page, a match is the longest prefix that a dictionary holds."""

    def some() -> tuple[PrefixKey, list[int], bool]:
        tokens = draw.list_of(lambda: draw.integer(0, 1), most=12)
        return draw.choice((BASE, SALTED, ADAPTED, *ACTIVATED)), tokens, draw.flag()

    entries, (key, prompt, _) = draw.list_of(some, most=12), some()

    def name(key: PrefixKey, tokens: list[int], pages: int) -> tuple[object, ...]:
        return (tuple(key.at(i) for i in range(pages)), tuple(tokens[: pages * PAGE]))

    tree = PrefixTree(PAGE, 1)
    oracle: dict[tuple[object, ...], int] = {}
    for number, (space, tokens, lengthen) in enumerate(entries):
        insert(tree, space, tokens, number * 100, lengthen)
        for pages in range(1, len(tokens) // PAGE + 1):
            oracle.setdefault(name(space, tokens, pages), number * 100 + pages - 1)
    expected = []
    for pages in range(1, len(prompt) // PAGE + 1):
        if name(key, prompt, pages) not in oracle:
            break
        expected.append(oracle[name(key, prompt, pages)])
    assert match(tree, key, prompt) == expected
    stored = [int(u) for node in tree.nodes() for u in node.units[0]]
    assert sorted(stored) == sorted(oracle.values())


def test_n04_no_tokens_can_forge_a_namespace() -> None:
    """N04: all-zero prompts and the largest ids in one namespace are not found in another."""
    tree = PrefixTree(PAGE, 1)
    insert(tree, SALTED, [0, 0, 0, 0], 0, lengthen=False)
    insert(tree, SALTED, [2**31 - 1] * 4, 2, lengthen=False)
    for tokens in ([0, 0, 0, 0], [2**31 - 1] * 4):
        assert match(tree, BASE, tokens) == []
        assert len(match(tree, SALTED, tokens)) == 2


def test_n03_a_namespace_costs_no_page_and_no_depth() -> None:
    """N03: an adapter's and a tenant's prompts take as many pages as base's, as deep."""
    for key in (BASE, SALTED, ADAPTED):
        tree = PrefixTree(PAGE, 1)
        insert(tree, key, [1, 2, 3, 4], 0, lengthen=False)
        assert match(tree, key, [1, 2, 3, 4]) == [0, 1]
        assert sum(node.num_pages for node in tree.nodes()) == 2


def test_a_hold_stays_with_the_path_that_it_is_on() -> None:
    """A split leaves it in the part in which its path ends; a cut before its end takes it away,
    since other units may follow there."""
    tree = PrefixTree(PAGE, 1)
    insert(tree, BASE, [1, 1, 2, 2, 3, 3, 4, 4], 0, lengthen=False)
    (node,) = tree.root.children.values()
    node.path_hold = whole = PathHold(node, node.units[0])
    middle = tree.split(node, 3)
    assert node.path_hold is whole
    middle.path_hold = PathHold(middle, middle.units[0][:2])
    upper = tree.split(middle, 2)
    assert middle.path_hold is None
    assert upper.path_hold is not None
    assert upper.path_hold.node is upper
    tree.cut(upper, 2)
    assert upper.path_hold is not None
    tree.cut(upper, 1)
    assert upper.path_hold is None


def test_t08_a_depth_in_a_node_never_comes_to_mean_another_page() -> None:
    """T08: a copy goes by the node and the depth of its page. Once the page is gone, an output
    with other tokens there must not be taken for it."""
    tree = PrefixTree(PAGE, 1)
    insert(tree, BASE, [1, 1, 2, 2, 3, 3], 0, lengthen=False)
    (node,) = tree.root.children.values()
    copied = Spot(node, 2)
    assert copied.find() is node
    tree.cut(node, 2)
    insert(tree, BASE, [1, 1, 2, 2, 7, 7], 0, lengthen=True)
    assert match(tree, BASE, [1, 1, 2, 2, 7, 7]) == [0, 1, 2]
    assert copied.find() is None


def test_n22_a_path_that_left_the_tree_is_not_mistaken_for_what_grows_in_its_place() -> None:
    """N22, T08: a request with an activated adapter lost its pages; those of the base model that
    are published there later, with the same tokens, are not its own."""
    tree = PrefixTree(PAGE, 1)
    insert(tree, BASE, [1, 1, 2, 2], 0, lengthen=False)
    (shared,) = tree.root.children.values()
    activated = PrefixKey.activated(PLAIN, ADAPTER, 5, PAGE)
    insert(tree, activated, [1, 1, 2, 2, 3, 3], 0, lengthen=False)
    (own,) = shared.children.values()
    tree.cut(own, own.first)
    insert(tree, BASE, [1, 1, 2, 2, 3, 3], 0, lengthen=True)
    assert nearest_attached(own).end == own.first
