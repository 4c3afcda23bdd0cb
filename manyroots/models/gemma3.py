"""Gemma 3, the text model: five layers with a window to one that sees everything.

A layer has four norms: in front of and behind both of its products. Queries and keys are normalised
per head; all norms' weights are stored less one. Windowed layers turn queries and keys by another
base than the others. Scores are scaled by `query_pre_attn_scalar`, not by the size of the heads,
and embeddings by the root of their width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.layers.spec import LayerSpec
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import FULL, SLIDING, of_typed_layers

_TEXT = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "",
}
"""Where checkpoints that also see images have the text model, and where it belongs."""
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
_KINDS = (FULL, SLIDING)


def describe(reader: ConfigReader) -> ModelSpec:
    """Gemma 3 from 270M to 27B; of the larger ones the text part."""
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
    """A checkpoint's tensors under the names of the text model alone."""
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
    if getattr(text, "use_bidirectional_attention", False):
        raise ModelError(
            "the model's use_bidirectional_attention is true: it embeds text and does not "
            "generate it. Choose another checkpoint."
        )
