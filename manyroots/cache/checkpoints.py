"""Where a recurrent state is saved: at boundaries where reuse will happen (H12, C05).

A prompt's state is saved every `interval` pages, where other prompts diverge from it (those in the
index, and those that wait for it), and where its request marked it (`retention.py`). It is also
saved at the last boundary that can be resumed from: one token always remains to be computed. It is
not saved if that would save too little beyond what was found or saved before (`least_saved`),
because a state may take as much memory as thousands of tokens. Marks are always followed. After the
prompt the two newest states are kept, in two alternating units. The older one serves an answer that
was cut within its last page, because a stop string is found late.
"""

from __future__ import annotations

from collections.abc import Iterable

from manyroots.cache.families.family import Family
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.lease import Lease


def next_stop(family: Family, lease: Lease, num_computed: int, page_size: int) -> int | None:
    """The first token count after `num_computed` at which a prompt's step must end."""
    assert isinstance(family, RecurrentState)
    page = num_computed // page_size
    last = _last(lease, page_size)
    if page >= last:
        return None
    stops = [(page // family.interval + 1) * family.interval, last, lease.junction, lease.shared]
    wanted = [stop for stop in stops if page < stop <= last and _saves(family, lease, stop)]
    wanted += [stop for stop in _marked(lease, page_size) if page < stop <= last]
    return min(wanted) * page_size if wanted else None


def least_saved(families: Iterable[Family]) -> int:
    """The fewest pages that a checkpoint must save; 0 if no family has a state."""
    return max((f.least_saved for f in families if isinstance(f, RecurrentState)), default=0)


def is_due(family: Family, lease: Lease, num_tokens: int, page_size: int) -> bool:
    """Whether the state after `num_tokens` tokens is worth saving."""
    assert isinstance(family, RecurrentState)
    if num_tokens == 0 or num_tokens % page_size:
        return False
    page, last = num_tokens // page_size, _last(lease, page_size)
    if lease.num_saved_pages < page <= last and page in _marked(lease, page_size):
        return True
    if not _saves(family, lease, page):
        return False
    if num_tokens > lease.num_prompt_tokens:
        return True  # the output keeps its newest state, for the next turn (H05)
    is_interval = page % family.interval == 0 and page <= last
    return is_interval or page in (last, lease.junction, lease.shared)


def _last(lease: Lease, page_size: int) -> int:
    return (lease.num_prompt_tokens - 1) // page_size


def _marked(lease: Lease, page_size: int) -> list[int]:
    """Boundaries at which the request asked to keep a prefix."""
    if lease.retention is None:
        return []
    return [each.until_token // page_size for each in lease.retention.ranges]


def _saves(family: RecurrentState, lease: Lease, page: int) -> bool:
    return page - lease.num_saved_pages >= family.least_saved
