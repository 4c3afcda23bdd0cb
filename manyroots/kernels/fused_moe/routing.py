"""Which experts each token goes to, and the tokens of each expert.

A *pair* is one token with one of its experts: pair p is token p // top_k.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

MAX_FEW_TOKENS = 128
"""Most tokens whose pairs are computed pair by pair; those of more, in tiles."""


LEAST_SUM = 1e-20
"""Added to a sum of weights before they are divided by it: sigmoids may all be zero."""


class Scoring(enum.Enum):
    """How a router's scores become the weights of a token's experts."""

    SOFTMAX = "softmax"
    """Probabilities over all experts, of which the best keep theirs."""
    SOFTMAX_RENORMALISED = "softmax_renormalised"
    """The same, divided by their sum."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """The best are chosen first, then their scores are made into probabilities (gpt-oss)."""
    SIGMOID = "sigmoid"
    """Each expert's own sigmoid. The router's bias counts in the choice and not in the weights."""
    SIGMOID_RENORMALISED = "sigmoid_renormalised"
    """The same, divided by their sum (GLM-4.5)."""

    @property
    def is_renormalised(self) -> bool:
        return self in (Scoring.SOFTMAX_RENORMALISED, Scoring.SIGMOID_RENORMALISED)

    @property
    def is_sigmoid(self) -> bool:
        return self in (Scoring.SIGMOID, Scoring.SIGMOID_RENORMALISED)


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in groups of equal size, of which a token chooses some before it chooses experts
    within them (DeepSeek)."""

    count: int
    chosen: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pieces of the experts' lists of pairs, as the products of many tokens take them."""

    rows: int
    """Most pairs of a tile."""
    places: Tensor
    """int32 [most tiles, 3]: an expert, and where the tile begins and ends in `pairs`."""
    count: Tensor
    """int32 [1], on the device: how many there are."""


@dataclass(frozen=True, slots=True)
class Routing:
    """One layer's routing of one step, on the device."""

    weights: Tensor
    """float32 [num_tokens, top_k]: how much each pair's output counts."""
    pairs: Tensor
    """int32: each expert's pairs, in the order of tokens; there may be gaps between experts."""
    groups: Tensor
    """int32 [num_experts, 3]: an expert, and where its pairs begin and end in `pairs`. Experts
    that have any come first; the others may be left out."""
    experts: Tensor
    """int32 [num_tokens, top_k]: the expert of each pair."""
    tiles: Tiles | None = None
    """Of many tokens alone, whose pairs lie without gaps."""
