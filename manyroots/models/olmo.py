"""OLMo 2 and 3: norms after attention and block, none before them.

Queries and keys are normalised over all heads together. OLMo 3 has three layers with a window to
one with full attention; each kind has its own rotation.
"""

from __future__ import annotations

from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import (
    Architecture,
    ConfigType,
    GgufForm,
    Values,
    fill_kv_heads,
    fill_types,
)
from manyroots.models.llama import DEFAULTS
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.windows import FULL, SLIDING, gguf_pattern, gguf_window, of_typed_layers

_KINDS = (FULL, SLIDING)
_THETA = 500_000.0
_ATTENTION_FACTOR = "olmo2.rope.scaling.attn_factor"
"""Older files of OLMo 3 have the config's attention_factor here."""


def describe(reader: ConfigReader) -> ModelSpec:
    """OLMo 2 from 1B to 32B: full attention in every layer."""
    count = reader.text.num_hidden_layers
    return reader.model([_layer(reader, None)] * count)


def describe_typed(reader: ConfigReader) -> ModelSpec:
    """OLMo 3 from 7B to 32B."""
    layers = [_layer(reader, window) for window in of_typed_layers(reader.text)]
    return reader.model(layers, ropes=[reader.rope(kind) for kind in _KINDS])


def _layer(reader: ConfigReader, window: int | None) -> LayerSpec:
    bias = reader.text.attention_bias
    mixer = reader.attention(
        qkv_bias=bias, o_bias=bias, qk_norm=True, norm_spans_heads=True, window=window,
        rope=_KINDS.index(FULL if window is None else SLIDING),
    )  # fmt: skip
    block = reader.dense(bias=False)
    return LayerSpec(mixers=(mixer,), feed_forward=block, has_pre_norms=False, has_post_norms=True)


def _finish_typed(values: Values) -> None:
    fill_kv_heads(values)
    _check_theta(values)
    fill_types(values, lambda layer: SLIDING if (layer + 1) % 4 else FULL)


def _check_theta(values: Values) -> None:
    """Refuse a base whose meaning depends on transformers' version: in older ones it is that of all
    layers, in newer ones that of layers with full attention."""
    theta, rope = values.get("rope_theta", _THETA), values["rope_parameters"]
    local = rope.get(SLIDING) if isinstance(rope, dict) else None
    if theta != _THETA and "rope_theta" not in (local or {}):
        raise ValueError(
            f"its rope_theta is {theta}, and versions of transformers disagree on whether it "
            f"applies to {SLIDING}. Write rope_theta into rope_parameters for each type of layer."
        )


def _of_gguf(file: GGUFFile, values: Values) -> Values:
    """Layers with a window have the same base, without scaling."""
    full = dict(values["rope_parameters"])
    if full["rope_type"] == "yarn" and _ATTENTION_FACTOR in file.metadata:
        full["attention_factor"] = file.number(_ATTENTION_FACTOR)
    is_local = gguf_pattern(file, values["num_hidden_layers"], default=4)
    layers = range(values["num_hidden_layers"])
    return {
        "layer_types": [SLIDING if is_local(layer) else FULL for layer in layers],
        "rope_parameters": {
            FULL: full,
            SLIDING: {"rope_type": "default", "rope_theta": full["rope_theta"]},
        },
    }


_DEFAULTS = DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
_IN_BLOCK = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES = {
    "Olmo2ForCausalLM": Architecture(
        {"olmo2": ConfigType(_DEFAULTS, fill_kv_heads)},
        describe,
        gguf=GgufForm("olmo2", "olmo2", in_block=_IN_BLOCK),
    ),
    "Olmo3ForCausalLM": Architecture(
        {
            "olmo3": ConfigType(
                _DEFAULTS | {"sliding_window": 4096, "layer_types": None},
                _finish_typed,
                theta=_THETA,
                has_ropes_by_type=True,
                local_theta=_THETA,
            )
        },
        describe_typed,
        # Files of OLMo 3 have the architecture olmo2; the window distinguishes them.
        gguf=GgufForm(
            "olmo2",
            "olmo3",
            _of_gguf,
            is_meant=lambda file: bool(gguf_window(file)),
            in_block=_IN_BLOCK,
            reads=("rope.scaling.attn_factor",),
        ),
    ),
}
