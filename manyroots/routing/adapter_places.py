"""Where each adapter is: an estimate from the requests that replicas were given.

A replica keeps the adapters that were used last, as many as its slots and its host memory hold
(lora/residency.py). So the order of use tells the tier, and no engine has to report it.

Each adapter has a target number of replicas, its *homes*, that follows its share of the traffic. A
rare adapter has one home and is loaded once; a busy one gets more as its share grows.
"""

from __future__ import annotations

import math
from collections import OrderedDict

_GROWTH = 2 ** (1 / 4096)
"""Of a request's weight over the one before it: a request 4096 ago counts half."""
_MOST = 1e12
HEADROOM = 1.5
"""Homes for this multiple of an adapter's share of the traffic."""


class AdapterPlaces:
    """Adapters by replica, in the order of their use; and the traffic of each."""

    def __init__(self, num_replicas: int, *, max_loras: int, max_cpu_loras: int) -> None:
        """0: as many as there are."""
        self._num_replicas = num_replicas
        self._on_device = _Recent(num_replicas, max_loras)
        self._on_host = _Recent(num_replicas, max_cpu_loras)
        self._traffic: dict[str, float] = {}
        self._total = 0.0
        self._weight = 1.0

    def use(self, replica: int, adapter: str | None) -> None:
        """A request was given to a replica; None is one for the base model."""
        self._weight *= _GROWTH
        self._total += self._weight
        if adapter is not None:
            self._traffic[adapter] = self._traffic.get(adapter, 0.0) + self._weight
            self._on_device.use(replica, adapter)
            self._on_host.use(replica, adapter)
        if self._weight > _MOST:
            self._rescale()

    def forget(self, replica: int) -> None:
        """A replica has no adapter any more."""
        self._on_device.forget(replica)
        self._on_host.forget(replica)

    def on_device(self, adapter: str) -> int:
        """The set of replicas that have it in a slot."""
        return self._on_device.replicas.get(adapter, 0)

    def on_host(self, adapter: str) -> int:
        """The set of replicas that have it in host memory, those with it in a slot included."""
        return self._on_host.replicas.get(adapter, 0)

    def target(self, adapter: str) -> int:
        """How many replicas should have it."""
        share = self._traffic.get(adapter, 0.0) / self._total if self._total else 0.0
        return min(self._num_replicas, max(1, math.ceil(HEADROOM * share * self._num_replicas)))

    def _rescale(self) -> None:
        """Before the weights leave the range of a float; traffic of long ago is dropped."""
        scaled = {name: value / self._weight for name, value in self._traffic.items()}
        self._traffic = {name: value for name, value in scaled.items() if value > 1e-6}
        self._total /= self._weight
        self._weight = 1.0


class _Recent:
    """The adapters that each replica used last, up to a number."""

    def __init__(self, num_replicas: int, limit: int) -> None:
        self._limit = limit
        self._order: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(num_replicas)]
        self.replicas: dict[str, int] = {}
        """Adapter -> the set of replicas that have it."""

    def use(self, replica: int, adapter: str) -> None:
        order = self._order[replica]
        order[adapter] = None
        order.move_to_end(adapter)
        self.replicas[adapter] = self.replicas.get(adapter, 0) | 1 << replica
        if self._limit and len(order) > self._limit:
            self._drop(replica, order.popitem(last=False)[0])

    def forget(self, replica: int) -> None:
        for adapter in self._order[replica]:
            self._drop(replica, adapter)
        self._order[replica].clear()

    def _drop(self, replica: int, adapter: str) -> None:
        left = self.replicas[adapter] & ~(1 << replica)
        if left:
            self.replicas[adapter] = left
        else:
            del self.replicas[adapter]
