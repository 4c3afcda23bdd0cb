"""One layer's pairs sorted by expert, for torch's operators, and the adapter of each.

Takes a `Routing` on the CPU and the step's `AdapterBatch`. Gives slices: the pairs of an expert are
one slice, and so are an expert's pairs of one adapter:

    expert 0     expert 2          expert 3
    |t0 t1 t4|   |t0 t2|           |t1 t2 t4|

A pair has its token's adapter. Runs are computed only if an adapter changes experts.
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
    """int64 [num_pairs]: the token of each pair."""
    places: Tensor
    """int64 [num_tokens, top_k]: indexes of each token's pairs, best expert first."""
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
        """[num_pairs]: the expert of each pair, ascending."""
        return self.routing.experts.flatten().index_select(0, self.routing.pairs)

    def combine(self, out: Tensor) -> Tensor:
        """The weighted sum of each token's pairs: out [num_pairs, size] to [num_tokens, size].

        Each token gathers its pairs, instead of pairs being added onto tokens. The order of the sum
        is then the same in every run and batch, and half precision sums in float32.
        """
        weights = self.routing.weights.to(out.dtype).unsqueeze(-1)
        return out[self.places].mul_(weights).sum(dim=1)


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The pairs of one run at one expert. They are adjacent, because pairs are sorted by expert,
    then token."""

    expert: int
    here: slice
    """Indexes into the pairs of the run."""
    there: slice
    """Indexes into all pairs of the layer."""


@dataclass(frozen=True)
class PairsOfRun:
    """The pairs of one run, sorted by expert."""

    run: Run
    places: Tensor
    """int64 [pairs of the run]: indexes into all pairs of the layer."""
    experts: Tensor
    """The expert of each pair."""
    tokens: Tensor
    """The token of each pair, counted from the run's first token."""
    by_token: Tensor
    """int64 [tokens of the run, experts per token]: indexes of the pairs in the order above."""

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
        """The adapters' additions at `site`."""
        for index, run in enumerate(self.batch.runs):
            for low in run.weights.experts.get(site, ()):
                yield self.by_run[index], low

    @cached_property
    def by_run(self) -> list[PairsOfRun]:
        """The pairs of each run, the same for all sites of the layer."""
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
