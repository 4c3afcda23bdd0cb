"""How much of a trace a cache without limits could reuse: the bound to hold a hit rate against.

Every prompt and reply that arrived earlier counts as cached, in its own namespace, down to the
last full page; of a prompt at least one token is always computed. A run can fall short for lack
of pages, or because what it could have reused was not computed yet.
"""

from __future__ import annotations

from manyroots.simulate.prefixes import SeenPrefixes
from manyroots.simulate.trace import Trace
from manyroots.simulate.traffic import Sequence, sequences


def best_hit_rate(trace: Trace, page_size: int) -> float:
    """Reusable prompt tokens over all prompt tokens."""
    seen = SeenPrefixes(page_size)
    num_hits = num_tokens = 0
    for sequence in sequences(trace):
        prompt = sequence.line.prompt_tokens().tolist()
        num_hits += seen.match(sequence.namespace(), prompt)
        num_tokens += len(prompt)
        seen.add(sequence.namespace(), prompt + _kept_reply(sequence))
    return num_hits / num_tokens


def _kept_reply(sequence: Sequence) -> list[int]:
    """The last token of a reply is sampled, never computed."""
    return sequence.reply_tokens()[:-1]
