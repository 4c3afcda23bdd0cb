"""Gemma 3, the text model: five layers with a window to one with full attention.

A layer has four norms: before and after both of its products. Queries and keys are normalised per
head; all norm weights are stored minus one. Layers with a window have another rotary base. Scores
are scaled by `query_pre_attn_scalar`, not by the size of the heads, and embeddings by the square
root of their width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.layers.spec import LayerSpec
from manyroots.models.architecture import (
    Architecture,
    ConfigType,
    GgufForm,
    Values,
    check_whole_heads,
    fill_types,
)
from manyroots.models.fields import NAME, POSITIVE
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.models.windows import FULL, SLIDING, gguf_pattern, of_typed_layers

_TEXT = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "",
}
"""Names of the text model in checkpoints with vision, and its own names."""
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
_KINDS = (FULL, SLIDING)


def describe(reader: ConfigReader) -> ModelSpec:
    """Gemma 3 from 270M to 27B; of the larger ones only the text part."""
    text = reader.text
    _refuse_variants(text)
    layers, block = [], reader.dense(bias=False, activation="hidden_activation")
    for window in of_typed_layers(text):
        mixer = reader.attention(
            qkv_bias=text.attention_bias,
            o_bias=text.attention_bias,
            qk_norm=True,
            window=window,
            rope=_KINDS.index(FULL if window is None else SLIDING),
            scale=text.query_pre_attn_scalar**-0.5,
        )
        layers.append(LayerSpec(mixers=(mixer,), feed_forward=block, has_post_norms=True))
    return reader.model(
        layers,
        ropes=[reader.rope(kind) for kind in _KINDS],
        norm_offset=1.0,
        embedding_scale=text.hidden_size**0.5,
        rounds_embedding_scale=True,
    )


def translate(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors with the names of the text model."""
    for name, tensor in weights:
        if name.removeprefix("model.").startswith(_OTHER_PARTS):
            continue
        for prefix, own in _TEXT.items():
            if name.startswith(prefix):
                name = own + name.removeprefix(prefix)
                break
        yield name, tensor


def _refuse_variants(text: Any) -> None:
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = getattr(text, field, None)
        if value is not None:
            raise ModelError(
                f"the model's {field} is {value}; this version serves Gemma 3, which has none. "
                "Choose another checkpoint."
            )
    refuse_bidirectional(text)


def refuse_bidirectional(text: Any) -> None:
    """Also of Gemma 2."""
    if getattr(text, "use_bidirectional_attention", False):
        raise ModelError(
            "the model's use_bidirectional_attention is true: it embeds text and does not "
            "generate it. Choose another checkpoint."
        )


_LOCAL_THETA = 10_000.0
_PERIOD = 6
_27B_LAYERS = 62


def _of_gguf(file: GGUFFile, values: Values) -> Values:
    """The fields that define a Gemma 3. The converter writes the window and the rotation of
    full-attention layers. Every sixth layer has full attention; the others have their own base and
    no scaling. This is the same for all models and is in no file. llama.cpp and transformers fill
    in the same numbers; newer keys win if a file has them."""
    full = values["rope_parameters"]
    base = file.number("gemma3.rope.freq_base_swa", default=_LOCAL_THETA)
    layers = range(values["num_hidden_layers"])
    is_local = gguf_pattern(file, len(layers), default=_PERIOD)
    is_27b = values["num_hidden_layers"] == _27B_LAYERS
    scalar = (
        values["hidden_size"] // values["num_attention_heads"] if is_27b else values["head_dim"]
    )
    return {
        "sliding_window": file.whole("gemma3.attention.sliding_window"),
        "layer_types": [SLIDING if is_local(layer) else FULL for layer in layers],
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": base}},
        # llama.cpp's rule, too: scores are divided by the root of a head's size, in all but one.
        "query_pre_attn_scalar": scalar,
    }


def _finish(values: Values) -> None:
    if values["use_bidirectional_attention"]:
        values["sliding_window"] = values["sliding_window"] // 2 + 1
    period = values.get("sliding_window_pattern", 6)
    fill_types(values, lambda layer: SLIDING if (layer + 1) % period else FULL)
    check_whole_heads(values)


def without_offset(part: str, tensor: Tensor, spec: ModelSpec) -> Tensor:
    """A converter adds the norms' offset; removed in float32, as transformers does."""
    return tensor - 1.0 if part.endswith("_norm") else tensor


IN_BLOCK = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of a layer with four norms in a GGUF file."""
_TYPE = ConfigType(
    {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "rope_parameters": None,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    _finish,
    theta=1_000_000.0,
    has_ropes_by_type=True,
)
ARCHITECTURES = {
    "Gemma3ForCausalLM": Architecture(
        {"gemma3_text": _TYPE},
        describe,
        translate,
        fields={"hidden_activation": NAME, "query_pre_attn_scalar": POSITIVE},
        gguf=GgufForm(
            "gemma3",
            "gemma3_text",
            _of_gguf,
            theta=1_000_000.0,
            in_block=IN_BLOCK,
            restore=without_offset,
        ),
    ),
    "Gemma3ForConditionalGeneration": Architecture(
        {"gemma3": ConfigType({"tie_word_embeddings": True}, text="gemma3_text")},
        describe,
        translate,
    ),
}
