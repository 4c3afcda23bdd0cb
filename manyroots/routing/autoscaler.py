"""How many replicas a deployment should have: by its queue and by its adapters.

Takes the load at times that rise; gives a number of replicas. The same calls give the same numbers:
no clock, no I/O.

By queue: as many replicas as give each of them `target_requests`. By adapter: as many as have slots
for all adapters that requests use now, so that adapters need not displace each other. The higher
number counts. It must hold for a while before replicas are added, and for longer before one is
removed: a start is cheaper than a cache that has to be filled again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What the replicas have to do now."""

    num_replicas: int
    """That serve or are being started."""
    num_requests: int
    """Under way, those that wait included."""
    num_adapters: int
    """Distinct adapters of these requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLimits:
    """Between which numbers, and how fast."""

    min_replicas: int
    max_replicas: int
    target_requests: int
    """Of one replica."""
    max_loras: int = 0
    """Adapter slots of one replica; 0: adapters do not count."""
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0


class Autoscaler:
    """Remembers since when more, or fewer, replicas would do."""

    def __init__(self, limits: ScaleLimits) -> None:
        self.limits = limits
        self._more_since: float | None = None
        self._fewer_since: float | None = None
        self._most_lately = 0
        """The highest number that was needed since fewer would do."""

    def wanted(self, now: float, load: ReplicaLoad) -> int:
        """How many replicas there should be."""
        limits, current = self.limits, load.num_replicas
        need = self.need(load)
        if current < limits.min_replicas:  # some are dead for good
            return limits.min_replicas
        if need > current:
            self._fewer_since = None
            self._more_since = now if self._more_since is None else self._more_since
            if now - self._more_since >= limits.upscale_delay_s:
                self._more_since = None
                return need
        elif need < current:
            self._more_since = None
            if self._fewer_since is None:
                self._fewer_since, self._most_lately = now, 0
            self._most_lately = max(self._most_lately, need)
            if now - self._fewer_since >= limits.downscale_delay_s:
                self._fewer_since = None
                return self._most_lately
        else:
            self._more_since = self._fewer_since = None
        return current

    def need(self, load: ReplicaLoad) -> int:
        """How many replicas this load needs, whatever was before."""
        limits = self.limits
        by_queue = -(-load.num_requests // limits.target_requests)
        by_adapter = -(-load.num_adapters // limits.max_loras) if limits.max_loras else 0
        return min(limits.max_replicas, max(limits.min_replicas, by_queue, by_adapter))
