"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused products and, in the newer ones, longrope.

Queries, keys and values are one product, and so are gate and up. Phi-4-mini rotates three quarters
of each head.
"""

from __future__ import annotations

from manyroots.layers.spec import DenseSpec, LayerSpec
from manyroots.models.architecture import (
    COMMON,
    Architecture,
    ConfigType,
    GgufForm,
    Values,
    fill_kv_heads,
)
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.windows import of_every_layer

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def describe(reader: ConfigReader) -> ModelSpec:
    """Phi-3 mini to medium, Phi-3.5-mini, Phi-4 and Phi-4-mini."""
    block = DenseSpec(
        intermediate_size=reader.text.intermediate_size,
        activation=reader.activation(),
        bias=False,
        parts=("gate_up_proj", "", "down_proj"),
        is_fused=True,
    )
    layers = [
        LayerSpec(
            mixers=(
                reader.attention(
                    qkv_bias=False, o_bias=False, qk_norm=False, window=window, is_fused=True
                ),
            ),
            feed_forward=block,
        )
        for window in of_every_layer(reader.text)
    ]
    return reader.model(layers, ropes=[reader.rope(is_partial=True)])


def _finish(values: Values) -> None:
    fill_kv_heads(values)
    rope = values.get("rope_scaling") or values["rope_parameters"]
    if isinstance(rope, dict):
        for name in ("type", "rope_type"):
            if rope.get(name) in ("su", "yarn"):  # older names of the same
                rope[name] = "longrope"


def _of_gguf(file: GGUFFile, values: Values) -> Values:
    """Longrope's factors are tensors of the file."""
    rotated = file.whole("phi3.rope.dimension_count", default=values["head_dim"])
    rope = dict(values["rope_parameters"])
    rope["partial_rotary_factor"] = rotated / values["head_dim"]
    found: Values = {"rope_parameters": rope}
    if _LONG in file.tensors and _SHORT in file.tensors:
        length = file.whole("phi3.rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = length
        rope |= {
            "rope_type": "longrope",
            "long_factor": file.read(_LONG).reshape(-1).tolist(),
            "short_factor": file.read(_SHORT).reshape(-1).tolist(),
            "attention_factor": file.number("phi3.rope.scaling.attn_factor"),
        }
    return found


ARCHITECTURES = {
    "Phi3ForCausalLM": Architecture(
        {
            "phi3": ConfigType(
                COMMON
                | {
                    "vocab_size": 32064,
                    "hidden_size": 3072,
                    "intermediate_size": 8192,
                    "num_hidden_layers": 32,
                    "num_attention_heads": 32,
                    "num_key_value_heads": None,
                    "max_position_embeddings": 4096,
                    "original_max_position_embeddings": 4096,
                    "rms_norm_eps": 1e-5,
                    "eos_token_id": 32000,
                    "sliding_window": None,
                },
                _finish,
                partial=1.0,
            )
        },
        describe,
        gguf=GgufForm(
            "phi3",
            "phi3",
            _of_gguf,
            in_block={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            reads=("rope.dimension_count", "rope.scaling.attn_factor"),
        ),
    ),
}
