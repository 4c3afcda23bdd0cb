"""One layer's experts in one step, as adapters see them: which pairs belong to which adapter.

Takes the layer's `Routing` and the step's `AdapterBatch`; gives *groups*, the pairs of one run at
one expert. A pair's adapter is its token's. Pairs lie by expert and within one in the order of
their tokens, and a run is neighbouring tokens, so that a group is one slice:

    tokens    t0 base   t1 t2 slot 4   t3 slot 1
    expert 0  |t0|t1 t2|t3|            groups [1, 3) of run 0, [3, 4) of run 1
    expert 2  |t0|t2|                  group  [5, 6) of run 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from manyroots.kernels.lora.batch import AdapterBatch, Run
from manyroots.kernels.lora.weights import LowRank, Site
from manyroots.kernels.moe.routing import Routing


@dataclass(frozen=True, slots=True)
class PairGroup:
    """The pairs of one run at one expert."""

    expert: int
    pairs: slice


@dataclass(frozen=True)
class AdapterPairs:
    """The pairs of one layer in one step, and their adapters."""

    routing: Routing
    batch: AdapterBatch

    def changes(self, site: Site) -> Iterator[tuple[Run, list[PairGroup], LowRank]]:
        """What adapters add at `site`: nothing is looked for where no adapter has any."""
        for index, run in enumerate(self.batch.runs):
            for low in run.weights.experts.get(site, ()):
                yield run, self.groups[index], low

    @cached_property
    def groups(self) -> list[list[PairGroup]]:
        """Of each run, in the order of experts; on the host, and the same for all sites."""
        runs = self.batch.runs
        tokens = self.routing.token_index.cpu().numpy()
        experts = self.routing.expert_index.cpu().numpy()
        starts = np.array([run.tokens.start for run in runs])
        ends = np.array([run.tokens.stop for run in runs])
        run_of_pair = np.searchsorted(starts, tokens, side="right") - 1
        # Tokens before the first run look up the last one here, and are not in that either.
        is_base = (run_of_pair < 0) | (tokens >= ends[run_of_pair])
        run_of_pair[is_base] = -1
        is_first = (np.diff(experts) != 0) | (np.diff(run_of_pair) != 0)
        edges = [0, *(np.flatnonzero(is_first) + 1).tolist(), len(tokens)]
        found: list[list[PairGroup]] = [[] for _ in runs]
        for first, end in pairwise(edges):
            if run_of_pair[first] >= 0:
                found[run_of_pair[first]].append(PairGroup(int(experts[first]), slice(first, end)))
        return found
