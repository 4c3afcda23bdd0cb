"""Where a recurrent state is saved: at boundaries where reuse will happen (H12, C05).

Of a prompt every `interval` pages, where others part from it (those known to the index, and those
that wait for it), where its request marked it (`retention.py`), and at its last boundary that can
be resumed from at all: a token is always left to compute. Not where too little would be saved
beside what was found or saved before (`least_saved`): a state may take as much memory as thousands
of tokens. A mark is taken at its word. After the prompt the two newest states are kept, in two
units that take turns. The older one
is for an answer that was cut within its last page: a stop string is found late.
"""

from __future__ import annotations

from collections.abc import Iterable

from manyroots.cache.families.family import Family
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.lease import Lease


def next_stop(family: Family, lease: Lease, num_computed: int, page_size: int) -> int | None:
    """The first token count behind `num_computed` at which a prompt's step must end."""
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
    """Pages that a checkpoint must save at least; 0 where no family has a state."""
    return max((f.least_saved for f in families if isinstance(f, RecurrentState)), default=0)


def is_due(family: Family, lease: Lease, num_tokens: int, page_size: int) -> bool:
    """Whether the state behind `num_tokens` tokens is worth saving."""
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
    """Boundaries at which the request asked for a prefix to be kept."""
    if lease.retention is None:
        return []
    return [each.until_token // page_size for each in lease.retention.ranges]


def _saves(family: RecurrentState, lease: Lease, page: int) -> bool:
    return page - lease.num_saved_pages >= family.least_saved
