"""Hit rates alone: a trace through the real prefix cache, one sequence after the other.

No scheduler, no clock, no overlap: what is compared is how well each way of evicting uses a pool,
beside the best that could be done with it (`offline.py`). All pools and policies see every
sequence, whose tokens are made once.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PrefixKey
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies, Eviction
from manyroots.errors import ConfigError
from manyroots.ids import StepId
from manyroots.simulate.offline import best_offline_hit_rate, endless_hit_rate
from manyroots.simulate.paths import kept_tokens, lay_out
from manyroots.simulate.trace import Trace
from manyroots.simulate.traffic import sequences
from manyroots.step import Int32s

UNITS = {"GB": 1e9, "TB": 1e12}


@dataclass(frozen=True, slots=True)
class HitRates:
    """One trace in one pool."""

    trace: str
    num_pages: int
    by_policy: dict[str, float]
    best_offline: float
    endless: float


class Replay:
    """One cache, and what it has found of a trace so far."""

    def __init__(self, eviction: Eviction, num_pages: int, page_size: int) -> None:
        layout = CacheLayout.of(page_size, (Capacity(FULL_ATTENTION, num_pages),))
        self.cache = PrefixCache(layout, CachePolicies(eviction=eviction))
        self.num_hit_tokens = self.num_prompt_tokens = 0
        self._step = 0

    def serve(self, key: PrefixKey, tokens: Int32s, num_prompt_tokens: int) -> int:
        """One sequence from its prompt to its end; gives what was found of the prompt."""
        self._step += 1
        step, cache = StepId(self._step), self.cache
        prompt = tokens[:num_prompt_tokens]
        lease = cache.claim(key, prompt, num_prompt_tokens, True)
        num_found = lease.num_cached_tokens
        if isinstance(cache.extend(lease, num_found, len(tokens), step), Refusal):
            raise ConfigError(
                f"a request of the trace has {len(tokens)} tokens with its output, more than a "
                f"pool of {cache.layout.device[0].num_units} pages of {cache.page_size}; "
                "give larger pools."
            )
        cache.begin(lease, num_prompt_tokens)
        cache.announce(lease, prompt, num_prompt_tokens, step)
        cache.commit_step(step)
        cache.commit(lease, tokens, len(tokens), step)
        cache.release(lease, Ending.FINISHED)
        self.num_hit_tokens += num_found
        self.num_prompt_tokens += num_prompt_tokens
        return num_found

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens


def hit_rates(
    name: str, trace: Trace, pools: list[str], *, page_size: int, bytes_per_token: float
) -> list[HitRates]:
    """Every pool with every policy."""
    paths = lay_out(trace, page_size)
    sizes = [
        parse_pool(text, sum(paths.sizes), page_bytes=page_size * bytes_per_token) for text in pools
    ]
    replays = {(n, e): Replay(e, n, page_size) for n in sizes for e in Eviction}
    for sequence in sequences(trace):
        key, tokens = PrefixKey(sequence.namespace()), kept_tokens(sequence)
        for replay in replays.values():
            replay.serve(key, tokens, sequence.line.num_prompt_tokens)
    endless = endless_hit_rate(paths)
    return [
        HitRates(
            name,
            num_pages,
            {e.value: replays[num_pages, e].hit_rate for e in Eviction},
            best_offline_hit_rate(paths, num_pages),
            endless,
        )
        for num_pages in sizes
    ]


def parse_pool(text: str, num_trace_pages: int, *, page_bytes: float) -> int:
    """A pool's pages: `2000`; `100GB` of keys and values; or `5%` of what the trace fills."""
    try:
        if text.endswith("%"):
            num_pages = float(text[:-1]) / 100 * num_trace_pages
        elif text[-2:].upper() in UNITS:
            num_pages = float(text[:-2]) * UNITS[text[-2:].upper()] / page_bytes
        else:
            num_pages = int(text)
    except ValueError:
        num_pages = 0
    if not 1 <= num_pages < 2**40:
        raise ConfigError(
            f"--hit-rates: {text!r} is no pool; write pages (2000), bytes (100GB) or a share of "
            "what the trace fills (5%), at least a page."
        )
    return int(num_pages)
