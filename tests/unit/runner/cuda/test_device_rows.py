"""Page tables on the device follow the plans."""

from __future__ import annotations

import numpy as np
import torch

from manyroots.ids import RequestId, Row, StepId
from manyroots.runner.cuda.device_rows import DeviceRows
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival, NewPages, Plan


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def arrival(row: int, *pages: int) -> Arrival:
    return Arrival(
        Row(row),
        RequestId(row),
        ints(1, 2),
        2,
        0,
        (ints(*pages),),
        SamplingParams(),
        0,
        (),
        None,
        0,
    )


def plan(arrivals: list[Arrival], pages: list[NewPages]) -> Plan:
    nothing = ints()
    return Plan(StepId(0), tuple(arrivals), tuple(pages), nothing, nothing, np.empty(0, np.bool_))


def test_tables_arrive_grow_and_are_replaced() -> None:
    rows = DeviceRows(max_num_seqs=3, max_pages=4, device=torch.device("cpu"))
    rows.apply(plan([arrival(0, 7, 8), arrival(2, 5)], []))
    rows.apply(plan([], [NewPages(0, ints(0, 2, 2), ints(2, 1, 2), ints(9, 6, 4))]))
    assert rows.page_table.tolist()[0] == [7, 8, 9, 0]
    assert rows.page_table.tolist()[2] == [5, 6, 4, 0]
    # A row's next owner and its growth in one plan: what comes later counts.
    rows.apply(plan([arrival(0, 1, 2)], [NewPages(0, ints(0, 0), ints(1, 2), ints(3, 5))]))
    assert rows.page_table.tolist()[0][:3] == [1, 3, 5]
    assert rows.page_table[3].tolist() == [0, 0, 0, 0]


def test_pending_tokens_are_the_newest_of_their_rows() -> None:
    rows = DeviceRows(max_num_seqs=3, max_pages=1, device=torch.device("cpu"))
    rows.keep(torch.tensor([1, 3]), torch.tensor([40, 50], dtype=torch.int32))
    given = rows.tokens(torch.tensor([-1, 9, 0]), torch.tensor([1, 1, 2]))
    assert given.tolist() == [40, 9, 0]
