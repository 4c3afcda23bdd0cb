"""Gemma 2: every other layer has a window; scores and logits are capped softly.

A layer has four norms, as in Gemma 3, and norm weights are stored minus one. Queries and keys are
not normalised, and all layers have the same rotation.
"""

from __future__ import annotations

from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import (
    COMMON,
    Architecture,
    ConfigType,
    GgufForm,
    Values,
    check_whole_heads,
    fill_types,
)
from manyroots.models.fields import POSITIVE_OR_NONE
from manyroots.models.gemma3 import IN_BLOCK, refuse_bidirectional, without_offset
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.windows import FULL, SLIDING, of_typed_layers

_27B_LAYERS = 46


def describe(reader: ConfigReader) -> ModelSpec:
    """Gemma 2 from 2B to 27B."""
    text = reader.text
    refuse_bidirectional(text)
    layers, block = [], reader.dense(bias=False, activation="hidden_activation")
    for window in of_typed_layers(text):
        mixer = reader.attention(
            qkv_bias=text.attention_bias,
            o_bias=text.attention_bias,
            qk_norm=False,
            window=window,
            scale=text.query_pre_attn_scalar**-0.5,
            cap=text.attn_logit_softcapping or 0.0,
        )
        layers.append(LayerSpec(mixers=(mixer,), feed_forward=block, has_post_norms=True))
    return reader.model(
        layers,
        norm_offset=1.0,
        embedding_scale=text.hidden_size**0.5,
        rounds_embedding_scale=True,
        logits_cap=text.final_logit_softcapping or 0.0,
    )


def _finish(values: Values) -> None:
    fill_types(values, lambda layer: SLIDING if (layer + 1) % 2 else FULL)
    check_whole_heads(values)


def _of_gguf(file: GGUFFile, values: Values) -> Values:
    """Files do not state which layers have the window, or how scores are scaled; llama.cpp fills in
    the same values."""
    is_27b = values["num_hidden_layers"] == _27B_LAYERS
    width = values["hidden_size"] // values["num_attention_heads"]
    return {
        "sliding_window": file.whole("gemma2.attention.sliding_window", default=4096),
        "attn_logit_softcapping": file.number("gemma2.attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": file.number("gemma2.final_logit_softcapping", default=30.0),
        "query_pre_attn_scalar": width if is_27b else values["head_dim"],
    }


ARCHITECTURES = {
    "Gemma2ForCausalLM": Architecture(
        {
            "gemma2": ConfigType(
                {name: value for name, value in COMMON.items() if name != "hidden_act"}
                | {
                    "vocab_size": 256000,
                    "hidden_size": 2304,
                    "intermediate_size": 9216,
                    "num_hidden_layers": 26,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "head_dim": 256,
                    "hidden_activation": "gelu_pytorch_tanh",
                    "max_position_embeddings": 8192,
                    "eos_token_id": 1,
                    "tie_word_embeddings": True,
                    "attention_bias": False,
                    "query_pre_attn_scalar": 256,
                    "sliding_window": 4096,
                    "layer_types": None,
                    "final_logit_softcapping": 30.0,
                    "attn_logit_softcapping": 50.0,
                    "use_bidirectional_attention": None,
                },
                _finish,
            )
        },
        describe,
        fields={
            "attn_logit_softcapping": POSITIVE_OR_NONE,
            "final_logit_softcapping": POSITIVE_OR_NONE,
        },
        gguf=GgufForm(
            "gemma2",
            "gemma2",
            _of_gguf,
            in_block=IN_BLOCK,
            restore=without_offset,
            reads=("attn_logit_softcapping", "final_logit_softcapping"),
        ),
    ),
}
