"""A slice of `python -m tests.soaks.owners_apart`."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyroots.cache.keys import Owner, PageHasher
from tests.soaks.owners_apart import check_index, check_storage, pairs


def test_n04_t07_random_pairs_of_owners_stay_apart_on_every_tier(tmp_path: Path) -> None:
    """N04, T07: adapters, salts and beginnings that could be mistaken for each other."""
    check_index(pairs(100, seed=2))
    assert check_storage(pairs(100, seed=2), tmp_path) > 300


@pytest.mark.parametrize("left_out", ["salt", "adapter", "begin"])
def test_owners_that_are_mistaken_for_each_other_are_noticed(
    left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes that leave something of an owner out."""
    real = PageHasher._seed

    def seed(self: PageHasher, owner: Owner) -> bytes:
        if left_out == "begin":
            owner = owner._replace(begin=0)
        else:
            owner = owner._replace(namespace=owner.namespace._replace(**{left_out: None}))
        return real(self, owner)

    monkeypatch.setattr(PageHasher, "_seed", seed)
    with pytest.raises(AssertionError, match=r"nobody stored|another owner"):
        check_storage(pairs(60, seed=2), tmp_path)
