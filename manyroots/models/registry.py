"""Architecture names, as in checkpoints, and the file of each."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from manyroots.errors import ModelError
from manyroots.models import fields
from manyroots.models.architecture import Architecture, ConfigType
from manyroots.models.fields import Field

_FILES = (
    "deepseek",
    "deepseek_v32",
    "deepseek_v4",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "granite",
    "granite_hybrid",
    "kimi_linear",
    "lfm2",
    "llama",
    "minicpm3",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
)
"""One line for each: `models/<name>.py` with its `ARCHITECTURES`."""


def _known() -> Iterator[tuple[str, Architecture]]:
    for name in _FILES:
        yield from import_module(f"manyroots.models.{name}").ARCHITECTURES.items()


ARCHITECTURES: dict[str, Architecture] = dict(_known())
CONFIG_TYPES: dict[str, ConfigType] = {
    model_type: known
    for architecture in ARCHITECTURES.values()
    for model_type, known in architecture.configs.items()
}
FIELDS: dict[str, Field] = dict(fields.FIELDS)
"""Every number and name that is read from a config, with its allowed values."""
for _architecture in ARCHITECTURES.values():
    _twice = FIELDS.keys() & _architecture.fields.keys()
    assert not _twice, f"{_twice} of two architectures; they belong into fields.py"
    FIELDS.update(_architecture.fields)
WRITTEN_FIELDS = FIELDS | fields.WRITTEN_FIELDS
"""The same for a config.json."""
_BY_MODEL_TYPE = {next(iter(known.configs)): name for name, known in ARCHITECTURES.items()}


def architecture_of(config: Any) -> str:
    """The architecture name of a config; configs without one use their model type."""
    names = getattr(config, "architectures", None) or []
    if not names:
        return _BY_MODEL_TYPE.get(config.model_type, str(config.model_type))
    name = str(names[0])
    known = ARCHITECTURES.get(name)
    if known is not None and config.model_type not in known.configs:
        raise ModelError(
            f"the model's architecture is {name!r} and its model_type {config.model_type!r}, which "
            f"belong to different models; {name} has {next(iter(known.configs))!r}. Correct one of "
            "them in its config.json."
        )
    return name


def known_architecture(name: str) -> Architecture:
    """The entry of an architecture; raises a ModelError that lists the supported ones."""
    try:
        return ARCHITECTURES[name]
    except KeyError:
        raise ModelError(
            f"the model's architecture is {name!r}; this version serves {', '.join(ARCHITECTURES)}."
        ) from None
