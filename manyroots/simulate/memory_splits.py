"""One memory for pages and adapters beside every fixed split of it, on one trace.

In: a trace, a machine, and how much memory there is. Out: the mean time to the first token with
each split, and with one memory. A fixed split gives adapters the same share for the whole trace;
to choose the best one, an operator would have to know the trace in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyroots.errors import ConfigError
from manyroots.simulate.costs import CostModel
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import simulate
from manyroots.simulate.summary import summarize
from manyroots.simulate.trace import Trace

SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Of the memory, for adapters."""
START_SHARE = 0.25
"""What adapters have of one memory when a run begins."""


@dataclass(frozen=True, slots=True)
class SplitRow:
    """Mean seconds to the first token on one trace."""

    trace: str
    fixed_s: dict[float, float]
    """By adapters' share. Without those that leave no room for the longest request."""
    one_memory_s: float

    @property
    def best_share(self) -> float:
        return min(self.fixed_s, key=lambda share: (self.fixed_s[share], share))

    @property
    def gain(self) -> float:
        """How many times as quick one memory is as the best fixed split."""
        return self.fixed_s[self.best_share] / self.one_memory_s


def compare_splits(
    name: str,
    trace: Trace,
    settings: SimulationSettings,
    costs: CostModel,
    *,
    memory_bytes: float,
    seed: int,
    shares: Sequence[float] = SHARES,
    audit: bool = False,
) -> SplitRow:
    """`settings`: without sizes of memory, which are set here."""
    page_bytes = costs.kv_bytes_per_token * settings.block_size
    longest = max(line.num_prompt_tokens + line.output_tokens for line in trace)
    least_pages = -(-longest // settings.block_size)

    def mean_s(share: float, *, one_memory: bool) -> float | None:
        num_pages = int((1 - share) * memory_bytes // page_bytes)
        if num_pages < least_pages or share * memory_bytes < costs.adapter_bytes:
            return None
        split = replace(
            settings,
            num_pages=num_pages,
            adapter_memory_bytes=share * memory_bytes,
            one_memory=one_memory,
            max_model_len=longest,
        )
        run = simulate(trace, split, costs, seed=seed, audit=audit)
        return summarize(run).all.ttft_s.mean

    measured = {share: mean_s(share, one_memory=False) for share in shares}
    fixed = {share: seconds for share, seconds in measured.items() if seconds is not None}
    one_memory = mean_s(START_SHARE, one_memory=True)
    if one_memory is None or not fixed:
        raise ConfigError(
            f"--memory-splits is {memory_bytes / 2**30:.3g} GiB, too little for a request of "
            f"{longest} tokens beside one adapter. Raise it."
        )
    return SplitRow(name, fixed, one_memory)
