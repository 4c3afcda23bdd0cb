"""Qwen3 mixture of experts: Qwen3 whose feed-forward blocks are experts chosen by a router.

Layers that the config excludes, by name (`mlp_only_layers`) or by interval (`decoder_sparse_step`),
have the dense block of Qwen3.
"""

from __future__ import annotations

from typing import Any

from manyroots.errors import ModelError
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.layers.spec import ExpertsSpec, LayerSpec
from manyroots.models.architecture import COMMON, Architecture, ConfigType, GgufForm, Values
from manyroots.models.fields import MAX_LAYERS, list_of, whole
from manyroots.models.qwen2 import drop_unused_window
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.windows import of_every_layer


def describe(reader: ConfigReader) -> ModelSpec:
    """Qwen3-30B-A3B, Qwen3-235B-A22B and similar models."""
    text = reader.text
    bias, sparse = text.attention_bias, sparse_layers(text)
    block = experts(reader, renormalises=text.norm_topk_prob) if sparse else None
    layers = []
    for index, window in enumerate(of_every_layer(text)):
        mixer = reader.attention(qkv_bias=bias, o_bias=bias, qk_norm=True, window=window)
        feed_forward = reader.dense(bias=False) if block is None or index not in sparse else block
        layers.append(LayerSpec(mixers=(mixer,), feed_forward=feed_forward))
    return reader.model(layers)


def experts(reader: ConfigReader, *, renormalises: bool) -> ExpertsSpec:
    """The config's experts. `renormalises`: whether the chosen experts' weights add up to one."""
    return reader.experts(
        reader.text.num_experts,
        intermediate_size=reader.text.moe_intermediate_size,
        scoring=Scoring.SOFTMAX_RENORMALISED if renormalises else Scoring.SOFTMAX,
    )


def sparse_layers(config: Any) -> frozenset[int]:
    """The layers with experts: every `decoder_sparse_step`th, except those named dense."""
    step = config.decoder_sparse_step
    if step < 1:
        raise ModelError(
            f"the model's decoder_sparse_step is {step}; it must be at least 1. Check its "
            "config.json."
        )
    if not config.num_experts:
        return frozenset()
    every = range(step - 1, config.num_hidden_layers, step)
    return frozenset(every) - frozenset(config.mlp_only_layers or ())


def _finish(values: Values) -> None:
    drop_unused_window(values)
    values["mlp_only_layers"] = values["mlp_only_layers"] or []


def _of_gguf(file: GGUFFile, values: Values) -> Values:
    """Such files have experts in every layer. Their weights add up to one unless a newer key, which
    most files lack, states otherwise."""
    return {
        "num_experts": file.whole("qwen3moe.expert_count"),
        "num_experts_per_tok": file.whole("qwen3moe.expert_used_count"),
        "moe_intermediate_size": file.whole("qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": file.metadata.get("qwen3moe.expert_weights_norm", True),
    }


ARCHITECTURES = {
    "Qwen3MoeForCausalLM": Architecture(
        {
            "qwen3_moe": ConfigType(
                COMMON
                | {
                    "vocab_size": 151936,
                    "hidden_size": 2048,
                    "intermediate_size": 6144,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 32768,
                    "attention_bias": False,
                    "use_sliding_window": False,
                    "sliding_window": 4096,
                    "decoder_sparse_step": 1,
                    "moe_intermediate_size": 768,
                    "num_experts_per_tok": 8,
                    "num_experts": 128,
                    "norm_topk_prob": False,
                    "mlp_only_layers": None,
                },
                _finish,
                other_names={"num_experts": "num_local_experts"},
            )
        },
        describe,
        fields={
            "decoder_sparse_step": whole(0, MAX_LAYERS),
            "mlp_only_layers": (
                "a list of layers, or null",
                lambda value: value is None or list_of(lambda one: type(one) is int)(value),
            ),
        },
        gguf=GgufForm("qwen3moe", "qwen3_moe", _of_gguf, has_experts=True),
    ),
}
