"""What a layer is, in plain frozen numbers: how it mixes tokens, what it remembers, what follows.

Made by `models` from a config; read by the layers, by whoever counts memory and by whoever keeps
it. Holds no tensor. Layers whose `memory` is equal are one family: their pages are given out and
taken back together.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.moe_pairs.routing import Scoring


@dataclass(frozen=True, slots=True)
class KV:
    """Keys and values of the tokens that a query may see."""

    kv_heads: int
    head_dim: int
    window: int | None
    """How many tokens a query sees at most, itself included; None: all before it."""

    @property
    def is_by_token(self) -> bool:
        """Whether each token has a place of its own here: then a prompt's tokens may be computed
        as rows side by side."""
        return True

    def token_bytes(self, itemsize: int) -> int:
        """What one layer keeps of one token."""
        return 2 * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """A layer that mixes tokens by attention."""

    num_heads: int
    memory: KV
    rope: int
    """Which of the model's `ropes` turns its queries and keys."""
    scale: float
    """Scores are multiplied with it."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised, head by head, before they are turned."""
    has_sinks: bool = False
    """Whether each head has a score that takes weight and gives nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A gated feed-forward block."""

    intermediate_size: int
    activation: Activation
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """How many experts a block has, how large they are, and how a token chooses among them."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of each expert."""
    activation: Activation
    scoring: Scoring
    bias: bool = False
    """Of the router, and of each expert's products."""
    router: str = "gate"
    """What the checkpoint calls it."""
    is_interleaved: bool = False
    """Whether the checkpoint has gates and ups by turns, as adapters that PEFT made for it then do
    (see `Target`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: its mixer, then its feed-forward block, each added onto the residual stream."""

    mixer: AttentionSpec
    feed_forward: DenseSpec | ExpertsSpec
    has_post_norms: bool = False
    """Whether what either gives is normalised before it is added."""

    @property
    def memory(self) -> KV:
        """What it keeps of earlier tokens."""
        return self.mixer.memory
