"""Which modules an adapter's config says were trained, held against those in its file.

Takes the config, the model's targets and the file's pairs. Weights that PEFT would not use are
refused, and so are modules that were trained and of which the file has no weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from manyroots.errors import AdapterError
from manyroots.lora.files.config import AdapterConfig
from manyroots.lora.files.keys import Spelling, spellings
from manyroots.lora.files.pairs import Factors, PairLayout, named
from manyroots.lora.files.patterns import WholeName, endings
from manyroots.lora.targets import Target, TargetKind, Targets

DEFAULTS = ("q_proj", "v_proj")
"""What PEFT takes where `target_modules` is null, of every model type for which it has a word."""
ALL_LINEAR = "all-linear"
"""PEFT's word for every linear module but the head."""
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
_LAYER = re.compile(r"\.(\d{1,9})\.")

Named = Callable[[list[str]], bool]
"""Whether the config takes a module of the model, by what it may be called."""


def check_trained(
    config: AdapterConfig,
    targets: Targets,
    factors: Factors,
    pairs: dict[str, PairLayout],
    spelling: Spelling,
) -> None:
    """What the config says was trained exists in the model, and is in the file, whose spelling of
    names is given."""
    chosen = config.target_modules
    if chosen is None:
        _check_defaults(config, targets, pairs, spelling)
    elif isinstance(chosen, tuple):
        if not (spelling.has_images and config.is_partial):
            # Else they may be of the part that sees, and left out.
            _refuse_unknown(config, chosen, targets, factors)
        _check_named(
            config, targets, pairs, spelling, lambda names: _in_list(names, chosen, config.layers)
        )
    elif chosen.lower() == ALL_LINEAR:
        # Which routers and experts are linear modules depends on transformers' version, so that
        # what is missing can't be told.
        _refuse_left_out(
            config,
            _plain(pairs, targets),
            spelling,
            lambda names: (
                targets[names[0]].kind is TargetKind.LINEAR
                and (names[0] != _HEAD or spelling.is_head_linear)
            ),
        )
    elif (expression := WholeName("target_modules", chosen)).can_match:
        _check_named(
            config, targets, pairs, spelling, lambda names: any(map(expression.matches, names))
        )


def _check_defaults(
    config: AdapterConfig, targets: Targets, pairs: dict[str, PairLayout], spelling: Spelling
) -> None:
    def is_default(names: list[str]) -> bool:
        return _in_list(names, DEFAULTS, config.layers)

    others = [
        name
        for name in pairs
        if not (is_default(spellings(name)) or _is_parameter(name, config))
        and (targets[name].kind is not TargetKind.EXPERTS or not config.target_parameters)
    ]
    if others:
        raise AdapterError(
            f"target_modules is null, by which PEFT means {' and '.join(DEFAULTS)}, and the file "
            f"has weights for {named(others)}: PEFT would not use them. Name the modules that were "
            "trained in target_modules."
        )
    if config.target_parameters:
        # PEFT has no defaults for some models, and then these are all there is.
        _refuse_left_out(config, _plain(pairs, targets), spelling, is_default)
    else:
        _check_named(config, targets, pairs, spelling, is_default)


def _check_named(
    config: AdapterConfig,
    targets: Targets,
    pairs: dict[str, PairLayout],
    spelling: Spelling,
    is_named: Named,
) -> None:
    """Both ways: nothing beside what is named, and all of it unless some was left out."""
    _refuse_left_out(config, _plain(pairs, targets), spelling, is_named)
    if config.is_partial:
        return
    missing = [
        name
        for name, target in targets.items()
        if name not in pairs and _is_plain(target) and is_named(spelling.names(name))
    ]
    if missing:
        raise AdapterError(
            f"target_modules includes {named(missing)}, for which the file has no weights; it is "
            "incomplete. Save the adapter again."
        )


def _refuse_unknown(
    config: AdapterConfig, chosen: tuple[str, ...], targets: Targets, factors: Factors
) -> None:
    unknown = sorted(set(chosen) - {name.rpartition(".")[2] for name in targets})
    if unknown:
        in_file = [factor for sides in factors.values() for factor in sides.values()]
        file_modules = (name for factor in in_file for name in (factor.module, factor.spelled))
        names = (*targets, *file_modules, *config.target_parameters)
        known = {end for name in names for end in _all_endings(name)}
        unknown = sorted(set(unknown) - known)
    if unknown:
        raise AdapterError(
            f"target_modules names {named(unknown)}, which this model does not let adapters "
            "change. Use an adapter that was trained for this model."
        )


def _refuse_left_out(
    config: AdapterConfig, names: list[str], spelling: Spelling, is_named: Named
) -> None:
    """Weights that PEFT would not use, because its config does not name their modules."""
    is_excluded = _excluded(config)
    has_tied = config.ties_head and _EMBEDDING in names
    if has_tied and _HEAD not in names:
        raise AdapterError(
            f"ensure_weight_tying is True and the file has weights for {_EMBEDDING} alone, not for "
            f"{_HEAD}; it is incomplete. Save the adapter again, or set ensure_weight_tying to "
            "false if it was trained on a model whose head is not tied."
        )
    left_out = [
        name
        for name in names
        if not (has_tied and name == _HEAD)
        and not _is_parameter(name, config)
        and (
            is_excluded(spelling.names(name))
            or not is_named([*spellings(name), *spelling.names(name)])
        )
    ]
    if left_out:
        raise AdapterError(
            f"the file has weights for {named(left_out)}, which its config leaves out "
            "(target_modules, layers_to_transform, exclude_modules): PEFT would not use them. "
            "Correct the config, or remove the weights."
        )


def _excluded(config: AdapterConfig) -> Named:
    excluded = config.excluded
    if isinstance(excluded, tuple):
        return lambda names: not _endings_of(names).isdisjoint(excluded)
    expression = WholeName("exclude_modules", excluded)
    if not expression.can_match:
        return lambda names: False
    return lambda names: any(map(expression.matches, names))


def _in_list(names: list[str], chosen: tuple[str, ...], layers: tuple[int, ...] | None) -> bool:
    if not set(names).isdisjoint(chosen):
        return True  # by its whole name, as the head is: in whichever layer
    layer = _LAYER.search(names[0])
    if layers is not None and (layer is None or int(layer[1]) not in layers):
        return False
    return not _endings_of(names).isdisjoint(chosen)


def _is_parameter(name: str, config: AdapterConfig) -> bool:
    """Whether it was trained as a parameter, which its module need not be named for."""
    parameters = set(config.target_parameters)
    return any(f"{end}.weight" in parameters for end in _all_endings(name))


def _plain(pairs: dict[str, PairLayout], targets: Targets) -> list[str]:
    return [name for name in pairs if _is_plain(targets[name])]


def _is_plain(target: Target) -> bool:
    """Whether its module has one name; experts' have many."""
    return target.kind is not TargetKind.EXPERTS


def _all_endings(name: str) -> set[str]:
    return _endings_of(spellings(name))


def _endings_of(names: list[str]) -> set[str]:
    return {end for name in names for end in endings(name)}
