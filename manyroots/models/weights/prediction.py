"""Checkpoint names of the layer that predicts tokens ahead (MTP).

Takes a checkpoint's tensors; gives those of the first such layer the decoder's names, or leaves
them out. The layer uses the model's own embedding and head, so copies of these are left out, too.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator

from torch import Tensor

PREFIX = "mtp."
_NUMBERED = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
}
"""Parts around the decoder layer, if it is numbered like the model's layers."""
_COPIES = ("embed_tokens.", "shared_head.head.", "lm_head.")
_FIRST = "layers.0."


class PredictionNames(enum.Enum):
    """How checkpoints name the layer's weights."""

    NUMBERED = enum.auto()
    """As the layer after the model's last one."""
    MTP = enum.auto()
    """Beginning with `mtp`."""


def named(
    weights: Iterable[tuple[str, Tensor]], names: PredictionNames, num_layers: int, *, is_used: bool
) -> Iterator[tuple[str, Tensor]]:
    """All weights, with the decoder's names for those of the layer if it is used. `num_layers`: of
    the model itself."""
    for name, tensor in weights:
        part = _part(name, names, num_layers)
        if part is None:
            yield name, tensor
        elif is_used and part and not part.startswith(_COPIES):
            yield PREFIX + part, tensor


def is_prediction(name: str) -> bool:
    """Whether a weight of the decoder belongs to this layer."""
    return name.startswith(PREFIX)


def _part(name: str, names: PredictionNames, num_layers: int) -> str | None:
    """A weight's name within the layer; empty if it belongs to a later one, None if to neither."""
    if names is PredictionNames.MTP:
        whole = name.removeprefix("model.")
        if not whole.startswith(PREFIX):
            return None
        part = whole.removeprefix(PREFIX)
        return "" if part.startswith("layers.") and not part.startswith(_FIRST) else part
    found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    if found is None or int(found[1]) < num_layers:
        return None
    if int(found[1]) > num_layers:
        return ""
    part = found[2]
    for theirs, ours in _NUMBERED.items():
        if part.startswith(theirs):
            return ours + part.removeprefix(theirs)
    return part if part.startswith(_COPIES) else _FIRST + part
