"""Ways between tiers: copies go over one after the other, each taking latency and bandwidth.

Copies onto one link wait for each other; links do not wait for each other, nor for steps.
"""

from __future__ import annotations

from manyroots.ids import Tier
from manyroots.simulate.costs import CostModel


class Link:
    """One direction between a tier and the one above it."""

    def __init__(self, costs: CostModel, lower: Tier) -> None:
        self._costs = costs
        self._lower = lower
        self._free_at_s = 0.0
        self.total_bytes = 0.0

    def alone_s(self, num_bytes: float) -> float:
        """How long a copy takes with nothing before it."""
        return self._costs.transfer_s(self._lower, num_bytes)

    def send(self, now_s: float, num_bytes: float, *, slowed_by: float = 1.0) -> float:
        """When a copy begun now would be done."""
        begin_s = max(now_s, self._free_at_s)
        self._free_at_s = begin_s + slowed_by * self.alone_s(num_bytes)
        self.total_bytes += num_bytes
        return self._free_at_s
