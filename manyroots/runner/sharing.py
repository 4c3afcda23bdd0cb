"""Decoding rows that begin with the same pages, as arrays of a step.

Takes a step's rows; gives for each family of pages what `SharedPrefixes` holds, or nothing where
no kernel gains by it. Sharing changes only when a request arrives or leaves, so it is found
then and kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manyroots.kernels.attention.sharing import (
    PrefixGroup,
    most_blocks,
    shared_arrays,
    shared_groups,
)
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import Int64s, StepInputs
from manyroots.runner.step_arrays import NamedArrays
from manyroots.step import Int32s, Plan

NAMES = ("shared_lens", "shared_members", "shared_blocks")


class Sharing:
    """What rows of a batch share."""

    def __init__(self, batch: PersistentBatch, windows: Sequence[int], page_size: int) -> None:
        """`windows`: of each family of pages; 0 for none. With one, rows share too little."""
        self._batch, self._windows, self._page_size = batch, windows, page_size
        self._found_for = b""
        self._groups: list[list[PrefixGroup]] = []

    def apply(self, plan: Plan) -> None:
        """Rows may have other owners from now on."""
        if plan.arrivals:
            self._found_for = b""

    def arrays(self, inputs: StepInputs, size: int) -> NamedArrays:
        """The arrays of the decoding rows, padded to `size`; {} if sharing gains nothing."""
        count = inputs.num_decodes
        groups = self._groups_of(inputs.rows[:count], inputs.context_lens[:count])
        return packed(groups, size, self._page_size) if any(groups) else {}

    def gains(self, rows: Int32s, lens: Int64s) -> bool:
        """Whether these rows, which see so many tokens, share enough."""
        return any(self._groups_of(rows, lens))

    def _groups_of(self, rows: Int32s, lens: Int64s) -> list[list[PrefixGroup]]:
        key = rows.tobytes()
        if not key or key != self._found_for:
            self._found_for = key
            self._groups = [
                [] if window else shared_groups(table, rows, lens, self._page_size)
                for table, window in zip(self._batch.page_tables, self._windows, strict=True)
            ]
        return self._groups


def packed(groups: Sequence[Sequence[PrefixGroup]], size: int, page_size: int) -> NamedArrays:
    """The arrays of every family, one after the other."""
    families = [shared_arrays(own, size, page_size) for own in groups]
    return {name: np.stack(arrays) for name, *arrays in zip(NAMES, *families, strict=True)}


def blank(num_families: int, size: int) -> NamedArrays:
    """Of a step in which no rows share anything."""
    blocks = np.zeros((num_families, most_blocks(size), 3), np.int32)
    lens = np.zeros((num_families, size), np.int32)
    return dict(zip(NAMES, (lens, lens.copy(), blocks), strict=True))
