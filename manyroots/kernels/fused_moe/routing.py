"""The experts of each token, and the tokens of each expert.

A *pair* is one token with one of its experts: pair p is token p // top_k.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_FEW_TOKENS = 128
"""Up to this many tokens, pairs are computed one by one; more are computed in tiles."""


LEAST_SUM = 1e-20
"""Added to a sum of weights before dividing by it: all sigmoids may be zero."""


class Scoring(enum.Enum):
    """How a router's scores become the weights of a token's experts."""

    SOFTMAX = "softmax"
    """Probabilities over all experts; the chosen experts keep theirs."""
    SOFTMAX_RENORMALISED = "softmax_renormalised"
    """The same, divided by their sum."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """Experts are chosen first; then their scores become probabilities (gpt-oss)."""
    SIGMOID = "sigmoid"
    """Each expert's own sigmoid. The router's bias affects the choice but not the weights."""
    SIGMOID_RENORMALISED = "sigmoid_renormalised"
    """The same, divided by their sum (GLM-4.5)."""
    SQRT_SOFTPLUS_RENORMALISED = "sqrt_softplus_renormalised"
    """As that with the root of each expert's softplus (DeepSeek V4)."""

    @property
    def is_renormalised(self) -> bool:
        return self in (
            Scoring.SOFTMAX_RENORMALISED,
            Scoring.SIGMOID_RENORMALISED,
            Scoring.SQRT_SOFTPLUS_RENORMALISED,
        )

    @property
    def is_by_expert(self) -> bool:
        """Whether an expert's weight depends on no other's score, before they are divided by their
        sum."""
        return self in (
            Scoring.SIGMOID,
            Scoring.SIGMOID_RENORMALISED,
            Scoring.SQRT_SOFTPLUS_RENORMALISED,
        )


def weights_by_expert(scores: Tensor, scoring: Scoring) -> Tensor:
    """Each expert's own weight, of its score."""
    if scoring is Scoring.SQRT_SOFTPLUS_RENORMALISED:
        return F.softplus(scores).sqrt()
    return torch.sigmoid(scores)


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in groups of equal size. A token chooses groups first, then experts within them
    (DeepSeek)."""

    count: int
    chosen: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pieces of the experts' lists of pairs, for the products of many tokens."""

    rows: int
    """Most pairs of a tile."""
    places: Tensor
    """int32 [most tiles, 3]: an expert, and the start and end of the tile in `pairs`."""
    count: Tensor
    """int32 [1], on the device: the number of tiles."""


@dataclass(frozen=True, slots=True)
class Routing:
    """One layer's routing of one step, on the device."""

    weights: Tensor
    """float32 [num_tokens, top_k]: the weight of each pair's output."""
    pairs: Tensor
    """int32: each expert's pairs, in the order of tokens; there may be gaps between experts."""
    groups: Tensor
    """int32 [num_experts, 3]: an expert, and the start and end of its pairs in `pairs`. Experts
    with pairs come first; the others may be missing."""
    experts: Tensor
    """int32 [num_tokens, top_k]: the expert of each pair."""
    tiles: Tiles | None = None
    """Only with many tokens, whose pairs have no gaps."""
