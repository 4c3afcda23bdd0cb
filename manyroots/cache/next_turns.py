"""Where talks go on: learned from where the next prompt parted from the last one.

Most talks go on at the end of the answer. Where the next prompt leaves something of the answer out
(its reasoning), or the same prompt is asked again, they go on at the end of the last prompt. A
family that reads only what is near (`Family.reach`) should keep pages where talks do go on, and
which it is differs from traffic to traffic. O(1) per request; no clock, no tokens.
"""

from __future__ import annotations

from manyroots.cache.tree import Node

LEAST_SHARE = 1 / 8
"""Of all talks that go on: how many must do so at a place for it to be worth pages."""
PRIOR = 8
"""Talks that are taken to have gone on at each, before any has."""
MEMORY = 1024
"""Talks after which what was seen before them counts half."""
NEAR = 1
"""Pages before a place at which a prompt may part and still have gone on there: what follows may
replace its last tokens."""


class NextTurns:
    """Which ends are worth pages: of answers, of prompts, or of both."""

    def __init__(self) -> None:
        self._num_answers = self._num_prompts = float(PRIOR)
        self.version = 0
        """Changes when the answer does."""
        self.keeps_answers = self.keeps_prompts = True

    def parted(self, node: Node, depth: int) -> None:
        """A request goes on behind the first `depth` pages of a path, which ends in `node`."""
        if not node.children and node.end == node.prompt_end:
            return  # it is both
        if not node.children and depth >= node.end - NEAR:
            self._num_answers += 1
        elif node.prompt_end and node.prompt_end - NEAR <= depth <= node.prompt_end:
            self._num_prompts += 1
        else:
            return
        total = self._num_answers + self._num_prompts
        if total > 2 * MEMORY:
            self._num_answers, self._num_prompts = self._num_answers / 2, self._num_prompts / 2
        keeps = self._num_answers >= total * LEAST_SHARE, self._num_prompts >= total * LEAST_SHARE
        if keeps != (self.keeps_answers, self.keeps_prompts):
            self.keeps_answers, self.keeps_prompts = keeps
            self.version += 1

    def places(self, node: Node, most: int) -> list[int]:
        """Boundaries in a node, or up to `most` pages behind it, that requests will go on from."""
        last, ends = node.end + most, []
        while True:
            if node.prompt_end and (self.keeps_prompts or node.prompt_end == node.end):
                ends.append(node.prompt_end)
            if node.is_fork or not node.children:
                if node.is_fork or self.keeps_answers:
                    ends.append(node.end)
                return ends
            if node.end >= last:
                return ends
            [node] = node.children.values()
