"""What routers are told of pages: maps or arrays, with owners on each page or on the first."""

from __future__ import annotations

from typing import Any

import pytest

from manyroots.conformance.events import _pages, _stored

HEAD = {"type": "BlockStored", "lora_id": None, "lora_name": "a", "parent_block_hash": None}


def batch(*events: Any) -> list[Any]:
    return [0.0, list(events), 0]


@pytest.mark.parametrize(
    "event",
    [
        {**HEAD, "block_hashes": [1, 2], "extra_keys": [["x"], None]},
        ["BlockStored", [1, 2], None, [5, 6], 1, None, "GPU", "a", [["x"], None]],
    ],
)
def test_k01_events_are_read_as_maps_and_as_arrays(event: Any) -> None:
    """K01"""
    found = _pages(list(_stored(batch({"type": "AllBlocksCleared"}, event))))
    assert found.hashes == {1, 2}
    assert found.owners == {"(None, 'a', \"['x']\")", "(None, 'a', 'None')"}


def test_k01_a_salt_on_the_first_page_alone_is_an_owner_of_its_own() -> None:
    """K01: and so is nothing at all where two parties differ in nothing."""
    told = [
        _pages(list(_stored(batch({**HEAD, "block_hashes": [1], "extra_keys": keys}))))
        for keys in ([["x"], None], [["y"], None], None, None)
    ]
    assert told[0].owners != told[1].owners
    assert told[2].owners == told[3].owners
