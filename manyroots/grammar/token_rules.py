"""Which tokens a caller allows, forbids or forces one by one, whatever they spell.

Takes the ids that may come (`allowed_token_ids`), the sequences that may not (`bad_words`, in
tokens) and how long reasoning may be; takes everything else out of a mask. Has no state: what may
come next follows from the output so far, so that a sequence that was retracted goes on as if
nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from manyroots.sampling import ThinkingBudget

Words = npt.NDArray[np.uint32]


class TokenRules:
    """One request's."""

    __slots__ = ("_always", "_budget", "_ends")

    def __init__(
        self,
        vocab_size: int,
        allowed: Sequence[int] | None,
        forbidden: Sequence[Sequence[int]],
        budget: ThinkingBudget | None = None,
    ) -> None:
        """`allowed`: None for all. `forbidden`: sequences of at least one token."""
        alone = [tokens[0] for tokens in forbidden if len(tokens) == 1]
        self._budget = budget
        self._always = _packed(vocab_size, allowed, alone)
        """What no earlier token changes."""
        self._ends: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """Of longer sequences, by the last token but one: what must stand before the last one for
        it to be forbidden, and the last one."""
        for tokens in forbidden:
            if len(tokens) > 1:
                entry = (tuple(tokens[:-1]), tokens[-1])
                self._ends.setdefault(tokens[-2], []).append(entry)

    def narrow(self, mask: Words, output: npt.NDArray[np.int32]) -> None:
        """Take out of a mask what may not follow this output."""
        mask &= self._always
        if self._budget is not None and _is_spent(self._budget, output):
            word, bit = divmod(self._budget.end, 32)
            is_allowed = mask[word] >> np.uint32(bit) & np.uint32(1)
            mask[:] = 0
            mask[word] = is_allowed << np.uint32(bit)
            return
        if not self._ends or not len(output):
            return
        for before, token in self._ends.get(int(output[-1]), ()):
            if tuple(output[-len(before) :].tolist()) == before:
                take_out(mask, [token])


def _is_spent(budget: ThinkingBudget, output: npt.NDArray[np.int32]) -> bool:
    """Whether this output is inside reasoning that has had all of its tokens."""
    begins = np.flatnonzero(output == budget.begin)
    ends = np.flatnonzero(output == budget.end)
    last_end = int(ends[-1]) if len(ends) else -1
    if len(begins) and begins[-1] > last_end:
        first = int(begins[begins > last_end][0]) + 1
    elif budget.is_begun and not len(ends):
        first = 0
    else:
        return False
    return len(output) - first >= budget.num_tokens


def take_out(mask: Words, tokens: Sequence[int]) -> None:
    for token in tokens:
        mask[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


def _packed(vocab_size: int, allowed: Sequence[int] | None, forbidden: Sequence[int]) -> Words:
    # As wide as a mask, whose last word may be longer than the vocabulary: nothing lies there.
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    if allowed is None:
        bits[:vocab_size] = True
    else:
        bits[list(allowed)] = True
    bits[list(forbidden)] = False
    return np.packbits(bits, bitorder="little").view(np.uint32)
