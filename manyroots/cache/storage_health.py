"""Tracks failures of the storage tier and decides whether to use it (T03).

In: results of copies from and to storage, and the engine's current step. Out: whether to start
another one. Unreachable storage is not used for a number of steps and then tried again; the tiers
above continue without it. Logs the start and the end of an outage, not single pages.
"""

from __future__ import annotations

import logging

import numpy as np

from manyroots.ids import StepId
from manyroots.messages import StorageStats
from manyroots.step import CopyDone

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""After this many failures in a row, storage counts as dead."""
FIRST_REST_STEPS = 64
MAX_REST_STEPS = 4096
"""The pause doubles each time that storage is still dead when it is tried again, up to this. In
steps, because the decide half has no clock; an idle engine has nothing to ask anyway."""


class DirectionHealth:
    """Health of one direction: a full disk can still be read."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._failures = 0
        self._rest_steps = 0
        self._rests_until = StepId(0)
        self.num_outages = 0

    def is_good(self, step_id: StepId) -> bool:
        """Whether to start a copy now."""
        return step_id >= self._rests_until

    def worked(self) -> None:
        if self._rest_steps:
            logger.info("%s storage works again", self._doing)
        self._failures = self._rest_steps = 0

    def failed(self, step_id: StepId, reason: str) -> None:
        self._failures += 1
        # Copies that started before the pause and fail during it add no information.
        if self._failures < MAX_FAILURES or not self.is_good(step_id):
            return
        if self._rest_steps == 0:
            self.num_outages += 1
            logger.warning(
                "%s storage failed %d times in a row, the last time with: %s; going on without "
                "it, and trying again from time to time",
                self._doing, self._failures, reason,
            )  # fmt: skip
        self._rest_steps = min(max(FIRST_REST_STEPS, 2 * self._rest_steps), MAX_REST_STEPS)
        self._rests_until = StepId(step_id + self._rest_steps)


class StorageHealth:
    """Both directions, and counts of failures."""

    def __init__(self) -> None:
        self._reading = DirectionHealth("reading from")
        self._writing = DirectionHealth("writing to")
        self._step_id = StepId(0)
        self._num_missing = self._num_failed = self._num_unwritten = 0

    def pass_to(self, step_id: StepId) -> None:
        """The engine is at this step."""
        self._step_id = max(self._step_id, step_id)

    @property
    def may_read(self) -> bool:
        return self._reading.is_good(self._step_id)

    @property
    def may_write(self) -> bool:
        return self._writing.is_good(self._step_id)

    def was_read(self, done: CopyDone) -> None:
        """Storage has answered, or could not be asked."""
        count = _num_lost(done)
        if done.error is None:
            self._num_missing += count
            self._reading.worked()
        else:
            self._num_failed += count
            self._reading.failed(self._step_id, done.error)

    def was_written(self, done: CopyDone) -> None:
        count = _num_lost(done)
        self._num_unwritten += count
        if done.error is None and count < len(done.arrived):
            self._writing.worked()
        else:
            self._writing.failed(self._step_id, done.error or "nothing was written")

    def stats(self) -> StorageStats:
        return StorageStats(
            is_read=self.may_read,
            is_written=self.may_write,
            total_missing_units=self._num_missing,
            total_failed_units=self._num_failed,
            total_unwritten_units=self._num_unwritten,
            total_outages=self._reading.num_outages + self._writing.num_outages,
        )


def _num_lost(done: CopyDone) -> int:
    return int(np.count_nonzero(~np.asarray(done.arrived)))
