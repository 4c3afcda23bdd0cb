"""Llama 2 and 3, SmolLM2, and all models with that architecture name: the plain decoder."""

from __future__ import annotations

from torch import Tensor

from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import (
    COMMON,
    Architecture,
    ConfigType,
    GgufForm,
    Values,
    check_whole_heads,
    fill_head_dim,
    fill_kv_heads,
)
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.gguf import halves_from_pairs
from manyroots.models.weights.gguf_file import GGUFFile


def describe(reader: ConfigReader) -> ModelSpec:
    """All layers are equal."""
    text = reader.text
    bias = text.attention_bias
    layer = LayerSpec(
        mixers=(reader.attention(qkv_bias=bias, o_bias=bias, qk_norm=False, window=None),),
        feed_forward=reader.dense(bias=text.mlp_bias),
    )
    return reader.model([layer] * text.num_hidden_layers)


def _finish(values: Values) -> None:
    fill_head_dim(values)
    fill_kv_heads(values)
    check_whole_heads(values)


def biases(file: GGUFFile, values: Values) -> Values:
    """Files have no key for biases."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def unpaired(part: str, tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Rows of queries and keys in the order of this engine."""
    attention = spec.layers[0].attention
    assert attention is not None
    heads = {"attn_q": attention.num_heads, "attn_k": attention.memory.kv_heads}
    return halves_from_pairs(tensor, heads[part]) if part in heads else tensor


DEFAULTS: Values = COMMON | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        {"llama": ConfigType(DEFAULTS | {"mlp_bias": False, "head_dim": None}, _finish)},
        describe,
        gguf=GgufForm("llama", "llama", biases, restore=unpaired),
    ),
}
