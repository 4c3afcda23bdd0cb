"""Steps captured as CUDA graphs: of single tokens, and of prompts beside them.

Takes a step's arrays; gives what it sampled on the device, without the host ever waiting. There is
one graph for each batch size and kind of step (with and without adapters, ...). Those of all sizes
are captured when the engine starts; of rare kinds (rows that share pages, masks that come late) a
size is captured when it is needed again, and the first time its kernels are launched one by one. A
graph reads its inputs from a buffer of its own and everything else (weights, pages, adapters, the
rows' state) from where it always is.

`capture=False` launches the same kernels one by one, padded alike, so that the results are the same
bit by bit: `--enforce-eager`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from manyroots.kernels.row_sizes import row_size
from manyroots.kernels.sampling.rows import Sampled
from manyroots.process.progress import track
from manyroots.runner.first_runs import FirstRuns
from manyroots.runner.forward import PacketViews
from manyroots.runner.mixed import MixedShape
from manyroots.runner.packet import KeptArrays, PacketLayout, send
from manyroots.runner.step_arrays import NamedArrays

_RARE_IN_USE = 24
"""Graphs of rare kinds that room is left for."""
CAPTURED_AT = 2
"""The time that a rare kind is needed at which it is captured: capturing takes several steps' time,
and the first of a kind may be the last."""

Model = Callable[[PacketViews, "GraphKey"], Tensor]
"""Logits of a step, from its arrays on the device."""
Choose = Callable[[Tensor, PacketViews], Sampled]
"""The tokens that follow."""
Blank = Callable[["GraphKey"], NamedArrays]
"""The arrays of a step that changes nothing."""


class GraphKey(NamedTuple):
    """What kind of step a graph is for."""

    size: int
    """Tokens."""
    with_adapters: bool
    in_two: bool = False
    """Whether something is written between the model and the choice."""
    shares: bool = False
    """Whether rows begin with the same pages, which are read once for them."""
    mixed: MixedShape | None = None
    """Of a step with prompts; None for one of single tokens."""
    in_runs: bool = False
    """Whether rows are consecutive tokens of sequences, whose histories are read once."""


class Replayed(Protocol):
    """A graph, as far as steps use it."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Captured:
    """A step that can be replayed."""

    graphs: tuple[Replayed, ...]
    """One, or the model's and the choice's."""
    layout: PacketLayout
    inputs: Tensor
    """The device's side of the inputs, which the graphs read."""
    sampled: Sampled
    logits: Tensor | None
    """Held where there are two: what lies between them is no other memory."""


class Graphs:
    """All graphs of one model."""

    def __init__(
        self,
        model: Model,
        choose: Choose,
        blank: Blank,
        *,
        max_num_rows: int,
        has_adapters: bool,
        device: torch.device,
        capture: bool,
        first_runs: FirstRuns,
        checks_drafts: bool = False,
        briefly: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`checks_drafts`: whether there are steps in runs. `briefly`: in its context a model
        launches each of its kernels and computes nothing useful."""
        self._model, self._briefly = model, briefly
        self._choose = choose
        self._blank = blank
        self._sizes = graph_sizes(max_num_rows)
        self._kinds = (False, True) if has_adapters else (False,)
        self._in_runs = (False, True) if checks_drafts else (False,)
        self._device = device
        self._captures = capture
        self._first_runs = first_runs
        self.was_replayed = False
        """Whether the newest step was a graph, and not launched kernel by kernel."""
        self._graphs: dict[GraphKey, Captured] = {}
        self.used: Counter[GraphKey] = Counter()
        """Steps of each kind."""
        self._times_needed: Counter[GraphKey] = Counter()
        """Of kinds that have no graph."""
        self._memory = torch.cuda.graph_pool_handle() if capture else None

    def has_room_for(self, num_rows: int) -> bool:
        return num_rows <= self._sizes[-1]

    def size_for(self, num_rows: int) -> int:
        """To how many rows a step must be padded."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def run(
        self,
        arrays: NamedArrays,
        between: Callable[[], None] | None = None,
        mixed: MixedShape | None = None,
    ) -> Sampled:
        """Launch one step. The result is valid until the next launch. `between`: called
        when the model is launched and the choice is not, whose masks it may still write; such a
        step is two graphs."""
        key = GraphKey(
            len(arrays["tokens"]), "adapter_slots" in arrays, between is not None,
            "shared_lens" in arrays, mixed, "run_starts" in arrays,
        )  # fmt: skip
        self.used[key] += 1
        captured = self._graph_of(key)
        self.was_replayed = captured is not None
        if captured is None:
            views = send(arrays, self._device)
            logits = self._model(views, key)
            if between is not None:
                between()
            return self._choose(logits, views)
        pin = self._device.type == "cuda"
        if isinstance(arrays, KeptArrays):
            packed = arrays.pack(captured.layout, pin=pin)
        else:
            packed = captured.layout.pack(arrays, pin=pin)
        captured.inputs.copy_(packed, non_blocking=True)
        first, *second = captured.graphs
        first.replay()
        if between is not None:
            between()
        for graph in second:
            graph.replay()
        return captured.sampled

    def _graph_of(self, key: GraphKey) -> Captured | None:
        """None while its kernels are launched one by one."""
        captured = self._graphs.get(key)
        if captured is None and self._captures:
            self._times_needed[key] += 1
            if self._times_needed[key] >= CAPTURED_AT:
                captured = self._graphs[key] = self._capture(key)
                self._first_runs.note("graph", key)
        return captured

    def capture_all(self, mixed: Sequence[MixedShape]) -> None:
        """Capture every size of single tokens and all these of steps with prompts now, largest
        first: the smaller ones then share its memory."""
        if not self._captures:
            return
        keys = [GraphKey(shape.num_tokens, k, mixed=shape) for shape in mixed for k in self._kinds]
        keys += self._single_tokens()[::-1]
        for key in track(keys, total=len(keys), label="Capturing graphs"):
            if key not in self._graphs:
                self._graphs[key] = self._capture(key)

    def launch_all(self, mixed: Sequence[MixedShape]) -> None:
        """Every kind of step once, kernel by kernel; rare kinds, too. Call it within `briefly`."""
        sizes = self._single_tokens()
        keys = [GraphKey(shape.num_tokens, k, mixed=shape) for shape in mixed for k in self._kinds]
        few = [*sizes, *keys[: len(self._kinds)], *keys[-len(self._kinds) :]]
        for key in (*sizes, *keys, *(key._replace(shares=True) for key in few)):
            views = send(self._blank(key), self._device)
            self._choose(self._model(views, key), views)

    def _single_tokens(self) -> list[GraphKey]:
        """Every kind of step of single tokens that is not rare, the largest last. A run of one
        token is none."""
        return [
            GraphKey(size, kind, in_runs=in_runs)
            for size in self._sizes
            for kind in self._kinds
            for in_runs in self._in_runs
            if size > 1 or not in_runs
        ]

    def measure(self, num_kinds: int, mixed: Sequence[MixedShape]) -> int:
        """Bytes that all graphs will take, of so many kinds for each size: the largest ones',
        which hold the memory they share, and for each other what a further one takes. `mixed`: of
        steps with prompts, the largest first."""
        if not self._captures:
            return 0
        keys = [GraphKey(shape.num_tokens, with_adapters=False, mixed=shape) for shape in mixed[:1]]
        keys += [GraphKey(size, with_adapters=False) for size in self._sizes[:-3:-1]]
        num_sizes = len(self._in_runs) * len(self._sizes)
        num_further = num_kinds * (num_sizes + len(mixed)) + _RARE_IN_USE
        taken = []
        for key in keys:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self._device)
            self._graphs[key] = self._capture(key)
            torch.cuda.empty_cache()
            taken.append(max(0, free - torch.cuda.mem_get_info(self._device)[0]))
        return sum(taken[:-1]) + num_further * taken[-1]

    def _capture(self, key: GraphKey) -> Captured:
        blank, in_two = self._blank(key), key.in_two
        layout = PacketLayout(blank)
        inputs = layout.pack(blank, pin=False).to(self._device)
        views = layout.views(inputs)
        with self._briefly():
            self._choose(self._model(views, key), views)  # loads kernels, which can't be captured
        graphs = [torch.cuda.CUDAGraph() for _ in range(2 if in_two else 1)]
        with self._captured(graphs[0]):
            logits = self._model(views, key)
            if not in_two:
                sampled = self._choose(logits, views)
        if in_two:
            with self._captured(graphs[1]):
                sampled = self._choose(logits, views)
        return Captured(tuple(graphs), layout, inputs, sampled, logits if in_two else None)

    def _captured(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # Other threads load adapters meanwhile, and may allocate.
        return torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local")


def graph_sizes(max_num_rows: int) -> tuple[int, ...]:
    """The batch sizes that are captured: close enough together that padding costs little, few
    enough to capture in seconds.

    Up to 64 rows a step's time hardly depends on their number; beyond, it grows.
    """
    return tuple(sorted({min(row_size(n), max_num_rows) for n in range(1, max_num_rows + 1)}))
