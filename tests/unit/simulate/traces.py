"""Lines of traces, for tests of the simulator."""

from __future__ import annotations

from typing import Any

from manyroots.simulate.presets import ROUND_NUMBERS
from manyroots.simulate.trace import TraceRequest, TraceSegment

COSTS = ROUND_NUMBERS.costs


def line(arrival_s: float, *prompt: tuple[str, int], **fields: Any) -> TraceRequest:
    fields = {"adapter": None, "salt": None, "output_tokens": 4, **fields}
    segments = tuple(TraceSegment(name, length) for name, length in prompt)
    return TraceRequest(arrival_s=arrival_s, prompt=segments, **fields)
