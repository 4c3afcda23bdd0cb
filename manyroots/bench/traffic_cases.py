"""Workloads of whole requests: what comes, how long it is, and with which adapters.

The first eight are what `docs/performance.md` compares with other engines by; the others are there
so that nothing is tuned to those. Lengths are drawn evenly from their range, all from one seed:
a case is the same requests in the same order on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from manyroots.bench.words import ATTENTION, PROJECTIONS
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams

Range = tuple[int, int]
"""Both ends included."""

SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
"""What Qwen3's own generation_config asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficCase:
    """One workload. Everything is submitted at once unless arrivals are asked for."""

    name: str
    num_requests: int
    prompt_len: Range
    """Of a request's own, after its shared head."""
    output_len: Range
    """Exact: the end of text is ignored."""
    num_heads: int = 0
    """Different heads, in turn over the requests; 0: nothing is shared."""
    head_len: int = 0
    is_sampled: bool = False
    num_adapters: int = 0
    zipf: float | None = None
    """Adapter number i is asked for in proportion to (i + 1) to the power of minus this; None: in
    turn."""
    ranks: tuple[int, ...] = (16,)
    """Of the adapters, in turn."""
    projections: tuple[str, ...] = PROJECTIONS

    @property
    def max_len(self) -> int:
        return self.head_len + self.prompt_len[1] + self.output_len[1]

    def described(self) -> dict[str, Any]:
        """Every number of it, for the report."""
        return {**asdict(self), "sampling": SAMPLED if self.is_sampled else {"temperature": 0}}

    def shrunk(self, num_requests: int | None, lengths: float) -> TrafficCase:
        """With fewer requests and shorter ones, to try it on a small machine."""
        most = self.num_requests if num_requests is None else num_requests

        def part(low_high: Range) -> Range:
            low, high = (max(1, round(length * lengths)) for length in low_high)
            return low, high

        return replace(
            self,
            num_requests=min(self.num_requests, most),
            prompt_len=part(self.prompt_len),
            output_len=part(self.output_len),
            head_len=round(self.head_len * lengths),
        )

    def submits(
        self, vocab_size: int, salt: str, ids: Iterator[int], *, with_adapters: bool
    ) -> list[Submit]:
        """The requests. Another salt is another, cold cache for the same ones."""
        rng = np.random.default_rng(0)
        heads = rng.integers(0, vocab_size, (max(1, self.num_heads), self.head_len)).tolist()
        params = SAMPLED if self.is_sampled else {"temperature": 0}
        names = self._adapters(rng)
        submits = []
        for number in range(self.num_requests):
            own_len = int(rng.integers(self.prompt_len[0], self.prompt_len[1] + 1))
            num_out = int(rng.integers(self.output_len[0], self.output_len[1] + 1))
            own = rng.integers(0, vocab_size, own_len).tolist()
            name = next(names)
            sampling = SamplingParams(max_tokens=num_out, ignore_eos=True, **params)
            submits.append(
                Submit(
                    RequestId(next(ids)), heads[number % len(heads)] + own,
                    salt, sampling, number, (),
                    adapter=name if with_adapters else None,
                )
            )  # fmt: skip
        return submits

    def _adapters(self, rng: np.random.Generator) -> Iterator[AdapterName | None]:
        if self.num_adapters == 0:
            return itertools.repeat(None)
        if self.zipf is None:
            return map(adapter_name, itertools.cycle(range(self.num_adapters)))
        popularity = np.arange(1, self.num_adapters + 1) ** -self.zipf
        chosen = rng.choice(self.num_adapters, self.num_requests, p=popularity / popularity.sum())
        return map(adapter_name, chosen.tolist())


def adapter_name(number: int) -> AdapterName:
    return AdapterName(f"adapter-{number}")


_MIXED: dict[str, Any] = {
    "num_requests": 512, "prompt_len": (64, 1024), "output_len": (32, 256),
}  # fmt: skip

CASES: dict[str, TrafficCase] = {
    case.name: case
    for case in (
        TrafficCase(name="mixed-greedy", **_MIXED),
        TrafficCase(name="mixed-sampled", **_MIXED, is_sampled=True),
        TrafficCase(
            name="shared-heads", num_requests=256, num_heads=16, head_len=2048,
            prompt_len=(256, 256), output_len=(128, 128),
        ),
        TrafficCase(
            name="long-prompts", num_requests=16, prompt_len=(16_000, 16_000),
            output_len=(128, 128),
        ),
        TrafficCase(name="adapters-8", **_MIXED, num_adapters=8),
        TrafficCase(name="adapters-8-sampled", **_MIXED, num_adapters=8, is_sampled=True),
        TrafficCase(name="adapters-32", **_MIXED, num_adapters=32, zipf=1.0),
        TrafficCase(
            name="adapters-1000", **{**_MIXED, "num_requests": 2000}, num_adapters=1000, zipf=1.0,
            ranks=(8,), projections=ATTENTION,
        ),
        TrafficCase(
            name="short-prompts", num_requests=512, prompt_len=(16, 128), output_len=(128, 384)
        ),
        TrafficCase(
            name="classify", num_requests=1024, prompt_len=(256, 2048), output_len=(1, 4)
        ),
        TrafficCase(
            name="documents", num_requests=128, num_heads=8, head_len=6000, prompt_len=(64, 2048),
            output_len=(64, 128), is_sampled=True,
        ),
        TrafficCase(
            name="adapters-of-many-ranks", **_MIXED, num_adapters=20, ranks=(8, 16, 32, 64, 128),
        ),
        TrafficCase(name="adapters-16", **_MIXED, num_adapters=16),
        TrafficCase(name="adapters-200", **_MIXED, num_adapters=200, zipf=1.0, ranks=(8,)),
        TrafficCase(
            name="adapters-10000", **{**_MIXED, "num_requests": 2000}, num_adapters=10_000,
            zipf=1.0, ranks=(2,), projections=("q_proj", "v_proj"),
        ),
        TrafficCase(
            name="streams-64", num_requests=64, prompt_len=(128, 128), output_len=(128, 128)
        ),
    )
}  # fmt: skip
