"""Describes a layer in plain frozen numbers: its mixers, their memory, and the block after them.

Made by `models` from a config; read by the layers and by code that counts or keeps memory. Holds no
tensor. Mixers with equal `memory` are one family: their pages or states are allocated and freed
together.

A mixer's spec gives a rank's part of it (`cut`), its number of weights (`num_weights`) and its
folder in the checkpoint (`name`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.fused_moe.routing import ExpertGroups, Scoring
from manyroots.layers.memories import KV, Latent, Memory, StateMemory, StatePart, TokenRows

Divide = Callable[[str, int], int]
"""A rank's share of a number of named things; raises if ranks cannot divide them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """A layer that mixes tokens by attention."""

    num_heads: int
    memory: KV
    rope: int
    """Index of its rotation in the model's `ropes`."""
    scale: float
    """Factor of scores."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised per head before they are rotated."""
    norm_spans_heads: bool = False
    """Whether that norm spans all heads, including those of other ranks."""
    is_fused: bool = False
    """Whether the checkpoint has queries, keys and values as one product, `qkv_proj`."""
    cap: float = 0.0
    """Scores s become cap * tanh(s / cap); 0: no cap."""
    has_sinks: bool = False
    """Whether each head has a score that takes weight and adds no value."""
    has_gate: bool = False
    """Whether each head's output is multiplied with the sigmoid of a gate. The product of the
    queries has this gate after each head's query."""
    in_factor: float = 1.0
    out_factor: float = 1.0
    """Factors of its input and of its output."""
    name: str = "self_attn"
    o_name: str = "o_proj"
    """The checkpoint's name of the product after attention."""

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
class TokenIndexSpec:
    """How queries of latent attention choose the tokens that they see (DeepSeek V3.2)."""

    num_heads: int
    head_dim: int
    num_chosen: int
    """Tokens that a query sees at most."""
    is_interleaved: bool
    """Whether the two numbers of a rotated pair are adjacent. Pairs begin with a head's first
    number."""
    norm_eps: float
    """Epsilon of the norm of keys."""
    is_own: bool = True
    """Whether the layer has an index; without one, its queries see what they chose in the nearest
    layer before it that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """A layer that mixes tokens by latent attention (MLA): keys and values of all heads are
    products of one latent."""

    num_heads: int
    nope: int
    """Unrotated numbers of a query and a key; the memory's `rope` counts the others."""
    value_dim: int
    memory: Latent
    q_rank: int | None
    """The size of the queries' own latent; None: queries are one product."""
    rope: int
    """Index of its rotation in the model's `ropes`."""
    is_interleaved: bool
    """Whether the two numbers of a rotated pair are adjacent."""
    scale: float
    """Factor of scores."""
    bias: bool
    """Whether the first products and the last have a bias."""
    norm_eps: float
    """Epsilon of the latents' norms."""
    index: TokenIndexSpec | None = None
    """None: queries see all tokens before them."""
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
        index = self.index
        if index is not None and index.is_own:
            weights += index.num_heads * (first * index.head_dim + hidden_size)
            weights += index.head_dim * (hidden_size + 2)
        return weights + (width + hidden_size) * self.bias + latent + first

    def prefers_latents(self, num_queries: int, num_keys: int, num_seen: int) -> bool:
        """Whether prompts cost less if their queries attend to latents, like decoding tokens, than
        if keys and values are expanded. Compares multiplications of one head: a latent makes a pair
        of query and key wider, and expanding a key costs as much as absorbing it into a query.
        `num_seen`: pairs."""
        latent, rope = self.memory.latent, self.memory.rope
        absorb = latent * (self.nope + self.value_dim)
        as_latents = num_seen * (2 * latent + rope) + num_queries * absorb
        expanded = num_seen * (self.nope + rope + self.value_dim) + num_keys * absorb
        return as_latents <= expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A layer that combines each token with the few before it: a gated causal convolution."""

    channels: int
    width: int
    """Tokens that one token sees, including itself."""
    bias: bool
    """Whether the products and the convolution have a bias."""
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
    """Value heads; a multiple of the key heads."""
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution sees, including the newest."""
    is_fused: bool
    """Whether the checkpoint has the input's projections as two, head by head (Qwen3-Next), or as
    four (Qwen3.5)."""
    name: str = "linear_attn"

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
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
    """Size of keys and values, and of the two gates' first products."""
    width: int
    """Tokens that the convolutions see, including the newest."""
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
    """The order of norm and gate between Mamba's scan and its last product."""

    GATE_ONLY = "gate_only"
    GATE_FIRST = "gate_first"
    """A norm after the gate."""
    NORM_FIRST = "norm_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """A layer that mixes tokens by the scan of Mamba-2, after a short convolution."""

    num_heads: int
    head_dim: int
    groups: int
    """Groups of heads that share what they write to and read from a state."""
    state_dim: int
    width: int
    """Tokens that the convolution sees, including the newest."""
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm: GatedNormKind
    norm_groups: int = 1
    """Number of parallel norms."""
    in_factor: float = 1.0
    out_factor: float = 1.0
    """Factors of its input and of its output."""
    part_factors: tuple[float, ...] = (1.0,) * 5
    """Factors of the first product's parts: gate, values, what is written, what is read, and
    steps."""
    shares_group: bool
    """Whether there is one group, which all ranks have."""
    least_step: float = 0.0
    """The least step of the scan."""
    spans_ranks: bool = False
    """Whether the only norm spans all ranks' channels."""
    name: str = "mamba"

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, what is written and what is read."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """How queries choose among the entries of compressed groups."""

    num_heads: int
    head_dim: int
    num_chosen: int
    """Entries that a query attends to at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """How groups of tokens are compressed into one entry each."""

    size: int
    """Tokens of a group."""
    overlaps: bool
    """Whether an entry is made of its own group and of the group before."""
    index: IndexSpec | None
    """None: queries attend to all entries."""
    rope: int
    """Which of the model's `ropes` rotates entries: by their group's first position."""

    @property
    def num_series(self) -> int:
        """Of vectors that each token has for entries."""
        return 1 + self.overlaps

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return self.size * self.num_series

    @property
    def index_dim(self) -> int:
        return 0 if self.index is None else self.index.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec:
    """A layer that attends to a window of tokens, and before it to entries of compressed groups.
    One vector per token, or per entry, is key and value of all heads (DeepSeek V4)."""

    num_heads: int
    head_dim: int
    window: int
    q_rank: int
    out_groups: int
    """Of heads, whose outputs are projected separately."""
    out_rank: int
    """Numbers that each of these groups is projected to."""
    rope: int
    """Which of the model's `ropes` rotates its queries and keys."""
    scale: float
    norm_eps: float
    groups: GroupSpec | None
    """None: it sees the window alone."""
    name: str = "self_attn"

    @property
    def memories(self) -> tuple[TokenRows, ...]:
        """Keys within the window; then what tokens of groups that are not complete yet add to
        their entries, and the entries with what queries choose them by."""
        keys = TokenRows(self.head_dim, self.window)
        groups = self.groups
        if groups is None:
            return (keys,)
        width = self.head_dim + groups.index_dim
        entries = TokenRows(
            width,
            None,
            groups.size,
            groups.index_dim,
            None if groups.index is None else groups.index.num_chosen,
        )
        open_groups = TokenRows(2 * groups.num_series * width, groups.span, read_every=groups.size)
        return keys, open_groups, entries

    def cut(self, divide: Divide) -> CompressedSpec:
        return replace(
            self,
            num_heads=divide("number of attention heads", self.num_heads),
            out_groups=divide("number of output groups", self.out_groups),
        )

    def num_weights(self, hidden_size: int) -> int:
        dim, heads, rank = self.head_dim, self.num_heads, self.q_rank
        weights = hidden_size * (rank + dim) + rank * (1 + heads * dim) + dim
        weights += heads * dim * self.out_rank + self.out_groups * self.out_rank * hidden_size
        weights += heads
        groups = self.groups
        if groups is None:
            return weights
        width = dim + groups.index_dim
        weights += groups.num_series * width * (2 * hidden_size + groups.size) + width
        if groups.index is not None:
            weights += groups.index.num_heads * (rank * groups.index_dim + hidden_size)
        return weights


MixerSpec = (
    AttentionSpec
    | LatentSpec
    | CompressedSpec
    | ShortConvSpec
    | DeltaSpec
    | ChannelDeltaSpec
    | MambaSpec
)


def memories_of(mixer: MixerSpec) -> tuple[Memory, ...]:
    """What a mixer remembers, each in a family of its own."""
    return mixer.memories if isinstance(mixer, CompressedSpec) else (mixer.memory,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A gated feed-forward block."""

    intermediate_size: int
    activation: Activation
    bias: bool
    name: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The checkpoint's names of the block and its products."""
    is_fused: bool = False
    """Whether the checkpoint has gate and up as one product, under the first name of `parts`."""
    is_gated: bool = True
    """Whether there is a gate. Without one, the activation applies to up and is multiplied with up:
    relu(up) * up is the square of relu."""
    gate_factor: float = 1.0
    down_factor: float = 1.0
    """Factors of its gate and of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The number and size of a block's experts, and how a token chooses among them."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Size of each expert."""
    activation: Activation
    scoring: Scoring
    bias: bool = False
    """Whether the router and each expert's products have a bias."""
    router: str = "gate"
    """The checkpoint's name of the router."""
    has_correction: bool = False
    """Whether each expert has a number that affects only the choice."""
    vocab_size: int | None = None
    """The length of the table that maps each token to its experts; None: tokens choose."""
    factor: float = 1.0
    """Factor of the chosen experts' weights."""
    groups: ExpertGroups | None = None
    """Set if a token first chooses groups of experts."""
    is_interleaved: bool = False
    """Whether the checkpoint interleaves gates and ups; adapters that PEFT made for it then do so,
    too (see `Target`)."""
    name: str = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """Experts, and a dense block that every token goes through."""

    experts: ExpertsSpec
    shared: DenseSpec
    gate: str | None
    """The checkpoint's name, relative to the layer, of the gate whose sigmoid multiplies the shared
    block's output. None: no gate."""
    name: str = ""
    """Names of experts and shared block are relative to the layer."""


BlockSpec = DenseSpec | ExpertsSpec | SharedSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperSpec:
    """Hyper-connections: the residual is several streams. Each half of a layer reads a mix of them
    and writes to all; a doubly stochastic matrix mixes the streams meanwhile."""

    num_streams: int
    num_iterations: int
    """By which a matrix is made doubly stochastic."""
    eps: float

    def num_weights(self, hidden_size: int) -> int:
        """Of one half of a layer."""
        count = self.num_streams
        return (2 + count) * count * (count * hidden_size + 1) + 3

    def num_end_weights(self, hidden_size: int) -> int:
        """Of what joins the streams after the last layer."""
        return self.num_streams * (self.num_streams * hidden_size + 1) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: its mixers, then its feed-forward block; each is added to the residual stream."""

    mixers: tuple[MixerSpec, ...]
    """Several mixers read the same input, and their outputs are added up. Empty: the layer is only
    its feed-forward block."""
    feed_forward: BlockSpec | None
    """None: the layer is only its mixers."""
    has_pre_norms: bool = True
    """Whether the inputs of both are normalised."""
    has_post_norms: bool = False
    """Whether the outputs of both are normalised before they are added."""
    factor: float = 1.0
    """Factor of both before they are added."""
    hyper: HyperSpec | None = None
    """None: the residual is one stream."""

    @property
    def num_norms(self) -> int:
        """Norms of the residual stream's width."""
        halves = bool(self.mixers) + (self.feed_forward is not None)
        return halves * (self.has_pre_norms + self.has_post_norms)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of its feed-forward block, if it has any."""
        block = self.feed_forward
        block = block.experts if isinstance(block, SharedSpec) else block
        return block if isinstance(block, ExpertsSpec) else None

    @property
    def attention(self) -> AttentionSpec | None:
        """Its attention mixer, if it has one."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec)), None)
