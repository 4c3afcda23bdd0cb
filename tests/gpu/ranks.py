"""A rank among ranks on a GPU: in a real group, steps are those of no group, in graphs and without.

There is one GPU here, so the group has one rank, which meets itself: every sum, join and agreement
is a collective of NCCL's, and must be captured with the rest of a step. What two ranks compute is
tested with gloo on CPUs (`tests/e2e/test_tensor_parallel.py`).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from manyroots.distributed.group import join_group, leave_group
from manyroots.distributed.shard import Shard
from manyroots.engine import worker
from tests.gpu import requests as made
from tests.gpu.engines import Engines, Side, run, tokens_of
from tests.gpu.models import make_model

KINDS = ("llama", "qwen3-moe")


class MeetingShard(Shard):
    """The only rank there is, which meets itself as one of several would the others."""

    __slots__ = ()
    meetings: Counter[str] = Counter()

    @property
    def is_whole(self) -> bool:
        return False

    def add_up(self, partial: Tensor) -> Tensor:
        self.meetings["sums"] += 1
        dist.all_reduce(partial)
        return partial

    def join(self, own: Tensor, width: int) -> Tensor:
        self.meetings["joins"] += 1
        pieces = own.new_empty(1, *own.shape)
        dist.all_gather(list(pieces.unbind(0)), own.contiguous())
        return pieces[0][..., :width]

    def agree(self, tokens: Tensor) -> Tensor:
        self.meetings["agreements"] += 1
        dist.broadcast(tokens, src=0)
        return tokens


def check(folder: Path, kind: str, dtype: str, side: Side = Side.GPU) -> str:
    """Raise AssertionError if a group changes a token; else say what was compared."""
    make_model(folder, kind, is_decisive=dtype != "float32")
    engines = Engines(folder, dtype, side)
    alone = _outputs(engines)
    device_type = "cuda" if side is Side.GPU else "cpu"
    with tempfile.TemporaryDirectory() as meeting:
        join_group(Shard(0, 1), Path(meeting), device_type=device_type)
        try:
            with mock.patch.object(worker, "WHOLE", MeetingShard(0, 1)):
                graphs = _outputs(engines)
                meetings = dict(MeetingShard.meetings)
                eager = _outputs(engines, enforce_eager=True)
        finally:
            leave_group()
    assert all(meetings.get(what) for what in ("sums", "joins", "agreements")), meetings
    assert graphs == eager, "graphs and single launches, among ranks"
    if dtype == "float32":
        assert graphs == alone, "with a group and without"
    return f"{sum(map(len, graphs))} sequences in a group = without; {meetings}"


def _outputs(engines: Engines, **more: object) -> list[dict[int, list[int]]]:
    loop = engines.loop(**more)
    batches = (made.few((None,)), made.few(), made.odd(), made.few(temperature=0.9))
    try:
        for batch in made.loads():
            run(loop, batch)
        return [tokens_of(run(loop, batch)) for batch in batches]
    finally:
        loop.close()
