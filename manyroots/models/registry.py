"""Architecture names, as checkpoints spell them, and how each is described and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.models import (
    falcon_h1,
    gemma3,
    gpt_oss,
    granite_hybrid,
    lfm2,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert

Tensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of model."""

    model_types: tuple[str, ...]
    """Whose configs it can read; the first is the one that goes by the same name."""
    describe: Callable[[ConfigReader], ModelSpec]
    translate: Callable[[Tensors], Iterator[tuple[str, Tensor]]] = per_expert
    """A checkpoint's tensors under the names, and in the pieces, that the decoder's weights
    have."""


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(("llama",), llama.describe),
    # `ministral` is what transformers makes of a Mistral whose config types its layers.
    "MistralForCausalLM": Architecture(("mistral", "ministral"), mistral.describe),
    "Qwen2ForCausalLM": Architecture(("qwen2",), qwen2.describe),
    "Qwen3ForCausalLM": Architecture(("qwen3",), qwen3.describe),
    "Qwen3MoeForCausalLM": Architecture(("qwen3_moe",), qwen3_moe.describe),
    "Gemma3ForCausalLM": Architecture(("gemma3_text",), gemma3.describe, gemma3.translate),
    "Gemma3ForConditionalGeneration": Architecture(("gemma3",), gemma3.describe, gemma3.translate),
    "GptOssForCausalLM": Architecture(("gpt_oss",), gpt_oss.describe, gpt_oss.translate),
    "Lfm2ForCausalLM": Architecture(("lfm2",), lfm2.describe, lfm2.translate),
    "FalconH1ForCausalLM": Architecture(("falcon_h1",), falcon_h1.describe, falcon_h1.translate),
    "GraniteMoeHybridForCausalLM": Architecture(
        ("granitemoehybrid",), granite_hybrid.describe, granite_hybrid.translate
    ),
    "Qwen3NextForCausalLM": Architecture(
        ("qwen3_next",), qwen3_next.describe, qwen3_next.translate
    ),
    "Qwen3_5ForCausalLM": Architecture(("qwen3_5_text",), qwen3_5.describe, qwen3_5.translate),
    "Qwen3_5ForConditionalGeneration": Architecture(
        ("qwen3_5",), qwen3_5.describe, qwen3_5.translate
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        ("qwen3_5_moe_text",), qwen3_5.describe_moe, qwen3_5.translate
    ),
    "Qwen3_5MoeForConditionalGeneration": Architecture(
        ("qwen3_5_moe",), qwen3_5.describe_moe, qwen3_5.translate
    ),
}
_BY_MODEL_TYPE = {known.model_types[0]: name for name, known in ARCHITECTURES.items()}


def architecture_of(config: Any) -> str:
    """The name a config goes by; configs that leave it out go by their model type."""
    names = getattr(config, "architectures", None) or []
    if not names:
        return _BY_MODEL_TYPE.get(config.model_type, str(config.model_type))
    name = str(names[0])
    known = ARCHITECTURES.get(name)
    if known is not None and config.model_type not in known.model_types:
        raise ModelError(
            f"the model's architecture is {name!r} and its model_type {config.model_type!r}, which "
            f"belong to different models; {name} has {known.model_types[0]!r}. Correct one of them "
            "in its config.json."
        )
    return name


def known_architecture(name: str) -> Architecture:
    """How to read an architecture, or a ModelError that lists those there are."""
    try:
        return ARCHITECTURES[name]
    except KeyError:
        raise ModelError(
            f"the model's architecture is {name!r}; this version serves {', '.join(ARCHITECTURES)}."
        ) from None
