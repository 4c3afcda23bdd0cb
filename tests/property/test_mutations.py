"""Every planted fault is noticed: the tests are worth something. `make faults` and `make
nightly` run this file.

MANYROOTS_MUTATIONS=text plants only those whose name has the text, and then runs what noticed them
without a fault, too. `make test` runs these tests anyway, and plants a few of the faults
(`test_planted_faults.py`).
"""

from __future__ import annotations

import os

import pytest

from tests.helpers.mutations import MUTATIONS, Mutation
from tests.helpers.plant import Ended, detected, is_of, planted

pytestmark = pytest.mark.nightly

TEXT = os.environ.get("MANYROOTS_MUTATIONS", "")
NAMING = [m for m in MUTATIONS if TEXT in m.name and m.noticed_by]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return planted(tmp_path_factory.mktemp("copy"), TEXT)


@pytest.mark.parametrize("mutation", NAMING, ids=lambda mutation: mutation.breaks)
def test_a_fault_is_noticed_by_the_tests_of_its_promise(mutation: Mutation, ended: Ended) -> None:
    """Of each of them a case fails with the fault."""
    with_fault = ended[mutation.name]
    for node in mutation.noticed_by:
        noticed = [c for c, how in with_fault.items() if how == "failed" and is_of(c, node)]
        assert noticed, f"{node}: {with_fault}"
        if TEXT:
            assert {ended[None].get(case) for case in noticed} == {"passed"}, noticed


def test_every_fault_of_the_decide_half_is_noticed() -> None:
    detected(TEXT)
