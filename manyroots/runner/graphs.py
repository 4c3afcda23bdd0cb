"""Decode steps, from the rows' tokens to the next ones, captured as CUDA graphs.

Takes a step's arrays; gives its tokens on the device, without the host ever waiting. There is one
graph for each batch size and for steps with and without adapters, captured when it is first
needed or ahead of time. A graph reads its inputs from a buffer of its own and everything else
(weights, pages, adapters, the rows' newest tokens) from where it always is.

`capture=False` launches the same kernels one by one: `--enforce-eager`, and every CPU.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.attention.paged import DecodeRows
from manyroots.kernels.choice import Kernels
from manyroots.kernels.fused_step import FusedStep
from manyroots.kernels.lora_sites.sites import LoraRows
from manyroots.kernels.rope_write.inputs import KvPlaces
from manyroots.models.fused import FusedDecoder
from manyroots.progress import track
from manyroots.runner.device_rows import DeviceRows
from manyroots.runner.packet import PacketLayout, send
from manyroots.runner.step_arrays import Arrays, blank_decode_arrays

_SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_SIZE_STEP = 32


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    layout: PacketLayout
    inputs: Tensor
    """The device's side of the inputs, which the graph reads."""
    result: Tensor


class DecodeGraphs:
    """All graphs of one model."""

    def __init__(
        self,
        decoder: FusedDecoder,
        kernels: Kernels,
        rows: DeviceRows,
        *,
        num_slots: int | None,
        capture: bool,
    ) -> None:
        """`num_slots`: of adapters; None without."""
        self._decoder = decoder
        self._kernels = kernels
        self._rows = rows
        self._num_slots = num_slots
        self._captures = capture
        self._sizes = graph_sizes(rows.spare_row)
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle() if capture else None

    def has_room_for(self, num_rows: int) -> bool:
        return num_rows <= self._sizes[-1]

    def size_for(self, num_rows: int) -> int:
        """To how many rows a step must be padded; the same without graphs, so that the results
        are the same bit by bit."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def run(self, arrays: Arrays) -> Tensor:
        """Launch one step. Gives int32 [2, rows]: the tokens, and whether the logits were finite;
        valid until the next one is launched."""
        if not self._captures:
            return self._step(send(arrays, self._rows.newest.device))
        key = (len(arrays["tokens"]), "adapter_slots" in arrays)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(*key)
        packed = captured.layout.pack(arrays, pin=True)
        captured.inputs.copy_(packed, non_blocking=True)
        captured.graph.replay()
        return captured.result

    def capture_all(self) -> None:
        """Capture every size now, largest first: the smaller ones then share its memory."""
        if not self._captures:
            return
        kinds = (False, True) if self._num_slots is not None else (False,)
        keys = [(size, kind) for size in reversed(self._sizes) for kind in kinds]
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
            free, _ = torch.cuda.mem_get_info(self._rows.newest.device)
            self._graphs[size, False] = self._capture(size, False)
            torch.cuda.empty_cache()
            taken.append(free - torch.cuda.mem_get_info(self._rows.newest.device)[0])
        return max(0, taken[0]) + (num_kinds * len(self._sizes) - 1) * max(0, taken[-1])

    def _capture(self, size: int, with_adapters: bool) -> _Captured:
        blank = blank_decode_arrays(
            size=size,
            spare_row=self._rows.spare_row,
            num_families=len(self._rows.page_tables),
            num_slots=self._num_slots if with_adapters else None,
        )
        device = self._rows.newest.device
        layout = PacketLayout(blank)
        inputs = layout.pack(blank, pin=False).to(device)
        views = layout.views(inputs)
        self._step(views)  # compiles, which can't be captured
        graph = torch.cuda.CUDAGraph()
        # Other threads load adapters meanwhile, and may allocate.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = self._step(views)
        return _Captured(graph, layout, inputs, result)

    def _step(self, views: dict[str, Tensor]) -> Tensor:
        decoder, rows, ends = self._decoder, self._rows, self._kernels.decode_rows
        gathered = ends.begin(
            views["tokens"], views["token_rows"], views["positions"], rows.newest, rows.page_tables,
            (decoder.turns,),
        )  # fmt: skip
        step = FusedStep(
            angles=gathered.ropes[0],
            slots=KvPlaces(views["pages"][0], views["offsets"]),
            decodes=DecodeRows(gathered.page_tables[0], views["lens"]),
            num_decodes=len(gathered.tokens),
            prefills=None,
            lora=lora_rows(views),
        )
        logits = decoder.logits(decoder.hidden(gathered.tokens, step), step.lora)
        sampled, finite = self._kernels.sampling.sample(
            logits, views["temperature"], views["seeds"], views["indices"]
        )
        result: Tensor = ends.end(sampled, finite, views["out_rows"], rows.newest)
        return result


def lora_rows(views: dict[str, Tensor]) -> LoraRows | None:
    """The adapters of a step's tokens, if it has any."""
    if "adapter_slots" not in views:
        return None
    blocks = views["adapter_blocks"]
    return LoraRows(
        views["adapter_slots"], blocks, views["num_adapter_blocks"], max_blocks=blocks.shape[0]
    )


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes that are captured: close enough together that padding costs little, few
    enough to capture in seconds.

    Up to 64 rows a step's time hardly depends on their number; beyond, it grows.
    """
    larger = range(_SMALL_SIZES[-1] + _SIZE_STEP, max_num_seqs, _SIZE_STEP)
    sizes = {*_SMALL_SIZES, *larger, max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))
