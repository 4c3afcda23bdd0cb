"""GLM-5: latent attention whose queries choose the tokens that they see by an index. Some layers
may share the choice of a layer before them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manyroots.errors import ModelError
from manyroots.models.architecture import Architecture, ConfigType, Values
from manyroots.models.deepseek_v32 import (
    INDEXED_DEFAULTS,
    finish_indexed,
    indexed_model,
    token_index,
)
from manyroots.models.fields import MAX_LAYERS, NAMES, whole
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.prediction import PredictionNames

FULL, SHARED = "full", "shared"
_BY_LETTER = {"F": FULL, "S": SHARED}


def describe(reader: ConfigReader) -> ModelSpec:
    """GLM-5 and its successors of the same shape."""
    own = token_index(reader, is_interleaved=True)
    shared = replace(own, is_own=False)
    kinds = _index_types(reader.text)
    return indexed_model(reader, [own if kind == FULL else shared for kind in kinds])


def _index_types(text: Any) -> list[str]:
    """Whether each layer has an index; refuses unknown kinds."""
    kinds: list[str] = text.indexer_types
    count = text.num_hidden_layers
    if len(kinds) != count or set(kinds) - {FULL, SHARED}:
        raise ModelError(
            f"the model has {count} layers, and its indexer_types {len(kinds)} entries "
            f"({', '.join(sorted(set(kinds)))[:200]}); there must be {FULL!r} or {SHARED!r} for "
            "each. Check its config.json."
        )
    if kinds[0] != FULL:
        raise ModelError(
            f"the model's indexer_types begin with {kinds[0]!r}, and no layer before the first has "
            f"an index to share; the first must be {FULL!r}. Check its config.json."
        )
    return kinds


def _finish(values: Values) -> None:
    finish_indexed(values)
    if values["indexer_types"] is not None:
        return
    pattern = values.get("index_topk_pattern")
    if pattern is not None:
        values["indexer_types"] = [_BY_LETTER.get(one, one) for one in pattern]
        return
    every = max(values.get("index_topk_freq", 1), 1)
    first = values.get("index_skip_topk_offset", 2)
    values["indexer_types"] = [
        SHARED if max(layer - first + 1, 0) % every else FULL
        for layer in range(values["num_hidden_layers"])
    ]


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) or NAMES[1](value)


ARCHITECTURES = {
    "GlmMoeDsaForCausalLM": Architecture(
        {
            "glm_moe_dsa": ConfigType(
                INDEXED_DEFAULTS
                | {
                    "vocab_size": 154880,
                    "hidden_size": 6144,
                    "intermediate_size": 12288,
                    "num_hidden_layers": 78,
                    "num_attention_heads": 64,
                    "num_key_value_heads": 64,
                    "q_lora_rank": 2048,
                    "v_head_dim": 256,
                    "qk_nope_head_dim": 192,
                    "n_group": 1,
                    "topk_group": 1,
                    "max_position_embeddings": 202752,
                    "rms_norm_eps": 1e-5,
                    "index_n_heads": 32,
                    "indexer_types": None,
                },
                _finish,
                other_names={"n_routed_experts": "num_local_experts"},
            )
        },
        describe,
        prediction=PredictionNames.NUMBERED,
        fields={
            "indexer_types": NAMES,
            "index_topk_pattern": ("a list of names, or a text of F and S, or null", _is_pattern),
            "index_topk_freq": whole(0, MAX_LAYERS),
            "index_skip_topk_offset": whole(0, MAX_LAYERS),
        },
    ),
}
