"""FP8 weights of a checkpoint: scales in the one form that `kernels/scaled.py` has.

Takes (checkpoint name, tensor) pairs and where they go; gives the same with each scale spelled out
by row. A weight that is quantized where none is expected, or the other way around, is an error:
copied as it is, it would be wrong by its scale.

    ....weight_scale, ....weight_scale_inv   of a tensor, of rows, or of blocks -> by row and group
    ....input_scale and the like             of activations, which have scales of their own here:
                                             left out
    ....k_scale, ....v_scale                 of keys and values: left out, and refused where pages
                                             are in FP8, whose numbers have no scales here
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.layers.weights.fill import Fill
from manyroots.layers.weights.formats import Fp8Format

_SCALES = ("weight_scale", "weight_scale_inv")
_OF_ACTIVATIONS = ("input_scale", "input_scale_ub", "output_scale", "k_scale", "v_scale", "q_scale")


_OF_PAGES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def with_scales_by_row(
    weights: Iterable[tuple[str, Tensor]],
    fills: Mapping[str, Fill],
    format: Fp8Format,
    has_fp8_pages: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """The weights of an FP8 checkpoint. `has_fp8_pages`: whether keys and values are kept so."""
    for name, tensor in weights:
        stem, _, kind = name.rpartition(".")
        if has_fp8_pages and name.endswith(_OF_PAGES) and bool((tensor != 1).any()):
            raise ModelError(
                f"--kv-cache-dtype is fp8, and the checkpoint has {name} of "
                f"{float(tensor.float().max()):g} for it; this version keeps keys and values "
                "without scales. Leave the flag out: pages are in the model's dtype then."
            )
        if kind in _OF_ACTIVATIONS:
            continue
        own = f"{stem}.weight_scale"
        if kind in _SCALES:
            if own not in fills:
                raise ModelError(
                    f"{name} scales a weight that is kept unquantized here; use a checkpoint whose "
                    "embeddings, head and routers are unquantized."
                )
            num_rows = fills[f"{stem}.weight"].whole_shape[0]
            yield own, _by_row(name, tensor, num_rows, fills[own].whole_shape[1], format)
            continue
        if kind == "weight" and (own in fills) != (tensor.dtype is torch.float8_e4m3fn):
            wanted = "FP8" if own in fills else "unquantized"
            raise ModelError(
                f"{name} is in {tensor.dtype}, and is expected {wanted}; use a checkpoint in which "
                "all projections of the layers are FP8 and nothing else is."
            )
        yield name, tensor


def _by_row(name: str, scales: Tensor, num_rows: int, num_groups: int, format: Fp8Format) -> Tensor:
    """float32 [num_rows, num_groups]."""
    scales = scales.float()
    if format.block is None:
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(num_rows, num_groups)
        if scales.numel() == num_rows:
            return scales.reshape(num_rows, 1)
    elif list(scales.shape) == [-(-num_rows // format.block[0]), num_groups]:
        return scales.repeat_interleave(format.block[0], 0)[:num_rows]
    raise ModelError(
        f"{name} has shape {list(scales.shape)}, which does not belong to {num_rows} rows with "
        f"{'a scale each' if format.block is None else f'blocks of {list(format.block)}'}; config "
        "and weights belong to different models."
    )
