"""What the device remembers of each row between steps: its page table and its newest token.

Everything else about a row the host can count, so it travels with each step. Page tables are too
large for that, and the newest token is not known to the host when the next step is launched.
Takes a plan's deltas; changes nothing else. All writes are ordered on the stream of the steps.

The row behind the last is nobody's: padding writes its tokens there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.decode_rows.reference import PENDING
from manyroots.runner.cuda.packet import send
from manyroots.step import Plan


class DeviceRows:
    """State by row, on the device."""

    def __init__(self, *, max_num_seqs: int, max_pages: int, device: torch.device) -> None:
        self.spare_row = max_num_seqs
        self.page_table = torch.zeros(max_num_seqs + 1, max_pages, dtype=torch.int32, device=device)
        self.newest = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)

    def apply(self, plan: Plan) -> None:
        """Take in new and grown page tables."""
        width = self.page_table.shape[1]
        at: list[np.ndarray] = []
        pages: list[np.ndarray] = []
        for arrival in plan.arrivals:
            table = arrival.page_tables[0]
            at.append(np.arange(arrival.row * width, arrival.row * width + len(table)))
            pages.append(table)
        for growth in plan.new_pages:
            at.append(growth.rows.astype(np.int64) * width + growth.places)
            pages.append(growth.pages)
        if not at:
            return
        places = np.concatenate(at).astype(np.int64)
        values = np.concatenate(pages).astype(np.int32)
        if len(plan.arrivals) and len(plan.new_pages):
            # A scatter has no order; of two values for one place the later counts.
            places, values = _latest(places, values)
        sent = send({"places": places, "values": values}, self.page_table.device)
        self.page_table.view(-1).index_copy_(0, sent["places"], sent["values"])

    def tokens(self, known: Tensor, rows: Tensor) -> Tensor:
        """`known`, with each PENDING replaced by the newest token of its row."""
        return torch.where(known == PENDING, self.newest[rows], known)

    def keep(self, rows: Tensor, tokens: Tensor) -> None:
        """These rows' newest tokens; the spare row may occur many times."""
        self.newest.index_copy_(0, rows, tokens.long())


def _latest(places: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    unique, last = np.unique(places[::-1], return_index=True)
    return unique, values[::-1][last]
