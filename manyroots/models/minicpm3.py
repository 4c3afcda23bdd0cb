"""MiniCPM3: latent attention with dense blocks; embeddings, layers and logits have factors."""

from __future__ import annotations

import math

from manyroots.errors import ModelError
from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import Architecture, ConfigType, Values, check_whole_heads
from manyroots.models.deepseek import LATENT_DEFAULTS, finish, latent_attention
from manyroots.models.fields import MAX_SIDE, POSITIVE, POSITIVE_OR_NONE, whole
from manyroots.models.spec import ConfigReader, ModelSpec


def describe(reader: ConfigReader) -> ModelSpec:
    """MiniCPM3-4B."""
    text = reader.text
    count = text.num_hidden_layers
    layer = LayerSpec(
        mixers=(latent_attention(text, is_interleaved=False),),
        feed_forward=reader.dense(bias=text.mlp_bias),
        factor=text.scale_depth / math.sqrt(count),
    )
    return reader.model(
        [layer] * count,
        embedding_scale=float(text.scale_emb),
        logits_factor=text.dim_model_base / text.hidden_size,
    )


def _finish(values: Values) -> None:
    if "logits_scaling" in values:
        raise ModelError(
            "the model has logits_scaling, which follows from hidden_size and dim_model_base here. "
            "Remove it from its config.json."
        )
    check_whole_heads(values)
    finish(values)
    for name, neutral in (
        ("v_head_dim", values["hidden_size"] // values["num_attention_heads"]),
        ("scale_depth", math.sqrt(values["num_hidden_layers"])),
        ("dim_model_base", values["hidden_size"]),
    ):
        if values[name] is None:
            values[name] = neutral


ARCHITECTURES = {
    "MiniCPM3ForCausalLM": Architecture(
        {
            "minicpm3": ConfigType(
                LATENT_DEFAULTS
                | {
                    "vocab_size": 73448,
                    "hidden_size": 2560,
                    "intermediate_size": 6400,
                    "num_hidden_layers": 62,
                    "num_attention_heads": 40,
                    "num_key_value_heads": 40,
                    "max_position_embeddings": 32768,
                    "rms_norm_eps": 1e-5,
                    "tie_word_embeddings": True,
                    "eos_token_id": 2,
                    "mlp_bias": False,
                    "kv_lora_rank": 256,
                    "q_lora_rank": 768,
                    "qk_nope_head_dim": 64,
                    "qk_rope_head_dim": 32,
                    "v_head_dim": None,
                    "scale_emb": 12,
                    "scale_depth": 1.4,
                    "dim_model_base": 256,
                },
                _finish,
                may_be_null=("num_key_value_heads",),
            )
        },
        describe,
        fields={
            "scale_emb": POSITIVE,
            "scale_depth": POSITIVE_OR_NONE,
            "dim_model_base": whole(1, MAX_SIDE, or_none=True),
        },
    ),
}
