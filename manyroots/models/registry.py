"""Architecture names, as checkpoints spell them, and the classes that compute them."""

from __future__ import annotations

from typing import Any

from manyroots.errors import ModelError
from manyroots.models.llama import Llama
from manyroots.models.mistral import Mistral
from manyroots.models.qwen2 import Qwen2
from manyroots.models.qwen3 import Qwen3
from manyroots.models.qwen3_moe import Qwen3Moe

ARCHITECTURES: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}

_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def architecture_of(config: Any) -> str:
    """The name a config goes by; configs that leave it out go by their model type."""
    names = getattr(config, "architectures", None) or []
    return str(names[0]) if names else _BY_MODEL_TYPE.get(config.model_type, config.model_type)


def model_class(architecture: str) -> type[Llama]:
    """The class for an architecture, or a ModelError that lists those there are."""
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        raise ModelError(
            f"the model's architecture is {architecture!r}; this version serves "
            f"{', '.join(ARCHITECTURES)}."
        ) from None
