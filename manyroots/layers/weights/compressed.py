"""Shared by formats with scales: compressed-tensors' configs, and scales beside weights.

A weight that is unexpectedly quantized or unquantized is an error: copied without its scale, it
would be wrong.

    ....weight_scale, ....weight_scale_inv   of a weight: in the form that its format keeps
    ....input_scale and the like             of activations, which have scales of their own here:
                                             left out
    ....weight_shape, ....weight_zero_point  of packed and of asymmetric weights: refused by the
                                             loader, which does not know them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.layers.weights.fill import Fill
from manyroots.layers.weights.formats import NamedTensors

METHOD = "compressed-tensors"
_CHANGES_PRODUCTS = ("transform_config", "sparsity_config")
"""Weights that were rotated, so that their inputs must be, too; or sparse weights."""
SCALE = "weight_scale"
"""Suffix of the name of a weight's scales."""
_SCALES = (SCALE, "weight_scale_inv")
_OF_ACTIVATIONS = ("input_scale", "input_scale_ub", "output_scale", "k_scale", "v_scale", "q_scale")

Spelled = Callable[[str, Tensor, int, int], Tensor]
"""(name, scales, rows of the weight, groups of columns) -> the scales in stored form."""


def groups_of(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A compressed-tensors config's entry for weights, for each group of layers; empty if the
    config belongs to another method."""
    if said.get("quant_method") != METHOD:
        return []
    for name in _CHANGES_PRODUCTS:
        value = said.get(name)
        if value and value != {"format": "dense"}:
            raise ModelError(
                f"the checkpoint is quantized ({METHOD}) with a {name} ({str(value)[:200]}), "
                "which this version does not compute. Use a checkpoint without it."
            )
    groups = [group.get("weights") or {} for group in (said.get("config_groups") or {}).values()]
    if len({(group.get("num_bits"), group.get("type")) for group in groups}) != 1:
        refuse_several()
    return groups


def refuse_several() -> NoReturn:
    """Refuse groups of layers that differ."""
    raise ModelError(
        f"the checkpoint is quantized ({METHOD}) in several ways at once, or in none that its "
        "config names; use one that has a single group."
    )


def is_of_activations(kind: str) -> bool:
    """Whether a name with this ending is a scale of activations."""
    return kind in _OF_ACTIVATIONS


def with_scales(
    weights: NamedTensors, fills: Mapping[str, Fill], dtype: torch.dtype, spelled: Spelled
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint whose quantized ones are in `dtype`."""
    for name, tensor in weights:
        stem, _, kind = name.rpartition(".")
        if is_of_activations(kind):
            continue
        own = f"{stem}.{SCALE}"
        if kind in _SCALES:
            if own not in fills:
                raise ModelError(
                    f"{name} scales a weight that is kept unquantized here; use a checkpoint whose "
                    "embeddings, head and routers are unquantized."
                )
            num_rows = fills[f"{stem}.weight"].whole_shape[0]
            yield own, spelled(name, tensor, num_rows, fills[own].whole_shape[1])
            continue
        if kind == "weight" and (own in fills) != (tensor.dtype is dtype):
            wanted = f"{dtype}" if own in fills else "unquantized"
            raise ModelError(
                f"{name} is in {tensor.dtype}, and is expected {wanted}; use a checkpoint in which "
                "all projections of the layers are quantized and nothing else is."
            )
        yield name, tensor
