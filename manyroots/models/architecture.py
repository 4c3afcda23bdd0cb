"""The description of an architecture in its file, and config rules that several share.

`models/<name>.py` has one `ARCHITECTURES`, by the name in a checkpoint's config. Each entry defines
how that config is completed and checked, how it describes the model, and how a checkpoint or a GGUF
file names the weights. Defaults and rules are those of transformers' config classes. A rule raises
ValueError for fields that contradict each other.
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
from manyroots.models.weights.prediction import PredictionNames

Values = dict[str, Any]
Tensors = Iterable[tuple[str, Tensor]]
LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class ConfigType:
    """One model type: its fields' defaults and rules."""

    defaults: Mapping[str, Any]
    finish: Callable[[Values], None] = lambda values: None
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Fields with a second name. The second name wins, and the value can be read under both."""
    may_be_null: tuple[str, ...] = ()
    """Head counts with a default for which null means the default."""
    theta: float = 10_000.0
    partial: float | None = None
    """The rotated share of each head unless the file has one."""
    has_ropes_by_type: bool = False
    """Whether each type of layer has its own rotary base."""
    local_theta: float = 10_000.0
    """In that case, the base of layers with a window."""
    text: str | None = None
    """The type of the text model, for a model with vision."""


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How GGUF files of an architecture differ from the common form."""

    name: str
    """The value of `general.architecture`."""
    model_type: str
    config: Callable[[GGUFFile, Values], Values] = lambda file, values: {}
    """Config fields beyond those of all files, which are passed in."""
    is_meant: Callable[[GGUFFile], bool] = lambda file: True
    """Whether a file belongs to this architecture, if several share a name."""
    theta: float = 10_000.0
    """The rotary base if a file omits it."""
    in_block: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's tensors that differ from the usual ones."""
    restore: Callable[[str, Tensor, ModelSpec], Tensor] = lambda part, tensor, spec: tensor
    """Undoes the converter's changes to a part's numbers."""
    reads: tuple[str, ...] = ()
    """Keys, without the architecture's name, that `config` reads and others refuse."""
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of model."""

    configs: Mapping[str, ConfigType]
    """By the model types whose configs it reads; the first has the same name."""
    describe: Callable[[ConfigReader], ModelSpec]
    translate: Callable[[Tensors], Iterator[tuple[str, Tensor]]] = per_expert
    """A checkpoint's tensors with the names, and in the pieces, of the decoder's weights."""
    prediction: PredictionNames | None = None
    """How checkpoints name the layer that predicts tokens ahead (MTP); None if this version
    computes none."""
    fields: Mapping[str, Field] = field(default_factory=dict)
    """Allowed values of fields that only this architecture reads."""
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
    """Fill in `layer_types` by a rule, if the file has none."""
    if values["layer_types"] is None:
        values["layer_types"] = [rule(layer) for layer in range(values["num_hidden_layers"])]


def renamed(names: Mapping[str, str]) -> Callable[[Tensors], Iterator[tuple[str, Tensor]]]:
    """A translation from parts of a checkpoint's tensor names to the decoder's."""

    def translate(weights: Tensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            yield name, tensor

    return translate
