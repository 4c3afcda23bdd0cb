"""A load whose step reads it layer by layer while it arrives (T10).

Layers form groups. One group's part of every unit is copied, then the next one's. Before a layer
computes, its group must have arrived. On a GPU only the step's stream waits; on a CPU the computing
thread does. There are few groups, because smaller parts copy more slowly.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

MOST_GROUPS = 6


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """A model's layers, cut into runs."""

    layers: tuple[tuple[int, ...], ...]
    """By family of pages: indexes of its layers in the model, ascending."""

    @property
    def num_layers(self) -> int:
        return 1 + max((layers[-1] for layers in self.layers if layers), default=0)

    @property
    def num_groups(self) -> int:
        return min(MOST_GROUPS, self.num_layers)

    def group_of(self, layer: int) -> int:
        return layer * self.num_groups // self.num_layers

    def part(self, family: int, group: int, unit_bytes: int) -> slice:
        """The range of a unit of a family with the memory of a group's layers; may be empty."""
        layers = self.layers[family]
        members = [at for at, layer in enumerate(layers) if self.group_of(layer) == group]
        if not members:
            return slice(0, 0)
        of_layer = unit_bytes // len(layers)
        return slice(members[0] * of_layer, (members[-1] + 1) * of_layer)


class LayerArrivals:
    """What one step waits for. One thread reports groups, in order; another asks for layers."""

    def __init__(self, groups: LayerGroups) -> None:
        self._groups = groups
        self._is_told = [threading.Event() for _ in range(groups.num_groups)]
        self._events: list[torch.cuda.Event | None] = [None] * groups.num_groups
        self._error: str | None = None
        self._num_there = 0
        """Groups that have arrived."""

    def tell(self, group: int, event: torch.cuda.Event | None) -> None:
        """A group has arrived; with an event, once that has happened on the device."""
        self._events[group] = event
        self._is_told[group].set()

    def fail(self, error: str) -> None:
        """The remaining groups will not arrive."""
        self._error = error
        for is_told in self._is_told:
            is_told.set()

    def before_layer(self, layer: int) -> None:
        """Delay everything launched from now on until a layer's part has arrived. Raises
        RuntimeError if it will not arrive."""
        group = self._groups.group_of(layer)
        while self._num_there <= group:
            self._is_told[self._num_there].wait()
            if self._error is not None:
                raise RuntimeError(f"pages did not come from the host: {self._error}")
            event = self._events[self._num_there]
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            self._num_there += 1
