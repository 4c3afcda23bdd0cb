"""One naming of experts' weights for any checkpoint.

Takes (checkpoint name, tensor) pairs; gives them with stacked experts split, as views, into one
matrix per expert. Everything else passes through.

    ...experts.gate_up_proj  [experts, 2 * inter, hidden]  ->  ...experts.E.gate_proj.weight
                                                               ...experts.E.up_proj.weight
    ...experts.down_proj     [experts, hidden, inter]      ->  ...experts.E.down_proj.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def per_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same weights, with no stacks."""
    for name, tensor in weights:
        block, _, stacked = name.rpartition(".experts.")
        parts = _PARTS.get(stacked.removesuffix(".weight"))
        if not block or parts is None or tensor.ndim != 3:
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.tensor_split(len(parts)), strict=True):
                yield f"{block}.experts.{expert}.{part}.weight", rows
