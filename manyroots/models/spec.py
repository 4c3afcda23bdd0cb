"""Describes a model in plain frozen numbers.

`ModelSpec` describes every layer; families of memory, weights, page tables and graphs follow from
it. `ConfigReader` takes a config and makes the parts of a description, the same for all
architectures. An architecture's own file combines them. No other room reads a config. Holds no
tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from manyroots.errors import ModelError
from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.layers.memories import KV, TokenRows
from manyroots.layers.rotary import RopeSpec, rope_frequencies
from manyroots.layers.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
)
from manyroots.models.fields import check_rope

MAX_POSITIONS = 2**24
"""Angles are computed in float32, which cannot distinguish larger positions. Configs without a
limit have larger numbers."""

ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
"""By their names in configs."""
_OTHER_NAMES = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}
"""Other names in transformers; some compute the same in more steps."""


@dataclass(frozen=True, slots=True)
class PredictionSpec:
    """The layer that predicts tokens ahead (MTP)."""

    layer: LayerSpec
    memory: TokenRows
    """The model's hidden state after the newest token of each page."""

    @classmethod
    def of(cls, spec: ModelSpec, page_size: int) -> PredictionSpec:
        """A layer like the model's last one with attention."""
        layer = next(
            layer
            for layer in reversed(spec.layers)
            if any(isinstance(mixer, AttentionSpec | LatentSpec) for mixer in layer.mixers)
        )
        return cls(layer, TokenRows(spec.hidden_size, window=None, group=page_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only model."""

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    """The rotations that its layers choose from."""
    rms_norm_eps: float
    norm_offset: float = 0.0
    """Added to the norms' weights, which a checkpoint may store minus one."""
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    """Whether that is rounded to the model's dtype before multiplying."""
    logits_factor: float = 1.0
    """Factor of logits."""
    logits_cap: float = 0.0
    """Logits l become cap * tanh(l / cap); 0: no cap."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    prediction: PredictionSpec | None = None
    """None: nothing is predicted ahead."""

    @property
    def num_layers(self) -> int:
        """Layers of the model itself."""
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """These, and the layer that predicts tokens ahead."""
        return self.layers if self.prediction is None else (*self.layers, self.prediction.layer)

    @property
    def max_len(self) -> int:
        """The longest context that the model supports."""
        return min(self.max_position_embeddings, MAX_POSITIONS)


class ConfigReader:
    """One model's config, for its architecture's file."""

    def __init__(
        self,
        config: Any,
        architecture: str,
        *,
        eos_token_ids: Sequence[int],
        rope_factors: Sequence[float] | None,
    ) -> None:
        """`rope_factors` come from a GGUF file; None elsewhere."""
        self.text = text = config.get_text_config()
        self._architecture = architecture
        self._eos_token_ids = eos_token_ids
        self._rope_factors = rope_factors
        # The whole model has the head, so for a model with vision its own config applies.
        self._is_tied = bool(getattr(config, "tie_word_embeddings", text.tie_word_embeddings))
        self.num_heads: int = text.num_attention_heads
        self.num_kv_heads: int = getattr(text, "num_key_value_heads", None) or self.num_heads
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"the model has {self.num_heads} attention heads and {self.num_kv_heads} key-value "
                "heads; the first must be a multiple of the second. Check its config.json."
            )
        own_dim = getattr(text, "head_dim", None)
        self.head_dim: int = own_dim or text.hidden_size // self.num_heads
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(
                f"the model has {self.num_heads} attention heads for a hidden size of "
                f"{text.hidden_size}, {self.head_dim} dimensions each; they are rotated in pairs, "
                "so it must be an even number. Check its config.json."
            )

    def attention(
        self,
        *,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
        window: int | None,
        rope: int = 0,
        scale: float | None = None,
        has_sinks: bool = False,
        has_gate: bool = False,
        o_name: str = "o_proj",
        norm_spans_heads: bool = False,
        is_fused: bool = False,
        cap: float = 0.0,
    ) -> AttentionSpec:
        """`scale`: set if it does not follow from the size of the heads."""
        return AttentionSpec(
            num_heads=self.num_heads,
            memory=KV(self.num_kv_heads, self.head_dim, window),
            rope=rope,
            scale=self.head_dim**-0.5 if scale is None else scale,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            has_sinks=has_sinks,
            has_gate=has_gate,
            o_name=o_name,
            norm_spans_heads=norm_spans_heads,
            is_fused=is_fused,
            cap=cap,
        )

    def layer_types(self, known: Collection[str]) -> list[str]:
        """The type of each layer, one of `known`."""
        kinds, count = list(self.text.layer_types), self.text.num_hidden_layers
        unknown = sorted(set(kinds) - set(known))
        if unknown or len(kinds) != count:
            raise ModelError(
                f"the model has {count} layers, and layer_types {len(kinds)} entries"
                + (f" with {', '.join(unknown)[:200]}" if unknown else "")
                + f"; there must be one of {', '.join(known)} for each. Check its config.json."
            )
        return kinds

    def activation(self, field: str = "hidden_act") -> Activation:
        """From the one field that the architecture's config has for it; others are ignored."""
        name = getattr(self.text, field)
        name = _OTHER_NAMES.get(name, name)
        if name not in ACTIVATIONS:
            raise ModelError(
                f"the model's {field} is {name!r}; this version computes {', '.join(ACTIVATIONS)}."
            )
        return ACTIVATIONS[name]

    def dense(self, *, bias: bool, activation: str = "hidden_act") -> DenseSpec:
        """`activation`: the field that names it."""
        return DenseSpec(
            intermediate_size=self.text.intermediate_size,
            activation=self.activation(activation),
            bias=bias,
        )

    def experts(
        self,
        count: int,
        *,
        intermediate_size: int,
        scoring: Scoring,
        activation: Activation | None = None,
        **names: Any,
    ) -> ExpertsSpec:
        """Checks how many experts a token chooses. `activation`: set if the config does not name
        it."""
        chosen = self.text.num_experts_per_tok
        if not 1 <= chosen <= count:
            raise ModelError(
                f"the model has {count} experts and num_experts_per_tok {chosen}; the second must "
                f"be between 1 and {count}. Check its config.json."
            )
        return ExpertsSpec(
            num_experts=count,
            experts_per_token=chosen,
            intermediate_size=intermediate_size,
            activation=self.activation() if activation is None else activation,
            scoring=scoring,
            **names,
        )

    def rope(self, layer_type: str | None = None, *, is_partial: bool = False) -> RopeSpec:
        """The rotation of all layers, or of those of one type if the config has several.
        `is_partial`: whether the architecture may rotate only a part of each head."""
        parameters = getattr(self.text, "rope_parameters", None)
        if layer_type is not None and isinstance(parameters, dict) and layer_type in parameters:
            parameters = parameters[layer_type]
        else:
            layer_type = None
        check_rope(parameters, self._architecture)
        return rope_frequencies(
            self.text, self.head_dim, self._rope_factors, layer_type, is_partial=is_partial
        )

    def model(
        self,
        layers: Sequence[LayerSpec],
        *,
        ropes: Sequence[RopeSpec] | None = None,
        norm_offset: float = 0.0,
        embedding_scale: float = 1.0,
        rounds_embedding_scale: bool = False,
        logits_factor: float = 1.0,
        logits_cap: float = 0.0,
        eps: float | None = None,
    ) -> ModelSpec:
        """The whole description. `ropes`: set if the layers do not share one; `eps`: set if the
        config has another name for it."""
        text = self.text
        ropes = (self.rope(),) if ropes is None else tuple(ropes)
        return ModelSpec(
            architecture=self._architecture,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            layers=tuple(layers),
            ropes=ropes,
            rms_norm_eps=text.rms_norm_eps if eps is None else eps,
            norm_offset=norm_offset,
            embedding_scale=embedding_scale,
            rounds_embedding_scale=rounds_embedding_scale,
            logits_factor=logits_factor,
            logits_cap=logits_cap,
            max_position_embeddings=self._num_positions(
                is_rotated=any(rope.frequencies for rope in ropes)
            ),
            # Ids beyond the vocabulary are never sampled, and no row of logits has them.
            eos_token_ids=tuple(t for t in self._eos_token_ids if t < text.vocab_size),
            tie_word_embeddings=self._is_tied,
        )

    def _num_positions(self, *, is_rotated: bool) -> int:
        """The config's length, or the length that YaRN extends it to: a config with YaRN, as Qwen's
        makers advise, still has the original length. `is_rotated`: whether there are rotations."""
        said: int = self.text.max_position_embeddings
        rope = self.text.rope_parameters if is_rotated else {}
        if rope.get("rope_type") != "yarn" or rope.get("factor") is None:
            return said
        if any(isinstance(one, dict) for one in rope.values()):
            return said  # numbers beside the sets of each type of layer count for nothing
        length = min(rope["original_max_position_embeddings"], MAX_POSITIONS)
        return max(said, int(min(length * rope["factor"], MAX_POSITIONS)))
