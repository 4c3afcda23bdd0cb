"""Learns where conversations continue, from where each prompt diverged from the previous one.

Most conversations continue at the end of the answer. If the next prompt omits part of the answer
(its reasoning), or repeats the same prompt, they continue at the end of the last prompt. A family
with a window (`Family.reach`) should keep pages where conversations do continue, which depends on
the traffic. O(1) per request; no clock, no tokens.
"""

from __future__ import annotations

from manyroots.cache.tree import Node

LEAST_SHARE = 1 / 8
"""The share of continued conversations that must continue at a point for it to be worth pages."""
PRIOR = 8
"""Conversations that count as continued at each point before any was seen."""
MEMORY = 1024
"""Conversations after which earlier observations count half."""
NEAR = 1
"""Pages before a point at which a prompt may diverge and still count as continued there: the next
prompt may replace its last tokens."""


class NextTurns:
    """Which ends are worth pages: of answers, of prompts, or of both."""

    def __init__(self) -> None:
        self._num_answers = self._num_prompts = float(PRIOR)
        self.version = 0
        """Changes when the result does."""
        self.keeps_answers = self.keeps_prompts = True

    def parted(self, node: Node, depth: int) -> None:
        """A request continues after the first `depth` pages of a path, which ends in `node`."""
        if not node.children and node.end == node.prompt_end:
            return  # it is both ends
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
        """Boundaries in a node, or up to `most` pages after it, from which requests will
        continue."""
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
