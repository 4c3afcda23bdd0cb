"""gpt-oss: alternating layers with a window of 128 and with full attention; all with experts.

Every head has a sink, a score that takes weight and adds no value. All products have biases.
Experts are gated by a clamped swish; the router's weights are a softmax over the chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.kernels.activation.kinds import CLAMP_ALPHA, CLAMP_LIMIT, Activation
from manyroots.kernels.fused_moe.routing import Scoring
from manyroots.layers.spec import ExpertsSpec, LayerSpec
from manyroots.layers.weights.mxfp4 import KIND, joined
from manyroots.models.architecture import (
    COMMON,
    Architecture,
    ConfigType,
    Values,
    fill_head_dim,
    fill_kv_heads,
    fill_types,
)
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.windows import FULL, SLIDING, of_typed_layers


def describe(reader: ConfigReader) -> ModelSpec:
    """gpt-oss-20b and gpt-oss-120b."""
    text = reader.text
    bias, block = text.attention_bias, experts(reader)
    return reader.model(
        [
            LayerSpec(
                mixers=(
                    reader.attention(
                        qkv_bias=bias, o_bias=bias, qk_norm=False, window=window, has_sinks=True
                    ),
                ),
                feed_forward=block,
            )
            for window in of_typed_layers(text)
        ]
    )


def experts(reader: ConfigReader) -> ExpertsSpec:
    """The config's experts."""
    text = reader.text
    limit = getattr(text, "swiglu_limit", CLAMP_LIMIT)
    alpha = getattr(text, "swiglu_alpha", CLAMP_ALPHA)
    if (limit, alpha) != (CLAMP_LIMIT, CLAMP_ALPHA):
        raise ModelError(
            f"the model's swiglu_limit is {limit} and its swiglu_alpha {alpha}; this version "
            f"computes {CLAMP_LIMIT} and {CLAMP_ALPHA}. Choose another checkpoint."
        )
    return reader.experts(
        text.num_local_experts,
        intermediate_size=text.intermediate_size,
        activation=Activation.CLAMPED_SWIGLU,
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
        bias=True,
        router="router",
        is_interleaved=True,
    )


def translate(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """One matrix and one bias for each projection of each expert.

    A checkpoint has them stacked, with gates and ups interleaved: matrices as [expert, in, out], or
    in MXFP4 as [expert, out, groups of in], with separate numbers and exponents.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        block, _, stacked = name.rpartition(".experts.")
        if not block:
            yield name, tensor
            continue
        projection, _, kind = stacked.rpartition("_")
        if kind in ("blocks", "scales"):
            other = waiting.pop(f"{block}.{projection}", None)
            if other is None:
                waiting[f"{block}.{projection}"] = tensor
                continue
            packed = (tensor, other) if kind == "blocks" else (other, tensor)
            for expert, both in enumerate(zip(*packed, strict=True)):
                own = f"{block}.experts.{expert}"
                yield from _of_expert(own, projection, joined(*both), KIND)
        elif kind == "bias":
            for expert, values in enumerate(tensor):
                own = f"{block}.experts.{expert}"
                yield from _of_expert(own, projection, values, "bias")
        else:
            for expert, values in enumerate(tensor):
                yield from _of_expert(f"{block}.experts.{expert}", stacked, values.T)
    if waiting:
        raise ModelError(
            f"of {', '.join(sorted(waiting))} the checkpoint has either the blocks or the scales "
            "alone; download or copy the missing file."
        )


def _of_expert(
    own: str, projection: str, rows: Tensor, kind: str = "weight"
) -> Iterator[tuple[str, Tensor]]:
    """An expert's projections, as views of its rows of the output."""
    if projection == "gate_up_proj":
        yield f"{own}.gate_proj.{kind}", rows[0::2]
        yield f"{own}.up_proj.{kind}", rows[1::2]
    else:
        yield f"{own}.{projection}.{kind}", rows


def _finish(values: Values) -> None:
    fill_head_dim(values)
    fill_kv_heads(values)
    fill_types(values, lambda layer: SLIDING if (layer + 1) % 2 else FULL)
    if values["rope_parameters"] is None:
        values["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }


ARCHITECTURES = {
    "GptOssForCausalLM": Architecture(
        {
            "gpt_oss": ConfigType(
                COMMON
                | {
                    "vocab_size": 201088,
                    "hidden_size": 2880,
                    "intermediate_size": 2880,
                    "num_hidden_layers": 36,
                    "num_attention_heads": 64,
                    "num_key_value_heads": 8,
                    "head_dim": 64,
                    "sliding_window": 128,
                    "max_position_embeddings": 131072,
                    "rms_norm_eps": 1e-5,
                    "num_local_experts": 128,
                    "num_experts_per_tok": 4,
                    "swiglu_alpha": 1.702,
                    "swiglu_limit": 7.0,
                    "attention_bias": True,
                    "layer_types": None,
                },
                _finish,
                other_names={"num_local_experts": "num_experts"},
                theta=150_000.0,
            )
        },
        describe,
        translate,
    ),
}
