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

_MODEL_TYPES = {
    "LlamaForCausalLM": ("llama",),
    "MistralForCausalLM": ("mistral", "ministral"),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3",),
    "Qwen3MoeForCausalLM": ("qwen3_moe",),
}
"""Whose configs an architecture can read. `ministral` is what transformers makes of a Mistral whose
config types its layers."""
_BY_MODEL_TYPE = {types[0]: name for name, types in _MODEL_TYPES.items()}


def architecture_of(config: Any) -> str:
    """The name a config goes by; configs that leave it out go by their model type."""
    names = getattr(config, "architectures", None) or []
    if not names:
        return _BY_MODEL_TYPE.get(config.model_type, str(config.model_type))
    name = str(names[0])
    types = _MODEL_TYPES.get(name)
    if types is not None and config.model_type not in types:
        raise ModelError(
            f"the model's architecture is {name!r} and its model_type {config.model_type!r}, which "
            f"belong to different models; {name} has {types[0]!r}. Correct one of them in its "
            "config.json."
        )
    return name


def model_class(architecture: str) -> type[Llama]:
    """The class for an architecture, or a ModelError that lists those there are."""
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        raise ModelError(
            f"the model's architecture is {architecture!r}; this version serves "
            f"{', '.join(ARCHITECTURES)}."
        ) from None
