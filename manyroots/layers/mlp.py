"""The gated feed-forward block: down(act(gate(x)) * up(x)).

Takes and gives [num_tokens, hidden_size].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.kernels.lora.batch import AdapterBatch
from manyroots.layers.linear import FusedLinear, Linear
from manyroots.store.adapter_sites import SitePart

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def activation_named(name: str) -> Callable[[Tensor], Tensor]:
    """The function a config calls `name`."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"the model's hidden_act is {name!r}; this version computes {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


class GatedMLP:
    """Gate and up are one matrix product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._activation = activation_named(activation)
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = FusedLinear(hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor, adapters: AdapterBatch | None) -> Tensor:
        gate, up = self.gate_up(x, adapters).chunk(2, dim=-1)
        return self.down(self._activation(gate).mul_(up), adapters)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensors for the block `name` go."""
        yield from self.gate_up.weights(name)
        yield from self.down.weights(f"{name}.down_proj")

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """What adapters may change of the block `name`."""
        yield from self.gate_up.lora_parts(name)
        yield from self.down.lora_parts(f"{name}.down_proj")
