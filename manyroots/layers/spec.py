"""What a layer is, in plain frozen numbers: how it mixes tokens, what it remembers, what follows.

Made by `models` from a config; read by the layers, by the code that counts memory and by the code
that keeps it. Holds no tensor. Mixers whose `memory` is equal are one family: their pages, or
states, are given out and taken back together.

A mixer's spec says what a rank has of it (`cut`), what its weights are (`num_weights`) and in which
folder of the checkpoint they lie (`name`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.fused_moe.routing import ExpertGroups, Scoring
from manyroots.layers.memories import KV, Latent, StateMemory, StatePart

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
    """Whether queries and keys are normalised, head by head, before they are rotated."""
    norm_spans_heads: bool = False
    """Whether that norm goes over all heads together, those of other ranks included."""
    is_fused: bool = False
    """Whether the checkpoint has queries, keys and values as one product, `qkv_proj`."""
    cap: float = 0.0
    """Scores s become cap * tanh(s / cap); 0: they stay."""
    has_sinks: bool = False
    """Whether each head has a score that takes weight and gives nothing."""
    has_gate: bool = False
    """Whether what each head gives is multiplied with the sigmoid of a gate, which the product of
    the queries has after each head's query."""
    in_factor: float = 1.0
    out_factor: float = 1.0
    """What its input, and what it gives, is multiplied with."""
    name: str = "self_attn"
    o_name: str = "o_proj"
    """What the checkpoint calls the product after attention."""

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
        rows = (1 + self.has_gate) * q + 2 * kv
        weights = rows * hidden_size + q * hidden_size
        biases = rows * self.qkv_bias + hidden_size * self.o_bias
        norms = (q + kv if self.norm_spans_heads else 2 * dim) * self.qk_norm
        return weights + biases + norms + self.num_heads * self.has_sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """A layer that mixes tokens by latent attention (MLA): keys and values of all heads are
    products of one latent."""

    num_heads: int
    nope: int
    """Numbers of a query and a key that are not rotated; the others are the memory's `rope`."""
    value_dim: int
    memory: Latent
    q_rank: int | None
    """The size of the queries' own latent; None: queries are one product."""
    rope: int
    """Which of the model's `ropes` turns its queries and keys."""
    is_interleaved: bool
    """Whether the two numbers of a pair that is rotated are neighbours."""
    scale: float
    """Scores are multiplied with it."""
    bias: bool
    """Of the first products and the last."""
    norm_eps: float
    """Of the latents' norms."""
    name: str = "self_attn"

    def cut(self, divide: Divide) -> LatentSpec:
        return replace(self, num_heads=divide("number of attention heads", self.num_heads))

    def num_weights(self, hidden_size: int) -> int:
        latent, rope = self.memory.latent, self.memory.rope
        heads, first = self.num_heads, self.q_rank or 0
        width = latent + rope + first
        weights = width * hidden_size + (first or hidden_size) * heads * (self.nope + rope)
        weights += latent * heads * (self.nope + self.value_dim)
        weights += heads * self.value_dim * hidden_size
        return weights + (width + hidden_size) * self.bias + latent + first

    def prefers_latents(self, num_queries: int, num_keys: int, num_seen: int) -> bool:
        """Whether prompts cost less if their queries attend to latents, as decoding does, than if
        keys and values are expanded. Counted in multiplications of one head: a pair of query and
        key is wider as a latent, and to expand a key is as much as to absorb it into a query.
        `num_seen`: pairs."""
        latent, rope = self.memory.latent, self.memory.rope
        absorb = latent * (self.nope + self.value_dim)
        as_latents = num_seen * (2 * latent + rope) + num_queries * absorb
        expanded = num_seen * (self.nope + rope + self.value_dim) + num_keys * absorb
        return as_latents <= expanded


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A layer that mixes tokens by the gated delta rule, after a short convolution."""

    key_heads: int
    num_heads: int
    """Of values; a multiple of the key heads."""
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution sees, the newest included."""
    is_fused: bool
    """Whether the checkpoint has its input's projections as two, head by head (Qwen3-Next), or as
    four (Qwen3.5)."""
    name: str = "linear_attn"

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def memory(self) -> StateMemory:
        matrix = (self.num_heads, self.key_dim, self.value_dim)
        return StateMemory(
            (
                StatePart("conv", (self.channels, self.width - 1), None),
                StatePart("matrix", matrix, "float32"),
            )
        )

    def cut(self, divide: Divide) -> DeltaSpec:
        key_heads = divide("number of key heads", self.key_heads)
        return replace(
            self, key_heads=key_heads, num_heads=self.num_heads // self.key_heads * key_heads
        )

    def num_weights(self, hidden_size: int) -> int:
        value = self.num_heads * self.value_dim
        projections = (self.channels + value + 2 * self.num_heads + value) * hidden_size
        return projections + self.channels * self.width + 2 * self.num_heads + self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelDeltaSpec:
    """A layer that mixes tokens by the delta rule with a decay for each channel (Kimi Linear)."""

    num_heads: int
    head_dim: int
    """Of keys and values, and of the two gates' first products."""
    width: int
    """Tokens that the convolutions see, the newest included."""
    name: str = "self_attn"

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def memory(self) -> StateMemory:
        matrix = (self.num_heads, self.head_dim, self.head_dim)
        return StateMemory(
            (
                StatePart("conv", (3 * self.inner, self.width - 1), None),
                StatePart("matrix", matrix, "float32"),
            )
        )

    def cut(self, divide: Divide) -> ChannelDeltaSpec:
        return replace(self, num_heads=divide("number of linear heads", self.num_heads))

    def num_weights(self, hidden_size: int) -> int:
        inner, dim = self.inner, self.head_dim
        products = (4 * inner + self.num_heads + 2 * dim) * hidden_size + 2 * inner * dim
        return products + 3 * inner * self.width + inner + self.num_heads + dim


class GatedNormKind(enum.Enum):
    """What stands between Mamba's scan and its last product."""

    GATE_ONLY = "gate_only"
    GATE_FIRST = "gate_first"
    """A norm of what the gate leaves."""
    NORM_FIRST = "norm_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """A layer that mixes tokens by the scan of Mamba-2, after a short convolution."""

    num_heads: int
    head_dim: int
    groups: int
    """Of heads that share what they write to and read from a state."""
    state_dim: int
    width: int
    """Tokens that the convolution sees, the newest included."""
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm: GatedNormKind
    norm_groups: int = 1
    """How many norms there are, side by side."""
    in_factor: float = 1.0
    out_factor: float = 1.0
    """What its input, and what it gives, is multiplied with."""
    part_factors: tuple[float, ...] = (1.0,) * 5
    """What the parts of the first product are: gate, values, what is written, read, and steps."""
    shares_group: bool
    """Whether there is one group, which all ranks have."""
    least_step: float = 0.0
    """What the steps of the scan are at least."""
    spans_ranks: bool = False
    """Whether the one norm there is goes over all ranks' channels."""
    name: str = "mamba"

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: values, what is written and what is read."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def memory(self) -> StateMemory:
        matrix = (self.num_heads, self.head_dim, self.state_dim)
        return StateMemory(
            (
                StatePart("conv", (self.channels, self.width - 1), None),
                StatePart("matrix", matrix, "float32"),
            )
        )

    def cut(self, divide: Divide) -> MambaSpec:
        has_norm = self.norm is not GatedNormKind.GATE_ONLY
        spans = self.norm_groups == 1 and has_norm
        norms = divide("number of norms", self.norm_groups) if has_norm and not spans else 1
        return replace(
            self,
            num_heads=divide("number of Mamba heads", self.num_heads),
            groups=1 if self.shares_group else divide("number of Mamba groups", self.groups),
            norm_groups=norms,
            spans_ranks=spans,
        )

    def num_weights(self, hidden_size: int) -> int:
        rows = self.inner + self.channels + self.num_heads
        weights = (rows + self.inner) * hidden_size + self.channels * self.width
        biases = rows * self.in_bias + hidden_size * self.out_bias + self.channels * self.conv_bias
        norm = 0 if self.norm is GatedNormKind.GATE_ONLY else self.inner
        return weights + biases + norm + 3 * self.num_heads


MixerSpec = AttentionSpec | LatentSpec | ShortConvSpec | DeltaSpec | ChannelDeltaSpec | MambaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A gated feed-forward block."""

    intermediate_size: int
    activation: Activation
    bias: bool
    name: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """What the checkpoint calls it and its products."""
    is_fused: bool = False
    """Whether the checkpoint has gate and up as one product, which the first of `parts` names."""
    is_gated: bool = True
    """Whether there is a gate. Without one the activation is that of up, times up: relu(up) * up is
    the square of relu."""
    gate_factor: float = 1.0
    down_factor: float = 1.0
    """What its gate, and what it gives, is multiplied with."""


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
    has_correction: bool = False
    """Whether each expert has a number that counts in the choice alone."""
    factor: float = 1.0
    """What the weights of the chosen ones are multiplied with."""
    groups: ExpertGroups | None = None
    """Where a token chooses groups of experts first."""
    is_interleaved: bool = False
    """Whether the checkpoint has gates and ups by turns, as adapters that PEFT made for it then do
    (see `Target`)."""
    name: str = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """Experts, and a dense block beside them that every token goes through."""

    experts: ExpertsSpec
    shared: DenseSpec
    gate: str | None
    """What the checkpoint calls the product whose sigmoid multiplies what the shared block gives,
    from the layer on; None: there is none."""
    name: str = ""
    """Experts and shared block have their names from the layer on."""


BlockSpec = DenseSpec | ExpertsSpec | SharedSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: its mixers, then its feed-forward block, each added onto the residual stream."""

    mixers: tuple[MixerSpec, ...]
    """Side by side on one input, where there are several; what they give is added up. None: the
    layer is its feed-forward block alone."""
    feed_forward: BlockSpec | None
    """None: the layer is its mixers alone."""
    has_pre_norms: bool = True
    """Whether what either reads is normalised."""
    has_post_norms: bool = False
    """Whether what either gives is normalised before it is added."""
    factor: float = 1.0
    """What both are multiplied with before they are added."""

    @property
    def num_norms(self) -> int:
        """Of the residual stream's width."""
        halves = bool(self.mixers) + (self.feed_forward is not None)
        return halves * (self.has_pre_norms + self.has_post_norms)

    @property
    def experts(self) -> ExpertsSpec | None:
        """Those of its feed-forward block, if it has any."""
        block = self.feed_forward
        block = block.experts if isinstance(block, SharedSpec) else block
        return block if isinstance(block, ExpertsSpec) else None

    @property
    def attention(self) -> AttentionSpec | None:
        """The one of its mixers that attends, if any does."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec)), None)
