"""Matrix products with weights stored as checkpoints store them: [out, in].

Takes activations [num_tokens, in]; gives [num_tokens, out]. `FusedLinear` keeps several
projections of one input in one weight, so that they are one product; each part is still a
destination of its own for the loader. Knows nothing of what the weights mean.

This is the one place that multiplies by a weight: adapters and tensor parallelism wrap or
replace these two classes and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


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
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensors for the projection `name` go."""
        yield f"{name}.weight", self.weight
        if self.bias is not None:
            yield f"{name}.bias", self.bias


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
        ends = list(accumulate(parts.values()))
        self._rows = {
            name: slice(end - size, end)
            for (name, size), end in zip(parts.items(), ends, strict=True)
        }

    def slots(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """As for `Linear`, each part under its own name in the folder `name`."""
        for part, rows in self._rows.items():
            yield f"{name}.{part}.weight", self.weight[rows]
            if self.bias is not None:
                yield f"{name}.{part}.bias", self.bias[rows]
