"""A load that the step it comes with reads layer by layer, as it arrives (T10).

Layers come in groups: one group's part of every unit is copied, then the next one's, and before a
layer computes, its group must be there. On a GPU only the step's stream waits; on a CPU
the thread that computes does. Few groups, because a smaller part is a slower copy.
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
    """By family of pages: its layers' places in the model, ascending."""

    @property
    def num_layers(self) -> int:
        return 1 + max((layers[-1] for layers in self.layers if layers), default=0)

    @property
    def num_groups(self) -> int:
        return min(MOST_GROUPS, self.num_layers)

    def group_of(self, layer: int) -> int:
        return layer * self.num_groups // self.num_layers

    def part(self, family: int, group: int, unit_bytes: int) -> slice:
        """Where a unit of a family has what a group's layers remember; empty if that is nothing."""
        layers = self.layers[family]
        members = [at for at, layer in enumerate(layers) if self.group_of(layer) == group]
        if not members:
            return slice(0, 0)
        of_layer = unit_bytes // len(layers)
        return slice(members[0] * of_layer, (members[-1] + 1) * of_layer)


class LayerArrivals:
    """What one step waits for. One thread tells of groups, in order; another asks for layers."""

    def __init__(self, groups: LayerGroups) -> None:
        self._groups = groups
        self._is_told = [threading.Event() for _ in range(groups.num_groups)]
        self._events: list[torch.cuda.Event | None] = [None] * groups.num_groups
        self._error: str | None = None
        self._num_there = 0
        """Groups that need not be asked for again."""

    def tell(self, group: int, event: torch.cuda.Event | None) -> None:
        """A group is there; with an event, when that has happened on the device."""
        self._events[group] = event
        self._is_told[group].set()

    def fail(self, error: str) -> None:
        """The rest does not come."""
        self._error = error
        for is_told in self._is_told:
            is_told.set()

    def before_layer(self, layer: int) -> None:
        """Let nothing that is launched from now on begin before a layer's part is there. Raises
        RuntimeError if it does not come."""
        group = self._groups.group_of(layer)
        while self._num_there <= group:
            self._is_told[self._num_there].wait()
            if self._error is not None:
                raise RuntimeError(f"pages did not come from the host: {self._error}")
            event = self._events[self._num_there]
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            self._num_there += 1
