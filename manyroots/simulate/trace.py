"""A trace: requests and their arrival times. Plain frozen data.

A prompt is a list of token ids, or of named segments where only what is shared matters. Reply
lengths are part of the trace: a simulation has no model that could decide them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from manyroots.errors import ConfigError
from manyroots.messages import Retention
from manyroots.simulate.segments import segment_tokens
from manyroots.step import Int32s


class EndsBy(enum.Enum):
    """How a reply ends; the values are those of the trace file."""

    LENGTH = "length"
    """At its limit: the scheduler sees the end coming."""
    STOP = "stop"
    """At a stop token, which is known only when it has been sampled."""


@dataclass(frozen=True, slots=True)
class TraceSegment:
    """The first `length` tokens of a named stream."""

    name: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace."""

    arrival_s: float
    prompt: tuple[int, ...] | tuple[TraceSegment, ...]
    adapter: str | None
    """None is the base model."""
    salt: str | None
    output_tokens: int
    n: int = 1
    """How many completions of the prompt."""
    reply: str | None = None
    """Segment that the (first) completion consists of, so that later prompts can quote it.
    None is a reply that nothing else shares."""
    ends_by: EndsBy = EndsBy.LENGTH
    retention: Retention | None = None
    """What the request asks the cache to keep."""
    whole: tuple[TraceSegment, ...] = ()
    """Prompt and reply together, of a trace that knows the pages of both; the last may be longer
    than they are. `reply` is None then."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(part.length if isinstance(part, TraceSegment) else 1 for part in self.prompt)

    def prompt_tokens(self) -> Int32s:
        segments = [part for part in self.prompt if isinstance(part, TraceSegment)]
        return joined(segments) if segments else np.array(self.prompt, np.int32)


Trace = tuple[TraceRequest, ...]


def joined(segments: Sequence[TraceSegment]) -> Int32s:
    """The tokens of segments, one after the other."""
    return np.concatenate([segment_tokens(part.name, part.length) for part in segments])


def sped_up(trace: Trace, factor: float) -> Trace:
    """The same requests, arriving `factor` times as fast."""
    if not 0 < factor < math.inf:
        raise ConfigError(f"--speedup is {factor}; it must be a number above 0.")
    return tuple(replace(line, arrival_s=line.arrival_s / factor) for line in trace)
