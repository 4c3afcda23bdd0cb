"""Completes configs as transformers does: missing fields, and older spellings.

Takes the fields of a config.json, or those made from a GGUF file's metadata; gives a `Config` with
every field that its model type has. Defaults and rules are those of transformers' own config
classes (`tests/unit/models/test_configs.py` compares the two). They are not used themselves,
because importing one of them takes longer than importing torch, most of it torch's compiler.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from manyroots.models.architecture import LINEAR, ConfigType, Values
from manyroots.models.registry import CONFIG_TYPES
from manyroots.models.windows import FULL, SLIDING

_OLDER_TYPES = {"mamba": LINEAR, "attention": FULL}
"""Older names of layer types."""
_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
_SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class Config:
    """One model's fields as attributes, including those that its type does not know."""

    model_type: str
    dtype: torch.dtype | None

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not fields.
        raise AttributeError(f"the config has no {name}")

    def get_text_config(self) -> Config:
        """The config of the text model, for a model with vision, or itself."""
        text = self.__dict__.get("text_config")
        return text if isinstance(text, Config) else self

    def to_dict(self) -> Values:
        """The fields as in a config.json."""
        fields = self.__dict__.items()
        values = {n: v.to_dict() if isinstance(v, Config) else v for n, v in fields}
        if values.get("dtype") is not None:
            values["dtype"] = str(values["dtype"]).removeprefix("torch.")
        return values

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)


def complete(model_type: str, written: Mapping[str, Any]) -> Config:
    """The complete config. An unsupported type is returned unchanged: its name is refused later,
    where the supported ones are known. Raises ValueError, and the errors of values with wrong
    types."""
    own: Values = _decoded(copy.deepcopy(dict(written)))
    if model_type == "mistral" and "layer_types" in own:
        model_type = "ministral"
    kind = CONFIG_TYPES.get(model_type)
    if kind is None:
        return Config(own | {"model_type": model_type})
    values: Values = {"architectures": None, "dtype": None}
    values |= copy.deepcopy(dict(kind.defaults)) | own | {"model_type": model_type}
    _pick_dtype(values)
    if kind.text is not None:
        values["text_config"] = complete(kind.text, own.get("text_config") or {})
        return Config(values)
    for name, other in kind.other_names.items():
        values[name] = values[other] = own.get(other, values[name])
    for name in {"num_key_value_heads", "head_dim"} - set(kind.may_be_null):
        if name in values and values[name] is None and kind.defaults.get(name) is not None:
            raise ValueError(f"its {name} is null; it must be a number.")
    kind.finish(values)
    if kind.has_ropes_by_type:
        _gemma_rope(values, kind)
    elif "rope_parameters" in kind.defaults:
        _one_rope(values, kind)
    if values.get("layer_types") is not None:
        _check_types(values)
    return Config(values)


def _decoded(value: Any) -> Any:
    """JSON has no infinity; transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return _SPECIAL_FLOATS[value["__float__"]]
        return {name: _decoded(one) for name, one in value.items()}
    return [_decoded(one) for one in value] if isinstance(value, list) else value


def _pick_dtype(values: Values) -> None:
    if values["dtype"] is None:
        values["dtype"] = values.get("torch_dtype")
    if isinstance(said := values["dtype"], str):
        values["dtype"] = getattr(torch, said, said)
    if not isinstance(values["dtype"], torch.dtype | None):
        raise ValueError(f"its dtype is {said!r}, which is none of torch's.")


def _check_types(values: Values) -> None:
    types, count = values["layer_types"], values["num_hidden_layers"]
    values["layer_types"] = [_OLDER_TYPES.get(kind, kind) for kind in types]
    if len(types) != count:
        raise ValueError(
            f"its num_hidden_layers ({count}) must be equal to the number of layer_types "
            f"({len(types)})."
        )


def _one_rope(values: Values, kind: ConfigType) -> None:
    """`rope_parameters` of all layers, or of each type of layer, from any spelling."""
    parameters = values.get("rope_scaling") or values["rope_parameters"] or {}
    values["rope_parameters"] = parameters
    if not isinstance(parameters, dict):
        return  # refused when it is read
    types = values.get("layer_types") or ()
    nested = [parameters[name] for name in parameters if name in types]
    for part in nested or [parameters]:
        if part is not None:
            part.setdefault("rope_theta", values.get("rope_theta", kind.theta))
            partial = values.get("partial_rotary_factor", kind.partial)
            if partial is not None:
                part.setdefault("partial_rotary_factor", partial)
    _standardise(values)


def _gemma_rope(values: Values, kind: ConfigType) -> None:
    """One set for each type of layer; older files have the numbers of both as separate fields."""
    parameters = values["rope_parameters"]
    if parameters is None:
        parameters = {name: {"rope_type": "default"} for name in (SLIDING, FULL)}
    if values.get("rope_scaling") is not None:
        parameters[FULL].update(values["rope_scaling"])
    local = "rope_local_base_freq" if kind.local_theta != kind.theta else "rope_theta"
    for name, older, theta in (
        (FULL, "rope_theta", kind.theta),
        (SLIDING, local, kind.local_theta),
    ):
        if parameters.get(name) is None:
            parameters[name] = {"rope_type": "default"}
        parameters[name].setdefault("rope_theta", values.get(older, theta))
    values["rope_parameters"] = parameters
    _standardise(values)


def _standardise(values: Values) -> None:
    """The type under its newer name, and the length before scaling if the type needs it."""
    parameters, types = values["rope_parameters"], values.get("layer_types") or ()
    nested = [parameters[name] for name in parameters if name in types]
    for part in nested or [parameters]:
        if part is None:
            continue
        part.setdefault("rope_type", part.get("type", "default"))
        if part["rope_type"] in _WITH_ORIGINAL_LENGTH:
            name = "original_max_position_embeddings"
            if name in values and not nested:
                part[name] = values[name]
            part.setdefault(name, values["max_position_embeddings"])
