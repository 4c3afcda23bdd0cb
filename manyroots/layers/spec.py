"""What a layer is, in plain frozen numbers: how it mixes tokens, what it remembers, what follows.

Made by `models` from a config; read by the layers, by whoever counts memory and by whoever keeps
it. Holds no tensor. Mixers whose `memory` is equal are one family: their pages, or states, are
given out and taken back together.

A mixer's spec says what a rank has of it (`cut`), what its weights are (`num_weights`) and in which
folder of the checkpoint they lie (`name`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    """Torch's name of it; None is the model's own."""


@dataclass(frozen=True, slots=True)
class StateMemory:
    """One state that stands for all tokens so far."""

    parts: tuple[StatePart, ...]

    @property
    def is_by_token(self) -> bool:
        return False


Memory = KV | StateMemory

Divide = Callable[[str, int], int]
"""What a rank has of a number of things, which are named; raises where ranks can't share them."""


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
    name: str = "self_attn"
    o_name: str = "o_proj"
    """What the checkpoint calls the product behind attention."""

    def cut(self, divide: Divide) -> AttentionSpec:
        kv_heads = divide("number of key-value heads", self.memory.kv_heads)
        queries_per_kv = self.num_heads // self.memory.kv_heads
        return replace(
            self,
            num_heads=queries_per_kv * kv_heads,
            memory=replace(self.memory, kv_heads=kv_heads),
        )

    def num_weights(self, hidden_size: int) -> int:
        dim = self.memory.head_dim
        q, kv = self.num_heads * dim, self.memory.kv_heads * dim
        weights = (q + 2 * kv) * hidden_size + q * hidden_size
        biases = (q + 2 * kv) * self.qkv_bias + hidden_size * self.o_bias
        return weights + biases + 2 * dim * self.qk_norm + self.num_heads * self.has_sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A layer that mixes each token with the few before it: a gated causal convolution."""

    channels: int
    width: int
    """Tokens that one sees, itself included."""
    bias: bool
    """Of the products and of the convolution."""
    name: str = "conv"

    @property
    def memory(self) -> StateMemory:
        return StateMemory((StatePart("conv", (self.channels, self.width - 1), None),))

    def cut(self, divide: Divide) -> ShortConvSpec:
        return replace(self, channels=divide("number of channels", self.channels))

    def num_weights(self, hidden_size: int) -> int:
        weights = 4 * hidden_size * self.channels + self.channels * self.width
        return weights + self.bias * (4 * self.channels + hidden_size)


MixerSpec = AttentionSpec | ShortConvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A gated feed-forward block."""

    intermediate_size: int
    activation: Activation
    bias: bool
    name: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """What the checkpoint calls it and its products."""


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
    name: str = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: its mixers, then its feed-forward block, each added onto the residual stream."""

    mixers: tuple[MixerSpec, ...]
    """Side by side on one input, where there are several; what they give is added up."""
    feed_forward: DenseSpec | ExpertsSpec
    has_post_norms: bool = False
    """Whether what either gives is normalised before it is added."""

    @property
    def attention(self) -> AttentionSpec | None:
        """The one of its mixers that attends, if any does."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec)), None)
