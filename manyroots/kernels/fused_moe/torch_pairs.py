"""One layer's pairs sorted by expert, as torch's operators read them, and which adapter has which.

Takes a `Routing` on the CPU and the step's `AdapterBatch`; gives slices, because an expert's
product is one slice, and so is an expert's of one adapter:

    expert 0     expert 2          expert 3
    |t0 t1 t4|   |t0 t2|           |t1 t2 t4|

A pair's adapter is its token's. Runs are looked at only if an adapter changes experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.fused_moe.adapters import ExpertSite
from manyroots.kernels.fused_moe.routing import Routing
from manyroots.kernels.lora_ops.batch import AdapterBatch, Run
from manyroots.kernels.lora_ops.weights import LowRank


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """The pairs of one layer in one step."""

    routing: Routing
    tokens: Tensor
    """int64 [num_pairs], the token of each."""
    places: Tensor
    """int64 [num_tokens, top_k]: where the pairs of each token lie, best expert first."""
    segments: list[tuple[int, slice]]
    """(expert, its pairs) for each expert that has any."""

    @classmethod
    def of(cls, routing: Routing) -> SortedPairs:
        order = routing.pairs.numpy().astype(np.int64)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        shape = routing.weights.shape
        groups = routing.groups.tolist()
        return cls(
            routing,
            torch.from_numpy(order // shape[1]),
            torch.from_numpy(places.reshape(shape)),
            [(expert, slice(begin, end)) for expert, begin, end in groups],
        )

    @property
    def experts(self) -> Tensor:
        """[num_pairs], the expert of each, ascending."""
        return self.routing.experts.flatten().index_select(0, self.routing.pairs)

    def combine(self, out: Tensor) -> Tensor:
        """The weighted sum of each token's pairs: out [num_pairs, size] to [num_tokens, size].

        Each token collects its pairs instead of pairs being added onto tokens: the order of the
        sum is then the same on every run and in every batch, and half precision sums in float32.
        """
        weights = self.routing.weights.to(out.dtype).unsqueeze(-1)
        return out[self.places].mul_(weights).sum(dim=1)


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The pairs of one run at one expert: neighbours, since pairs lie by expert, then by token."""

    expert: int
    here: slice
    """Among the pairs of the run."""
    there: slice
    """Among all pairs of the layer."""


@dataclass(frozen=True)
class PairsOfRun:
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
    def segments(self) -> list[ExpertSlice]:
        """One for each expert that has pairs."""
        experts = self.experts.tolist()
        changes = [i for i, (last, this) in enumerate(pairwise(experts), 1) if last != this]
        firsts = [0, *changes]
        starts = self.places[firsts].tolist()
        ends = [*changes, len(experts)]
        return [
            ExpertSlice(experts[first], slice(first, end), slice(start, start + end - first))
            for first, end, start in zip(firsts, ends, starts, strict=True)
        ]


@dataclass(frozen=True)
class PairsByAdapter:
    """The pairs of one layer in one step, and their adapters."""

    pairs: SortedPairs
    batch: AdapterBatch

    def changes(self, site: ExpertSite) -> Iterator[tuple[PairsOfRun, LowRank]]:
        """What adapters add at `site`."""
        for index, run in enumerate(self.batch.runs):
            for low in run.weights.experts.get(site, ()):
                yield self.by_run[index], low

    @cached_property
    def by_run(self) -> list[PairsOfRun]:
        """Of each run, the same for all sites of the layer."""
        experts = self.pairs.experts
        return [self._pairs_of(run, experts) for run in self.batch.runs]

    def _pairs_of(self, run: Run, experts: Tensor) -> PairsOfRun:
        index = self.pairs.places[run.tokens]
        places, order = torch.sort(index.flatten())
        by_token = torch.empty_like(order)
        by_token[order] = torch.arange(order.numel())
        return PairsOfRun(
            run=run,
            places=places,
            experts=experts.index_select(0, places),
            tokens=order // index.shape[1],
            by_token=by_token.view(index.shape),
        )
