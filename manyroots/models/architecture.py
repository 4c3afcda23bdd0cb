"""What an architecture's file says of it, and the rules of configs that several of them share.

`models/<name>.py` has one `ARCHITECTURES`: by the name in a checkpoint's config, how that config is
completed and checked, how it describes the model, and how a checkpoint or a GGUF file spells the
weights. Defaults and rules are those of transformers' config classes. A rule raises ValueError for
fields that do not go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from manyroots.models.fields import Field
from manyroots.models.spec import ConfigReader, ModelSpec
from manyroots.models.weights.experts import per_expert
from manyroots.models.weights.gguf_file import GGUFFile

Values = dict[str, Any]
Tensors = Iterable[tuple[str, Tensor]]
LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class ConfigType:
    """One model type: its fields' defaults, and what it makes of them."""

    defaults: Mapping[str, Any]
    finish: Callable[[Values], None] = lambda values: None
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Fields that may be written under a second name, which wins, and are read under both."""
    may_be_null: tuple[str, ...] = ()
    """Of the heads' numbers that have a default: those for which null is another way to leave
    them out."""
    theta: float = 10_000.0
    partial: float | None = None
    """How much of each head is turned unless the file says it."""
    has_ropes_by_type: bool = False
    """Whether each type of layer turns by a base of its own."""
    local_theta: float = 10_000.0
    """Then, that of layers with a window."""
    text: str | None = None
    """The type of the text model, where a model also sees."""


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How GGUF files of an architecture differ from what all of them have."""

    name: str
    """What `general.architecture` says."""
    model_type: str
    config: Callable[[GGUFFile, Values], Values] = lambda file, values: {}
    """What the config has beside the fields of all files, which are given."""
    is_meant: Callable[[GGUFFile], bool] = lambda file: True
    """Whether a file is of this architecture, where several have one name."""
    theta: float = 10_000.0
    """The rotary base that files may leave out."""
    in_block: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's tensors, where they are not the usual ones."""
    restore: Callable[[str, Tensor, ModelSpec], Tensor] = lambda part, tensor, spec: tensor
    """Undoes what the converter did to a part's numbers."""
    reads: tuple[str, ...] = ()
    """Keys, without the architecture's name, that `config` reads and others refuse."""
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of model."""

    configs: Mapping[str, ConfigType]
    """By the model types whose configs it reads; the first goes by the same name."""
    describe: Callable[[ConfigReader], ModelSpec]
    translate: Callable[[Tensors], Iterator[tuple[str, Tensor]]] = per_expert
    """A checkpoint's tensors under the names, and in the pieces, that the decoder's weights
    have."""
    has_drafting_layers: bool = False
    """Whether checkpoints have layers after the last one that guess tokens ahead; they are not
    served."""
    fields: Mapping[str, Field] = field(default_factory=dict)
    """What the fields may be that this architecture reads and no other does."""
    gguf: GgufForm | None = None


COMMON: Values = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "eos_token_id": None,
}
"""Defaults of nearly all model types."""
KV_HEADS = ("num_key_value_heads",)


def fill_head_dim(values: Values) -> None:
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]


def fill_kv_heads(values: Values) -> None:
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]


def check_whole_heads(values: Values) -> None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        raise ValueError(
            f"its hidden_size ({hidden}) is not a multiple of its num_attention_heads ({heads})."
        )


def fill_types(values: Values, rule: Callable[[int], str]) -> None:
    """`layer_types` by a rule, where the file has none."""
    if values["layer_types"] is None:
        values["layer_types"] = [rule(layer) for layer in range(values["num_hidden_layers"])]


def renamed(names: Mapping[str, str]) -> Callable[[Tensors], Iterator[tuple[str, Tensor]]]:
    """A translation: parts of tensors' names in a checkpoint, and what the decoder calls them."""

    def translate(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            yield name, tensor

    return translate
