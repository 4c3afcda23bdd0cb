"""A few planted faults are noticed, in both ways. `make faults` plants all of them."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.mutations import MUTATIONS
from tests.helpers.plant import detected, planted

FEW = "an adapter's hit is a page short"


def test_faults_are_noticed_by_the_tests_that_they_name(tmp_path: Path) -> None:
    chosen = [each for each in MUTATIONS if FEW in each.name and each.noticed_by]
    assert chosen
    ended = planted(tmp_path, FEW)
    noticed = set()
    for mutation in chosen:
        failed = {case for case, how in ended[mutation.name].items() if how == "failed"}
        assert failed, mutation.name
        noticed |= failed
    assert {ended[None].get(case) for case in noticed} == {"passed"}


def test_faults_in_the_keys_of_pages_are_noticed() -> None:
    """These would mix adapters, which the cache must never do."""
    detected("cache/keys.py")
