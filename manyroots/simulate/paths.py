"""A whole trace as paths through one tree of runs: what each request reads, without its tokens.

A run is a stretch of pages that every request reads as a whole or not at all, so that what is true
of one of its pages is true of all: a long trace is a few runs per request, however small a page.
Tokens are compared exactly, and namespaces kept apart, by the cache's own tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from manyroots.cache.keys import PrefixKey
from manyroots.cache.tree import Node, PrefixTree
from manyroots.ids import StepId
from manyroots.simulate.trace import Trace
from manyroots.simulate.traffic import TraceSequence, sequences
from manyroots.step import Int32s


@dataclass(frozen=True, slots=True)
class Visit:
    """One sequence: the runs it reads and writes, from the root on."""

    runs: tuple[int, ...]
    num_reusable_pages: int
    """How far it can resume at all: of a prompt at least one token is always computed."""
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Paths:
    """All visits by arrival, and how many pages each run has."""

    page_size: int
    sizes: list[int]
    depths: list[int]
    """Of each run, the pages before it."""
    visits: list[Visit]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(visit.num_prompt_tokens for visit in self.visits)


def kept_tokens(sequence: TraceSequence) -> Int32s:
    """What a sequence leaves in pages: the last token of its reply is sampled, never computed."""
    reply = np.array(sequence.reply_tokens()[:-1], np.int32)
    return np.concatenate([sequence.line.prompt_tokens(), reply])


def lay_out(trace: Trace, page_size: int) -> Paths:
    """Everything that a trace reads, one sequence after the other."""
    return lay_out_served(
        (
            (
                PrefixKey(sequence.namespace()),
                kept_tokens(sequence),
                sequence.line.num_prompt_tokens,
            )
            for sequence in sequences(trace)
        ),
        page_size,
    )


def lay_out_served(served: Iterable[tuple[PrefixKey, Int32s, int]], page_size: int) -> Paths:
    """The same of sequences as they were served: whose, what each left in pages, and how much of
    that was its prompt."""
    tree = PrefixTree(page_size, 1)
    ends: list[tuple[Node, int]] = []
    for key, tokens, num_prompt_tokens in served:
        num_pages = len(tokens) // page_size
        keys = tokens[: num_pages * page_size].tobytes()
        nodes = tree.insert(tree.root, key, keys, 0, num_pages, StepId(0), lengthen=False)
        end = nodes[-1] if nodes else tree.root
        if end.end > num_pages:
            end = tree.split(end, num_pages)
        # Where a node is cut in two later, its lower part keeps the object: this stays the end.
        ends.append((end, num_prompt_tokens))
    nodes = list(tree.nodes())
    numbers = {id(node): number for number, node in enumerate(nodes)}
    visits = []
    for end, num_tokens in ends:
        runs: list[int] = []
        node = end
        while node.parent is not None:
            runs.append(numbers[id(node)])
            node = node.parent
        visits.append(Visit(tuple(reversed(runs)), (num_tokens - 1) // page_size, num_tokens))
    return Paths(page_size, [n.num_pages for n in nodes], [n.first for n in nodes], visits)
