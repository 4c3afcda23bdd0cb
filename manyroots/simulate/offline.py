"""Hit rates to hold ours against: of a cache without limits, and of one that knows the future.

Both serve one sequence after the other, by arrival: a sequence finds what is there of its prompt,
and all its pages are there when it ends. With limited room the best policy evicts the page whose
next use is farthest away (Belady). That is always the end of a path: a request that reads a page
reads all before it, so none of those is needed later than the page itself. Keeping prefixes whole
therefore costs nothing, and no policy that keeps every sequence's pages till it ends computes fewer
pages. (Where a prompt ends with a page, that page is computed whether it is there or not; it counts
as used here all the same, so that the optimum in hits may be a page higher for such a request.)

A run of the engine can differ from both by a little, either way, because requests overlap there.
"""

from __future__ import annotations

import heapq

from manyroots.errors import ConfigError
from manyroots.simulate.paths import Paths, Visit

NEVER = 1 << 62


def endless_hit_rate(paths: Paths) -> float:
    """Reusable prompt tokens over all of them, where nothing is ever evicted."""
    seen = [False] * len(paths.sizes)
    num_hits = 0
    for visit in paths.visits:
        num_found = 0
        for run in visit.runs:
            if not seen[run]:
                break
            num_found += paths.sizes[run]
        num_hits += min(num_found, visit.num_reusable_pages)
        for run in visit.runs:
            seen[run] = True
    return num_hits * paths.page_size / paths.num_prompt_tokens


def best_offline_hit_rate(paths: Paths, num_pages: int) -> float:
    """The same with room for `num_pages`, where eviction knows all later requests."""
    uses = _next_uses(paths.visits)
    num_resident = [0] * len(paths.sizes)
    next_use = [NEVER] * len(paths.sizes)
    queue: list[tuple[int, int, int]] = []
    """(-next use, -depth, run): the farthest first, of one path its end first."""
    num_free, num_hits = num_pages, 0
    for visit, coming in zip(paths.visits, uses, strict=True):
        found = _num_found(paths, visit, num_resident)
        num_hits += min(found, visit.num_reusable_pages)
        for run in visit.runs:
            next_use[run] = -1  # read now: not to be evicted
        for run in visit.runs:
            missing = paths.sizes[run] - num_resident[run]
            while num_free < missing:
                num_free += _evict_one(queue, num_resident, next_use, missing - num_free)
            num_free -= missing
            num_resident[run] += missing
        for run, use in zip(visit.runs, coming, strict=True):
            next_use[run] = use
            heapq.heappush(queue, (-use, -paths.depths[run], run))
    return num_hits * paths.page_size / paths.num_prompt_tokens


def _num_found(paths: Paths, visit: Visit, num_resident: list[int]) -> int:
    found = 0
    for run in visit.runs:
        found += num_resident[run]
        if num_resident[run] < paths.sizes[run]:
            break
    return found


def _evict_one(
    queue: list[tuple[int, int, int]], num_resident: list[int], next_use: list[int], count: int
) -> int:
    """Free up to `count` pages of the run that is needed last; gives how many."""
    if not queue:
        raise ConfigError("a request of the trace is larger than the cache; raise --num-pages.")
    use, _, run = queue[0]
    if next_use[run] != -use or not num_resident[run]:
        heapq.heappop(queue)  # used since, or gone
        return 0
    gone = min(count, num_resident[run])
    num_resident[run] -= gone
    return gone


def _next_uses(visits: list[Visit]) -> list[list[int]]:
    """For each run of each visit, the number of the visit that reads it next."""
    coming: dict[int, int] = {}
    uses: list[list[int]] = [[]] * len(visits)
    for number in range(len(visits) - 1, -1, -1):
        runs = visits[number].runs
        uses[number] = [coming.get(run, NEVER) for run in runs]
        coming |= dict.fromkeys(runs, number)
    return uses
