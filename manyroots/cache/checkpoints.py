"""Where a recurrent state is saved: at boundaries where reuse will happen (H12, C05)."""

from __future__ import annotations

from manyroots.cache.families.family import Family
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.lease import Lease


def next_stop(family: Family, lease: Lease, num_computed: int, page_size: int) -> int | None:
    """The first token count behind `num_computed` at which a prompt's step must end.

    Every `interval` pages, where others part from this prompt, and at its last whole page.
    """
    assert isinstance(family, RecurrentState)
    last = lease.num_prompt_tokens // page_size
    page = num_computed // page_size
    if page >= last:
        return None
    stops = [(page // family.interval + 1) * family.interval, last]
    if lease.junction > page:
        stops.append(lease.junction)
    return min(stops) * page_size


def is_due(family: Family, lease: Lease, num_tokens: int, page_size: int) -> bool:
    """Whether the state behind `num_tokens` tokens is worth saving."""
    assert isinstance(family, RecurrentState)
    if num_tokens == 0 or num_tokens % page_size:
        return False
    page = num_tokens // page_size
    last = lease.num_prompt_tokens // page_size
    if page > last:
        return True  # the output keeps its newest state, for the next turn (H05)
    return page in (last, lease.junction) or page % family.interval == 0
