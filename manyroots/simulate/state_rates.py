"""Hit rates of models with states: how well checkpoints are chosen and kept (H12).

As `hit_rates.py`, one sequence after the other, through the real cache, where every page fits and
states do not: so what is lost is lost without a checkpoint. Beside it what the best offline
policy finds with room for as many, and a cache without limits.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.recurrent import recurrent_families
from manyroots.cache.keys import PrefixKey
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.errors import ConfigError
from manyroots.ids import StepId
from manyroots.simulate.offline import NEVER, endless_hit_rate
from manyroots.simulate.paths import Paths, Visit, kept_tokens, lay_out
from manyroots.simulate.trace import Trace
from manyroots.simulate.traffic import sequences
from manyroots.step import Int32s

NUM_BUSY = 2
"""Units that the one sequence that runs has besides checkpoints: its working state, and the one
being saved."""


@dataclass(frozen=True, slots=True)
class StateRates:
    """One trace with room for so many states."""

    trace: str
    num_states: int
    num_all_states: int
    """As many as a cache without limits keeps."""
    hit_rate: float
    best_offline: float
    endless: float
    missed_tokens: dict[str, int]
    """Of prompts, by the reason why they were not found (S07)."""


class StateReplay:
    """One cache, and what it has found of a trace so far."""

    def __init__(self, num_pages: int, num_states: int, page_size: int, interval: int) -> None:
        [family] = recurrent_families(1, interval=interval)
        capacities = (Capacity(FULL_ATTENTION, num_pages), Capacity(family, num_states))
        self.cache = PrefixCache(CacheLayout.of(page_size, capacities), CachePolicies())
        self.num_hit_tokens = self.num_prompt_tokens = 0
        self._step = 0

    def serve(self, key: PrefixKey, tokens: Int32s, num_prompt_tokens: int) -> None:
        """One sequence from its prompt to its end, in steps that end where states are saved."""
        cache, page_size = self.cache, self.cache.page_size
        prompt = tokens[:num_prompt_tokens]
        lease = cache.claim(key, prompt, num_prompt_tokens, True)
        computed = num_found = lease.num_cached_tokens
        while computed < len(tokens):
            self._step += 1
            step = StepId(self._step)
            next_page = (computed // page_size + 1) * page_size
            upto = num_prompt_tokens if computed < num_prompt_tokens else next_page
            end = computed + cache.clip(lease, computed, min(upto, len(tokens)) - computed)
            if isinstance(cache.extend(lease, computed, end, step), Refusal):
                raise ConfigError("there is no room for the state of one sequence; give more.")
            if computed == num_found:
                cache.begin(lease, num_prompt_tokens)
            cache.take_copies()
            cache.announce(lease, prompt, min(end, num_prompt_tokens), step)
            cache.commit_step(step)
            cache.commit(lease, tokens, end, step)
            computed = end
        cache.release(lease, Ending.FINISHED)
        self.num_hit_tokens += num_found
        self.num_prompt_tokens += num_prompt_tokens

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens


def state_rates(
    name: str, trace: Trace, pools: list[str], *, page_size: int, interval_tokens: int
) -> list[StateRates]:
    """Every pool, given as a number of states (512) or as a share of those that a cache without
    limits keeps (50%)."""
    paths = lay_out(trace, page_size)
    num_pages = 2 * sum(paths.sizes) + 1
    interval = max(1, interval_tokens // page_size)
    most = sum(visit.num_prompt_tokens for visit in paths.visits) // page_size + 2
    everything = _replayed(trace, StateReplay(num_pages, most, page_size, interval))
    num_all = everything.cache.stats().planes[1].num_cached
    rates = []
    for text in pools:
        num_states = parse_states(text, num_all)
        replay = _replayed(trace, StateReplay(num_pages, num_states, page_size, interval))
        rates.append(
            StateRates(
                name,
                num_states,
                num_all,
                replay.hit_rate,
                best_offline_states(paths, num_states - NUM_BUSY),
                endless_hit_rate(paths),
                replay.cache.stats().missed_tokens,
            )
        )
    return rates


def _replayed(trace: Trace, replay: StateReplay) -> StateReplay:
    for sequence in sequences(trace):
        key = PrefixKey(sequence.namespace())
        replay.serve(key, kept_tokens(sequence), sequence.line.num_prompt_tokens)
    return replay


def parse_states(text: str, num_all: int) -> int:
    try:
        count = float(text[:-1]) / 100 * num_all if text.endswith("%") else int(text)
    except ValueError:
        count = 0
    if not NUM_BUSY + 1 <= count < 2**40:
        raise ConfigError(
            f"--states: {text!r} is no room for states; write a number (512) or a share of those "
            f"that an endless cache keeps (50%), at least {NUM_BUSY + 1}."
        )
    return int(count)


def best_offline_states(paths: Paths, num_states: int) -> float:
    """Hit rate with room for so many states, every page, and knowledge of what will be asked for.

    Where a run of pages ends a state may be kept. The best to resume a visit from is at the end of
    the longest stretch that was visited before; that one is kept for it unless others are needed
    sooner. (Resuming from a shorter one where that is gone is not planned for, only used.)
    """
    uses = _next_uses(paths, _targets(paths))
    resident: dict[int, int] = {}
    """By run, the visit that will resume at its end."""
    queue: list[tuple[int, int]] = []
    num_hits = 0
    for visit, coming in zip(paths.visits, uses, strict=True):
        found = [run for run in visit.runs if run in resident]
        depth = max((_end(paths, run) for run in found), default=0)
        num_hits += min(depth, visit.num_reusable_pages)
        for run, use in zip(visit.runs, coming, strict=True):
            resident.pop(run, None)
            if use != NEVER:
                resident[run] = use
                heapq.heappush(queue, (-use, run))
        while len(resident) > max(0, num_states):
            use, run = heapq.heappop(queue)
            if resident.get(run) == -use:
                del resident[run]
    return num_hits * paths.page_size / paths.num_prompt_tokens


def _end(paths: Paths, run: int) -> int:
    return paths.depths[run] + paths.sizes[run]


def _targets(paths: Paths) -> list[int | None]:
    """By visit: the run at whose end it resumes if nothing is ever lost."""
    seen: set[int] = set()
    targets: list[int | None] = []
    for visit in paths.visits:
        targets.append(_target(paths, visit, seen))
        seen.update(visit.runs)
    return targets


def _target(paths: Paths, visit: Visit, seen: set[int]) -> int | None:
    known: int | None = None
    for run in visit.runs:
        if run not in seen:
            return known
        known = run
    return known


def _next_uses(paths: Paths, targets: list[int | None]) -> list[list[int]]:
    """For each run of each visit, the next visit that resumes at its end."""
    coming: dict[int, int] = {}
    uses: list[list[int]] = [[]] * len(targets)
    for number in range(len(targets) - 1, -1, -1):
        uses[number] = [coming.get(run, NEVER) for run in paths.visits[number].runs]
        target = targets[number]
        if target is not None:
            coming[target] = number
    return uses
