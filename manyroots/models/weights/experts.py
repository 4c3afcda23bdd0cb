"""One naming of experts' weights for any checkpoint.

Takes (checkpoint name, tensor) pairs; gives them with stacked experts split, as views, into one
matrix per expert. Stacked scales of quantized weights are split in the same way. Everything else
passes through.

    ...experts.gate_up_proj  [experts, 2 * inter, hidden]  ->  ...experts.E.gate_proj.weight
                                                               ...experts.E.up_proj.weight
    ...experts.down_proj     [experts, hidden, inter]      ->  ...experts.E.down_proj.weight
    ...down_proj.weight_scale  [experts, hidden, 1]        ->  ...experts.E.down_proj.weight_scale
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
_STACKED = re.compile(r"(\w+?_proj)(?:\.weight)?(_scale(?:_inv)?)?")


def per_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same weights, with no stacks."""
    for name, tensor in weights:
        block, _, stacked = name.rpartition(".experts.")
        found = _STACKED.fullmatch(stacked)
        parts = _PARTS.get(found[1]) if found is not None else None
        if not block or found is None or parts is None or tensor.ndim != 3:
            yield name, tensor
            continue
        kind = f"weight{found[2] or ''}"
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(parts, _split(matrix, len(parts)), strict=True):
                yield f"{block}.experts.{expert}.{part}.{kind}", rows


def _split(matrix: Tensor, num_parts: int) -> Sequence[Tensor]:
    """The rows of each part. A single row is the scale of all of them."""
    return [matrix] * num_parts if len(matrix) == 1 else matrix.tensor_split(num_parts)
