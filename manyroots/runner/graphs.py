"""Steps of single tokens, captured as CUDA graphs.

Takes a step's arrays; gives what it sampled on the device, without the host ever waiting. There is
one graph for each batch size and for steps with and without adapters, captured when it is first
needed or ahead of time. A graph reads its inputs from a buffer of its own and everything else
(weights, pages, adapters, the rows' state) from where it always is.

`capture=False` launches the same kernels one by one, padded alike, so that the results are the same
bit by bit: `--enforce-eager`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.sampling.rows import Sampled
from manyroots.progress import track
from manyroots.runner.forward import Views
from manyroots.runner.packet import PacketLayout, send
from manyroots.runner.step_arrays import Arrays

_SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_SIZE_STEP = 32

Step = Callable[[Views], Sampled]
"""Computes a step of single tokens from its arrays on the device."""
Blank = Callable[[int, bool], Arrays]
"""The arrays of a step that changes nothing, by size and whether it has adapters."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    layout: PacketLayout
    inputs: Tensor
    """The device's side of the inputs, which the graph reads."""
    sampled: Sampled


class Graphs:
    """All graphs of one model."""

    def __init__(
        self,
        step: Step,
        blank: Blank,
        *,
        max_num_rows: int,
        has_adapters: bool,
        device: torch.device,
        capture: bool,
    ) -> None:
        self._step = step
        self._blank = blank
        self._sizes = graph_sizes(max_num_rows)
        self._kinds = (False, True) if has_adapters else (False,)
        self._device = device
        self._captures = capture
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle() if capture else None

    def has_room_for(self, num_rows: int) -> bool:
        return num_rows <= self._sizes[-1]

    def size_for(self, num_rows: int) -> int:
        """To how many rows a step must be padded."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def run(self, arrays: Arrays) -> Sampled:
        """Launch one step. What it gives is valid until the next one is launched."""
        if not self._captures:
            return self._step(send(arrays, self._device))
        key = (len(arrays["tokens"]), "adapter_slots" in arrays)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(*key)
        packed = captured.layout.pack(arrays, pin=True)
        captured.inputs.copy_(packed, non_blocking=True)
        captured.graph.replay()
        return captured.sampled

    def capture_all(self) -> None:
        """Capture every size now, largest first: the smaller ones then share its memory."""
        if not self._captures:
            return
        keys = [(size, kind) for size in reversed(self._sizes) for kind in self._kinds]
        for key in track(keys, total=len(keys), label="Capturing graphs"):
            if key not in self._graphs:
                self._graphs[key] = self._capture(*key)

    def measure(self, num_kinds: int) -> int:
        """Bytes that all graphs will take, of so many kinds for each size: the largest one's,
        which holds the memory they share, and for each other what a second one takes."""
        if not self._captures:
            return 0
        taken = []
        for size in self._sizes[:-3:-1]:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self._device)
            self._graphs[size, False] = self._capture(size, False)
            torch.cuda.empty_cache()
            taken.append(free - torch.cuda.mem_get_info(self._device)[0])
        return max(0, taken[0]) + (num_kinds * len(self._sizes) - 1) * max(0, taken[-1])

    def _capture(self, size: int, with_adapters: bool) -> _Captured:
        blank = self._blank(size, with_adapters)
        layout = PacketLayout(blank)
        inputs = layout.pack(blank, pin=False).to(self._device)
        views = layout.views(inputs)
        self._step(views)  # compiles, which can't be captured
        graph = torch.cuda.CUDAGraph()
        # Other threads load adapters meanwhile, and may allocate.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            sampled = self._step(views)
        return _Captured(graph, layout, inputs, sampled)


def graph_sizes(max_num_rows: int) -> tuple[int, ...]:
    """The batch sizes that are captured: close enough together that padding costs little, few
    enough to capture in seconds.

    Up to 64 rows a step's time hardly depends on their number; beyond, it grows.
    """
    larger = range(_SMALL_SIZES[-1] + _SIZE_STEP, max_num_rows, _SIZE_STEP)
    sizes = {*_SMALL_SIZES, *larger, max_num_rows}
    return tuple(sorted(size for size in sizes if size <= max_num_rows))
