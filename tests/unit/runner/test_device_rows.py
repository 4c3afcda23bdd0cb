"""Page tables on the device follow the plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyroots.ids import RequestId, Row, StepId
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.device_rows import DeviceRows
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival, NewPages, Plan


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def arrival(row: int, *tables: list[int]) -> Arrival:
    return Arrival(
        Row(row), RequestId(row), ints(1, 2), 2, 0, tuple(ints(*table) for table in tables),
        SamplingParams(), 0, (), None, 0,
    )  # fmt: skip


def plan(arrivals: list[Arrival], pages: list[NewPages]) -> Plan:
    nothing = ints()
    return Plan(StepId(0), tuple(arrivals), tuple(pages), nothing, nothing, np.empty(0, np.bool_))


class Tables:
    """The host's and the device's, which are given the same plans."""

    def __init__(self, *, num_families: int, shares: bool) -> None:
        self.batch = PersistentBatch(
            max_num_seqs=3, max_model_len=16, page_size=4, num_paged=num_families
        )
        self.rows = DeviceRows(self.batch, torch.device("cpu"), shares=shares)

    def apply(self, plan: Plan) -> None:
        self.batch.apply(plan)
        self.rows.apply(plan)

    def of(self, family: int, row: int) -> list[int]:
        table: list[int] = self.rows.page_tables[family, row].tolist()
        assert table == self.batch.page_tables[family, row].tolist()
        return table


@pytest.mark.parametrize("shares", [False, True])
def test_tables_arrive_grow_and_are_replaced(shares: bool) -> None:
    tables = Tables(num_families=1, shares=shares)
    tables.apply(plan([arrival(0, [7, 8]), arrival(2, [5])], []))
    tables.apply(plan([], [NewPages(0, ints(0, 2, 2), ints(2, 1, 2), ints(9, 6, 4))]))
    assert tables.of(0, 0) == [7, 8, 9, 0]
    assert tables.of(0, 2) == [5, 6, 4, 0]
    # A row's next owner and its growth in one plan: what comes later counts.
    tables.apply(plan([arrival(0, [1, 2])], [NewPages(0, ints(0, 0), ints(1, 2), ints(3, 5))]))
    assert tables.of(0, 0)[:3] == [1, 3, 5]
    assert tables.of(0, 3) == [0, 0, 0, 0]


@pytest.mark.parametrize("shares", [False, True])
def test_each_family_has_tables_of_its_own(shares: bool) -> None:
    tables = Tables(num_families=2, shares=shares)
    tables.apply(plan([arrival(0, [7, 8], [-1, 3]), arrival(2, [5], [6])], []))
    grown = [
        NewPages(1, ints(0), ints(2), ints(4)),
        NewPages(0, ints(0, 2), ints(2, 1), ints(9, 1)),
        NewPages(1, ints(2), ints(1), ints(8)),
    ]
    tables.apply(plan([], grown))
    assert [tables.of(family, 0)[:3] for family in range(2)] == [[7, 8, 9], [-1, 3, 4]]
    assert [tables.of(family, 2)[:2] for family in range(2)] == [[5, 1], [6, 8]]


def test_tables_are_no_wider_than_the_longest_context_where_they_are_shared() -> None:
    assert Tables(num_families=2, shares=True).rows.tables_for(9, 4).shape == (2, 4, 3)
    assert Tables(num_families=2, shares=False).rows.tables_for(9, 4).shape == (2, 4, 4)
