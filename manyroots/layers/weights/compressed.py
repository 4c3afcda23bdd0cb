"""Shared by formats with scales: compressed-tensors' configs, and scales beside weights.

Products that are kept in such a format take a weight and its scales as they are. For other
products both become plain numbers.

    ....weight_scale, ....weight_scale_inv   of a weight: in the form that its format keeps
    ....input_scale and the like             of activations, which have scales of their own here:
                                             left out
    ....weight_shape                         of a packed weight, which has that of its product:
                                             left out
    ....weight_zero_point                    of an asymmetric weight: refused by the loader, which
                                             does not know it
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from manyroots.errors import ModelError
from manyroots.layers.weights.fill import Fill
from manyroots.layers.weights.formats import NamedTensors, WeightFormat

METHOD = "compressed-tensors"
_CHANGES_PRODUCTS = ("transform_config", "sparsity_config")
"""Weights that were rotated, so that their inputs must be, too; or sparse weights."""
SCALE = "weight_scale"
"""Suffix of the name of a weight's scales."""
_SCALES = (SCALE, "weight_scale_inv")
_LEFT_OUT = (
    "activation_scale", "input_scale", "input_scale_ub", "output_scale", "k_scale", "v_scale",
    "q_scale", "weight_shape",
)  # fmt: skip


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


@dataclass(frozen=True)
class ScaledFormat(WeightFormat):
    """A format whose checkpoints have scales beside weights."""

    kinds: ClassVar[tuple[str, ...]] = ("weight",)
    """Suffixes of destinations that take a weight and its scales as one."""

    @abstractmethod
    def is_quantized(self, kind: str, tensor: Tensor) -> bool:
        """Whether a tensor whose name ends with `kind` is a weight in this format."""

    @abstractmethod
    def spelled(self, name: str, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """The scales of a weight of this shape, in the form that is kept."""

    @abstractmethod
    def numbers(self, data: Tensor, scales: Tensor) -> Tensor:
        """The plain numbers of a weight, in float32; both are in the form that is kept."""

    def as_stored(self, weights: NamedTensors) -> WeightFormat:
        """What tensors are is more reliable than a config's patterns of names."""
        left = set()
        for name, tensor in weights:
            stem, _, kind = name.rpartition(".")
            if kind == "weight" and not self.is_quantized(kind, tensor):
                left.add(stem)
        return replace(self, unquantized_names=frozenset(left))

    def unpacked(self, data: Tensor, num_columns: int) -> Tensor:
        """A weight in the form that is kept."""
        return data

    def read(
        self, weights: NamedTensors, fills: Mapping[str, Fill]
    ) -> Iterator[tuple[str, Tensor]]:
        """A weight and its scales for fills of both. For a fill of plain numbers, the two wait for
        each other, because either may come first."""
        waiting: dict[str, dict[bool, Tensor]] = {}
        for name, tensor in weights:
            stem, _, kind = name.rpartition(".")
            if kind in _LEFT_OUT:
                continue
            place, is_kept = self._place_of(stem, fills), f"{stem}.{SCALE}" in fills
            is_scale = kind in _SCALES
            is_data = tensor.ndim == 2 and self.is_quantized(kind, tensor)
            if place is None or not (is_scale or is_data):
                if kind == "weight" and is_kept:
                    self._refuse(name, tensor)
                yield name, tensor
                continue
            part = tensor if is_scale else self.unpacked(tensor, place.whole_shape[1])
            if not is_kept:
                pair = waiting.setdefault(stem, {})
                pair[is_scale] = part
                if len(pair) == 2:
                    del waiting[stem]
                    yield self.paired(stem, pair[False], pair[True], fills)
            elif is_scale:
                yield f"{stem}.{SCALE}", self.spelled(name, part, place.whole_shape)
            else:
                yield f"{stem}.weight", part
        if waiting:
            self._refuse_half(waiting)

    def paired(
        self, stem: str, data: Tensor, scales: Tensor, fills: Mapping[str, Fill]
    ) -> tuple[str, Tensor]:
        """A weight and its scales for one destination, with its name."""
        scales = self.spelled(f"{stem}.{SCALE}", scales, data.shape)
        return f"{stem}.weight", self.numbers(data, scales)

    def _place_of(self, stem: str, fills: Mapping[str, Fill]) -> Fill | None:
        """The destination of a product's weight."""
        places = (fills.get(f"{stem}.{kind}") for kind in self.kinds)
        return next((one for one in places if one is not None and len(one.shape) > 1), None)

    def _refuse_half(self, waiting: Mapping[str, Mapping[bool, Tensor]]) -> NoReturn:
        stem = min(waiting)
        weight, scales = f"a weight of {stem} in {self.name}", f"scales of {stem}"
        has, lacks = (scales, weight) if True in waiting[stem] else (weight, scales)
        raise ModelError(f"the checkpoint has {has}, and not {lacks}. Download or copy it again.")

    def _refuse(self, name: str, tensor: Tensor) -> NoReturn:
        raise ModelError(
            f"{name} is in {tensor.dtype}, and the weights that are served have it in {self.name}; "
            "use a checkpoint in which the same projections are quantized."
        )
