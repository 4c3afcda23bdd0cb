"""What the device remembers of each row between steps: its page tables and its newest token.

Everything else about a row the host can count, so it travels with each step: where its states
are, too. Page tables are too
large for that, and the newest token is not known to the host when the next step is launched.
Takes a plan's deltas; changes nothing else. All writes are ordered on the stream of the steps.

On a CPU the tables are the persistent batch's own, which has taken in the plan already. The row
after the last is spare: padding writes its tokens there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import SpareRow
from manyroots.runner.packet import send
from manyroots.step import Plan


class DeviceRows:
    """State by row, on the device."""

    def __init__(
        self,
        batch: PersistentBatch,
        device: torch.device,
        *,
        shares: bool | None = None,
        num_draft_rows: int = 0,
    ) -> None:
        """`shares`: whether the tables are the batch's own; None for what the device allows.
        `num_draft_rows`: as in `SamplingTables.zeros`."""
        tables = torch.from_numpy(batch.page_tables)
        self._num_paged = len(tables)
        self._shares = device.type == "cpu" if shares is None else shares
        self.page_tables = tables if self._shares else torch.zeros_like(tables, device=device)
        """int32 [families of pages, rows + 1, max_pages]"""
        row = tables.shape[1] - 1
        self.spare = SpareRow(row, self._num_paged, batch.units[:, row])
        self.newest = torch.zeros(row + 1 + num_draft_rows, dtype=torch.int64, device=device)

    def apply(self, plan: Plan) -> None:
        """Take in new and grown page tables."""
        if self._shares:
            return
        _, num_rows, width = self.page_tables.shape
        at: list[np.ndarray] = []
        pages: list[np.ndarray] = []
        for arrival in plan.arrivals:
            for family, table in enumerate(arrival.page_tables[: self._num_paged]):
                first = (family * num_rows + arrival.row) * width
                at.append(np.arange(first, first + len(table)))
                pages.append(table)
        for growth in plan.new_pages:
            if growth.family >= self._num_paged:
                continue  # where a state is travels with each step
            rows = growth.family * num_rows + growth.rows.astype(np.int64)
            at.append(rows * width + growth.places)
            pages.append(growth.pages)
        if not at:
            return
        places = np.concatenate(at).astype(np.int64)
        values = np.concatenate(pages).astype(np.int32)
        if len(plan.arrivals) and len(plan.new_pages):
            # A scatter has no order; of two values for one place the later counts.
            places, values = _latest(places, values)
        sent = send({"places": places, "values": values}, self.page_tables.device)
        self.page_tables.view(-1).index_copy_(0, sent["places"], sent["values"])

    def tables_for(self, max_len: int | None, page_size: int) -> Tensor:
        """The tables of all rows. On a CPU no wider than a context of `max_len` needs; kernels of a
        GPU are compiled for one width."""
        if max_len is None or not self._shares:
            return self.page_tables
        return self.page_tables[:, :, : -(-max_len // page_size)]


def _latest(places: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    unique, last = np.unique(places[::-1], return_index=True)
    return unique, values[::-1][last]
