"""Qwen3.5, dense and with experts: the layers of Qwen3-Next, with other names for some weights.

The delta net has four projections. Checkpoints also have vision; only their text part is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from manyroots.models.architecture import Architecture, ConfigType
from manyroots.models.qwen3_next import DEFAULTS, finish, hybrid, shared_experts
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert
from manyroots.models.weights.prediction import PredictionNames

_TEXT = "model.language_model."
_OTHER_PARTS = ("model.visual.", "visual.")


def describe(reader: ConfigReader) -> ModelSpec:
    """Qwen3.5 from 0.8B to 27B."""
    block = reader.dense(bias=False)
    return hybrid(reader, [block] * reader.text.num_hidden_layers, is_fused=False)


def describe_moe(reader: ConfigReader) -> ModelSpec:
    """Qwen3.5-35B-A3B and larger. The config does not mention the weights of chosen experts: they
    always add up to one."""
    block = shared_experts(reader, renormalises=True)
    return hybrid(reader, [block] * reader.text.num_hidden_layers, is_fused=False)


def translate(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors with the names of the text model, experts one by one."""
    return per_expert(_of_text(weights))


def _of_text(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if name.startswith(_OTHER_PARTS):
            continue
        if name.startswith(_TEXT):
            name = "model." + name.removeprefix(_TEXT)
        yield name, tensor


_DENSE = ConfigType(
    DEFAULTS
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    finish,
    partial=0.25,
)
_MOE = ConfigType(
    DEFAULTS
    | {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    finish,
    partial=0.25,
)


def _seeing(text: str) -> ConfigType:
    return ConfigType({"tie_word_embeddings": False}, text=text)


def _architecture(
    configs: dict[str, ConfigType], described: Callable[[ConfigReader], ModelSpec]
) -> Architecture:
    return Architecture(configs, described, translate, prediction=PredictionNames.MTP)


ARCHITECTURES = {
    "Qwen3_5ForCausalLM": _architecture({"qwen3_5_text": _DENSE}, describe),
    "Qwen3_5ForConditionalGeneration": _architecture(
        {"qwen3_5": _seeing("qwen3_5_text")}, describe
    ),
    "Qwen3_5MoeForCausalLM": _architecture({"qwen3_5_moe_text": _MOE}, describe_moe),
    "Qwen3_5MoeForConditionalGeneration": _architecture(
        {"qwen3_5_moe": _seeing("qwen3_5_moe_text")}, describe_moe
    ),
}
