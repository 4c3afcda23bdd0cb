"""What a delta rule takes beside queries, keys and values; the same for every set of kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """How much each token forgets and writes: g = -exp(a_log) softplus(decay + dt_bias), and the
    sigmoid of beta."""

    decay: Tensor
    beta: Tensor
    """Raw products of the tokens."""
    a_log: Tensor
    dt_bias: Tensor
    """The layer's own."""

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.decay, self.beta, self.a_log, self.dt_bias
