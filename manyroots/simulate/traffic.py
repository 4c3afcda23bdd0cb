"""From lines of a trace to what the engine is sent: one sequence per completion, in order.

Tokens are made when a sequence is submitted, so that a long trace takes no memory beforehand.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from manyroots.ids import AdapterDigest, AdapterName, Namespace, RequestId
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams
from manyroots.simulate.segments import END_OF_TEXT, segment_tokens
from manyroots.simulate.trace import EndsBy, Trace, TraceRequest, joined


@dataclass(frozen=True, slots=True)
class TraceSequence:
    """One completion of one line."""

    request_id: RequestId
    line: TraceRequest
    sample: int
    """Which of the line's `n` completions."""

    @property
    def num_tokens(self) -> int:
        return self.line.num_prompt_tokens + self.line.output_tokens

    def namespace(self) -> Namespace:
        """Where it belongs as long as every adapter has its first content."""
        adapter = self.line.adapter
        digest = None if adapter is None else adapter_digest(adapter, content=0)
        return Namespace(adapter=digest, salt=self.line.salt)

    def reply_tokens(self) -> list[int]:
        """What the model will say."""
        name = self.line.reply if self.line.reply is not None else f"reply to {self.request_id}"
        name = name if self.sample == 0 else f"{name}, sample {self.sample}"
        tokens: list[int] = segment_tokens(name, self.line.output_tokens).tolist()
        if self.line.whole and self.sample == 0:
            tokens = joined(self.line.whole)[self.line.num_prompt_tokens : self.num_tokens].tolist()
        if self.line.ends_by is EndsBy.STOP:
            tokens[-1] = END_OF_TEXT
        return tokens

    def to_submit(self) -> Submit:
        stops = self.line.ends_by is EndsBy.STOP
        adapter = self.line.adapter
        return Submit(
            request_id=self.request_id,
            prompt=self.line.prompt_tokens().tolist(),
            salt=self.line.salt,
            sampling=SamplingParams(max_tokens=None if stops else self.line.output_tokens),
            seed=int(self.request_id),
            stop_ids=(END_OF_TEXT,) if stops else (),
            adapter=None if adapter is None else AdapterName(adapter),
            retention=self.line.retention,
        )


def sequences(trace: Trace) -> list[TraceSequence]:
    """Every completion asked for, by arrival; ties in the order of the trace."""
    lines = sorted(trace, key=lambda line: line.arrival_s)
    samples = [(line, sample) for line in lines for sample in range(line.n)]
    return [
        TraceSequence(RequestId(number), line, sample)
        for number, (line, sample) in enumerate(samples)
    ]


def adapter_digest(name: str, content: int) -> AdapterDigest:
    """Stands for the weights: a name may mean several contents, one after the other."""
    return AdapterDigest(hashlib.sha256(f"{name}/{content}".encode()).digest())
