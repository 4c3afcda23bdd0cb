"""One layer's experts in one step, as adapters see them: which pairs belong to which adapter.

Takes the layer's `SortedRouting` and the step's `AdapterBatch`; gives each run's pairs, sorted by
expert. A pair's adapter is its token's. Worked out once per layer, and only if an adapter of the
step changes experts there; nothing waits for the device but `RunPairs.segments`, which host loops
ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from manyroots.kernels.lora_sites.batch import AdapterBatch, Run
from manyroots.kernels.lora_sites.weights import LowRank, Site
from manyroots.kernels.moe.routing import SortedRouting


@dataclass(frozen=True, slots=True)
class Segment:
    """The pairs of one run at one expert: neighbours, since pairs lie by expert, then by token."""

    expert: int
    here: slice
    """Among the pairs of the run."""
    there: slice
    """Among all pairs of the layer."""


@dataclass(frozen=True)
class RunPairs:
    """The pairs of one run, sorted by expert."""

    run: Run
    places: Tensor
    """int64 [pairs of the run], where they lie among all pairs of the layer."""
    experts: Tensor
    """The expert of each."""
    tokens: Tensor
    """The token of each, counted from the run's first."""
    by_token: Tensor
    """int64 [tokens of the run, experts per token]: numbers of the pairs in the order above."""

    @cached_property
    def segments(self) -> list[Segment]:
        """One for each expert that has pairs; on the host."""
        experts = self.experts.tolist()
        changes = [i for i, (last, this) in enumerate(pairwise(experts), 1) if last != this]
        firsts = [0, *changes]
        starts = self.places[firsts].tolist()
        ends = [*changes, len(experts)]
        return [
            Segment(experts[first], slice(first, end), slice(start, start + end - first))
            for first, end, start in zip(firsts, ends, starts, strict=True)
        ]


@dataclass(frozen=True)
class AdapterPairs:
    """The pairs of one layer in one step, and their adapters."""

    routing: SortedRouting
    batch: AdapterBatch

    def changes(self, site: Site) -> Iterator[tuple[RunPairs, LowRank]]:
        """What adapters add at `site`."""
        for index, run in enumerate(self.batch.runs):
            for low in run.weights.experts.get(site, ()):
                yield self.by_run[index], low

    @cached_property
    def by_run(self) -> list[RunPairs]:
        """Of each run, the same for all sites of the layer."""
        return [self._pairs_of(run) for run in self.batch.runs]

    def _pairs_of(self, run: Run) -> RunPairs:
        index = self.routing.pair_index[run.tokens]
        places, order = torch.sort(index.flatten())
        by_token = torch.empty_like(order)
        by_token[order] = torch.arange(order.numel(), device=order.device)
        return RunPairs(
            run=run,
            places=places,
            experts=self.routing.expert_index.index_select(0, places),
            tokens=order // index.shape[1],
            by_token=by_token.view(index.shape),
        )
