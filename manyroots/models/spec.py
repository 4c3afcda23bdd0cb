"""What a model is, in plain frozen numbers.

Takes a transformers config and the traits of its architecture; gives a `ModelSpec`. Differences
between config dialects end here and in the architectures' `traits`: no other room reads a config.
Holds no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manyroots.errors import ModelError
from manyroots.layers.moe import ExpertsSpec
from manyroots.layers.rotary import RopeSpec, rope_frequencies
from manyroots.models.fields import check_rope

MAX_POSITIONS = 2**24
"""RopeTable are computed in float32, which can't tell positions beyond apart. Configs that mean "no
limit" say more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an architecture's name implies and its config does not spell out the same way."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: ExpertsSpec | None = None
    """Of the layers in `sparse_layers`; None in dense models."""
    sparse_layers: frozenset[int] = frozenset()
    sliding_window: int | None = None
    """How many tokens a query sees at most, itself included, in the layers that see fewest.
    None where every layer sees the whole context. Transformers' `sliding_window` w hides key k
    from query q where k <= q - w in all families, so it counts the query itself already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only model."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    traits: Traits
    rms_norm_eps: float
    hidden_act: str
    rope: RopeSpec

    @property
    def sliding_window(self) -> int | None:
        """That of the traits: each architecture has its own rule."""
        return self.traits.sliding_window

    @property
    def max_exact_len(self) -> int:
        """The longest context for which full attention gives exactly this model's output."""
        longest = min(self.max_position_embeddings, MAX_POSITIONS)
        return longest if self.sliding_window is None else min(self.sliding_window, longest)


def model_spec(
    config: Any,
    architecture: str,
    traits: Traits,
    *,
    eos_token_ids: Sequence[int],
    rope_factors: Sequence[float] | None,
) -> ModelSpec:
    """Read a config; `rope_factors` are a GGUF file's own and None elsewhere."""
    text = config.get_text_config()
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = _get(quantization, "quant_method") or "unknown"
        raise ModelError(
            f"the checkpoint is quantized (method {method!r}); this version loads unquantized "
            "safetensors and GGUF files. Use one of these for this model."
        )
    check_rope(getattr(text, "rope_parameters", None), architecture)
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"the model has {num_heads} attention heads and {num_kv_heads} key-value heads; the "
            "first must be a multiple of the second. Check its config.json."
        )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    if head_dim < 2 or head_dim % 2:
        raise ModelError(
            f"the model has {num_heads} attention heads for a hidden size of {text.hidden_size}, "
            f"{head_dim} dimensions each; they are turned in pairs, so it must be an even number. "
            "Check its config.json."
        )
    return ModelSpec(
        architecture=architecture,
        num_layers=text.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        # Those beyond the vocabulary are never sampled, and no row of scores has them.
        eos_token_ids=tuple(token for token in eos_token_ids if token < text.vocab_size),
        tie_word_embeddings=bool(text.tie_word_embeddings),
        traits=traits,
        rms_norm_eps=text.rms_norm_eps,
        hidden_act=text.hidden_act,
        rope=rope_frequencies(text, head_dim, rope_factors),
    )


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
