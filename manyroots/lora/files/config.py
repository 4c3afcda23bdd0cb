"""`adapter_config.json`: what PEFT wrote about an adapter, checked option by option.

Every option that changes what an adapter computes is either honoured or refused; one that this
file does not know is refused if it is set, since its effect is unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyroots.errors import AdapterError
from manyroots.lora.files.opened import AdapterFile
from manyroots.lora.files.options import refuse_unsupported
from manyroots.lora.files.patterns import Patterns
from manyroots.lora.files.strict_json import parse_object

MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of the config that is honoured."""

    rank: int
    """Where no pattern says otherwise; as is `alpha`."""
    alpha: float
    is_rank_stabilised: bool
    """rsLoRA: alpha / sqrt(rank)."""
    ranks: Patterns[int]
    alphas: Patterns[float]
    target_modules: tuple[str, ...] | str | None
    """Names or endings of names; or an expression for whole names, or PEFT's word for all linear
    modules; None: PEFT's defaults."""
    is_partial: bool
    """Some of the modules that `target_modules` names were left out on purpose."""
    layers: tuple[int, ...] | None
    """Those that were trained; None: all, or the file says it otherwise."""
    excluded: tuple[str, ...] | str
    """Names or endings of names of modules that were not, or an expression for whole names."""
    ties_head: bool
    """A tied head has the embedding's adapter, turned around; both are in the file."""
    target_parameters: tuple[str, ...]
    """Stacked weights of experts that were trained as parameters."""
    invocation_tokens: tuple[int, ...] | None
    base_model: str | None

    @property
    def has_patterns(self) -> bool:
        """Whether modules differ at all."""
        return bool(self.ranks or self.alphas)

    def rank_of(self, module: str) -> int:
        found = self.ranks.find(module)
        return self.rank if found is None else found

    def scaling_of(self, module: str) -> float:
        """By the rank that the config gives, which is that of the weights."""
        found = self.alphas.find(module)
        alpha = self.alpha if found is None else found
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def pattern_name(self, target: str) -> str:
        """What PEFT's patterns are matched with: the module's name, or the parameter's where it
        was trained as one."""
        parameter = f"{target}.weight"
        return parameter if is_named(parameter, self.target_parameters) else target

    def refuse_unused_patterns(self, modules: Iterable[str]) -> None:
        """Refuse a key that matched no module of the file and none of `modules`, the model's."""
        names = list(modules) if self.has_patterns else []
        self.ranks.refuse_unused(names)
        self.alphas.refuse_unused(names)

    def canonical(self) -> bytes:
        """What matters for the digest, in one form. The order of patterns matters."""
        fields = {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.is_rank_stabilised,
            "rank_pattern": list(self.ranks.items()),
            "alpha_pattern": list(self.alphas.items()),
            "alora_invocation_tokens": self.invocation_tokens,
            "target_parameters": sorted(self.target_parameters),
        }
        return json.dumps(fields, sort_keys=True).encode()


def read_config(file: AdapterFile) -> AdapterConfig:
    if file.num_bytes > MAX_CONFIG_BYTES:
        raise AdapterError(
            f"{file.path} has {file.num_bytes} bytes; a config has at most {MAX_CONFIG_BYTES}. "
            "Check that it is the file that PEFT wrote."
        )
    file.refuse_pointer()
    fields = parse_object(file.read(0, file.num_bytes), str(file.path))
    try:
        return parse_config(fields)
    except AdapterError as error:
        raise AdapterError(f"{file.path}: {error}") from error


def parse_config(fields: Mapping[str, Any]) -> AdapterConfig:
    refuse_unsupported(fields)
    left_out = ("exclude_modules", "layers_to_transform", "layers_pattern")
    return AdapterConfig(
        rank=_rank("r", fields.get("r", 8)),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha", 8)),
        is_rank_stabilised=_flag(fields, "use_rslora"),
        ranks=Patterns("rank_pattern", _pattern(fields, "rank_pattern", _rank)),
        alphas=Patterns("alpha_pattern", _pattern(fields, "alpha_pattern", _alpha)),
        target_modules=_target_modules(fields),
        is_partial=any(fields.get(name) not in (None, [], "") for name in left_out),
        layers=_layers(fields.get("layers_to_transform")),
        excluded=_named("exclude_modules", fields.get("exclude_modules")) or (),
        ties_head=_flag(fields, "ensure_weight_tying"),
        target_parameters=_strings("target_parameters", fields.get("target_parameters") or []),
        invocation_tokens=_invocation_tokens(fields.get("alora_invocation_tokens")),
        base_model=_base_model(fields.get("base_model_name_or_path")),
    )


def is_named(parameter: str, target_parameters: Sequence[str]) -> bool:
    """Whether PEFT's `target_parameters` names this one."""
    return any(parameter == name or parameter.endswith(f".{name}") for name in target_parameters)


def check_invocation_tokens(tokens: tuple[int, ...] | None, vocab_size: int) -> None:
    """Tokens that no prompt can have would make an adapter that never acts."""
    for token in tokens or ():
        if token >= vocab_size:
            raise AdapterError(
                f"alora_invocation_tokens has {token}, beyond the model's vocabulary of "
                f"{vocab_size}; use an adapter that was trained for this model."
            )


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(
            f"{name} is {repr(value)[:100]}; a rank is a whole number of at least 1."
        )
    return value


def _alpha(name: str, value: Any) -> float:
    try:
        alpha = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        alpha = math.inf
    if not math.isfinite(alpha):
        raise AdapterError(f"{name} is {repr(value)[:100]}; it must be a finite number.")
    return alpha


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise AdapterError(f"{name} is {repr(value)[:100]}; it must be true or false.")
    return bool(value)


def _pattern(fields: Mapping[str, Any], name: str, check: Any) -> dict[str, Any]:
    values = fields.get(name) or {}
    if not isinstance(values, dict):
        raise AdapterError(
            f"{name} is {repr(values)[:100]}; it must be an object of numbers by module."
        )
    return {key: check(f"{name}[{key[:200]!r}]", value) for key, value in values.items()}


def _target_modules(fields: Mapping[str, Any]) -> tuple[str, ...] | str | None:
    value = fields.get("target_modules")
    if isinstance(value, str) and fields.get("layers_to_transform") is not None:
        raise AdapterError(
            f"layers_to_transform is {repr(fields['layers_to_transform'])[:100]} and "
            f"target_modules an expression ({value[:200]!r}); PEFT takes it with a list of names "
            "alone. Remove it, or list the modules' names."
        )
    return _named("target_modules", value)


def _named(field: str, value: Any) -> tuple[str, ...] | str | None:
    return value if value is None or isinstance(value, str) else _strings(field, value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(
        isinstance(item, str) and item.isprintable() for item in value
    ):
        raise AdapterError(f"{name} is {repr(value)[:100]}; it must be a list of names.")
    return tuple(value)


def _invocation_tokens(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or not value
        or not all(type(token) is int and token >= 0 for token in value)
    ):
        raise AdapterError(
            f"alora_invocation_tokens is {repr(value)[:100]}; it must be a list of token ids with "
            "at least one."
        )
    return tuple(value)


def _layers(value: Any) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    found = value if isinstance(value, list) else [value]
    if not all(type(layer) is int for layer in found):
        raise AdapterError(
            f"layers_to_transform is {repr(value)[:100]}; it must be a layer or a list of layers."
        )
    return tuple(found)


def _base_model(value: Any) -> str | None:
    return value[:1000] if isinstance(value, str) and value.isprintable() and value else None
