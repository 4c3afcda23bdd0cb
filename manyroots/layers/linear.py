"""Matrix products with weights stored as checkpoints store them: [out, in].

Takes activations [num_tokens, in]; gives [num_tokens, out]. `FusedLinear` keeps several
projections of one input in one weight, so that they are one product; each part is still a
destination of its own for the loader. Knows nothing of what the weights mean.

This is the one place that multiplies by a weight. Adapters attach here: a product is one site,
and `lora_parts` says under which names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.lora.batch import AdapterBatch
from manyroots.layers.lora import add_linear
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_sites import LoraSite, SitePart


def _empty_weight(
    in_features: int, out_features: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[out, in]. A CPU's float32 weights lie in memory the other way around: products of 4 to 128
    rows, which decoding is made of, take a half to four fifths of the time so (measured)."""
    if device.type == "cpu" and dtype is torch.float32:
        return torch.empty(in_features, out_features, dtype=dtype, device=device).t()
    return torch.empty(out_features, in_features, dtype=dtype, device=device)


class Linear:
    """y = x W^T + b."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weight = _empty_weight(in_features, out_features, dtype, device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.site = LoraSite(TargetKind.LINEAR, in_features, {"": out_features})

    def __call__(self, x: Tensor, adapters: AdapterBatch | None) -> Tensor:
        return add_linear(F.linear(x, self.weight, self.bias), x, self.site, adapters)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensors for the projection `name` go."""
        yield f"{name}.weight", self.weight
        if self.bias is not None:
            yield f"{name}.bias", self.bias

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """What adapters may change of the projection `name`."""
        yield from self.site.targets(name)


class FusedLinear(Linear):
    """Several projections of the same input, one after the other in the output."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype, device=device)
        self.site = LoraSite(TargetKind.LINEAR, in_features, parts)
        ends = list(accumulate(parts.values()))
        self._rows = {
            name: slice(end - size, end)
            for (name, size), end in zip(parts.items(), ends, strict=True)
        }

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """As for `Linear`, each part under its own name in the folder `name`."""
        for part, rows in self._rows.items():
            yield f"{name}.{part}.weight", self.weight[rows]
            if self.bias is not None:
                yield f"{name}.{part}.bias", self.bias[rows]
