"""What happened to each sequence, noted as its outputs arrive, and held against what was asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from manyroots.ids import Namespace
from manyroots.messages import FinishReason, Output
from manyroots.simulate.traffic import TraceSequence


class SimulationError(AssertionError):
    """The engine under simulation did what it never may. Names the seed that replays it."""


@dataclass(slots=True)
class Record:
    """One sequence, from its arrival to its end."""

    sequence: TraceSequence
    arrival_s: float
    """When it came, bursts included: maybe not the time that the trace says."""
    reply: list[int]
    namespace: Namespace | None
    """With the weights its adapter's name meant when it came; None if it meant none then."""
    token_times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    ended_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def has_begun(self) -> bool:
        return self.num_tokens > 0

    @property
    def is_whole(self) -> bool:
        """Whether it said all that the trace asked for."""
        return self.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.arrival_s

    def note(self, output: Output, now_s: float) -> None:
        """Take in one output; raises SimulationError where it can't be true."""
        name = f"request {self.sequence.request_id}"
        if self.finish_reason is not None:
            raise SimulationError(f"{name} has ended ({self.finish_reason.value}), and says more")
        begin = self.num_tokens
        expected = self.reply[begin : begin + len(output.tokens)]
        if output.tokens != expected:
            raise SimulationError(
                f"{name} says {output.tokens} from token {begin} on, in place of {expected}"
            )
        self.token_times_s.extend([now_s] * len(output.tokens))
        self.num_cached_tokens = output.num_cached_tokens
        if self.num_cached_tokens >= self.sequence.line.num_prompt_tokens:
            raise SimulationError(f"{name} reused its whole prompt: nothing was computed")
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.ended_s = now_s
            if self.is_whole and self.num_tokens != len(self.reply):
                raise SimulationError(
                    f"{name} ended after {self.num_tokens} of {len(self.reply)} tokens"
                )
