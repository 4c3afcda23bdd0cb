"""Steps of recurrent layers: decodes and prompts of odd lengths, states in shuffled units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyroots.kernels.delta_rule.inputs import DeltaGates
from manyroots.kernels.mamba.inputs import MambaSteps
from manyroots.kernels.recurrent.rows import StateRows

NUM_UNITS = 9


def make_rows(lengths: list[int], fresh: list[bool], device: torch.device) -> StateRows:
    """`lengths` of 1 in front are decodes."""
    num_decodes = next((i for i, n in enumerate(lengths) if n != 1), len(lengths))
    order = torch.randperm(NUM_UNITS, generator=torch.Generator().manual_seed(4))
    return StateRows(
        units=order[: len(lengths)].to(device),
        starts=torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0).int(),
        num_decodes=num_decodes,
        is_fresh=torch.tensor(fresh, device=device),
        max_len=max(lengths),
    )


def mixed(device: torch.device) -> StateRows:
    """Two decodes, then prompts: shorter than a convolution, a chunk and more, several chunks."""
    return make_rows([1, 1, 2, 65, 16, 150], [False, True, False, True, False, False], device)


def short(device: torch.device) -> StateRows:
    """The same for Triton's interpreter, which is slow."""
    return make_rows([1, 1, 2, 65, 16], [False, True, False, True, False], device)


def decodes(device: torch.device) -> StateRows:
    return make_rows([1, 1, 1], [False, True, False], device)


def prompts(device: torch.device) -> StateRows:
    return make_rows([3, 40], [True, False], device)


class CountedOps(TorchDispatchMode):
    """Counts what torch computes: how long it takes depends on the machine, this does not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Drawn:
    """Random tensors, one after the other the same whatever the device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device, self._dtype = device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(self._device, dtype or self._dtype)


@dataclass
class DeltaCase:
    """Inputs of `gated_delta`, as columns of wider products, which is how layers have them."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    a_log: Tensor
    dt_bias: Tensor
    state: Tensor

    @classmethod
    def draw(
        cls, num_tokens: int, draw: Drawn, *, groups: int = 2, each: int = 2, key: int = 16,
        value: int = 32,
    ) -> DeltaCase:  # fmt: skip
        heads = groups * each
        sizes = [groups * key, groups * key, heads * value]
        q, k, v = draw(num_tokens, sum(sizes)).split(sizes, dim=1)
        gates = draw(num_tokens, 2 * heads + 3)
        return cls(
            q.unflatten(1, (groups, key)),
            k.unflatten(1, (groups, key)),
            v.unflatten(1, (groups, each, value)),
            gates[:, :heads].unflatten(1, (groups, each)),
            gates[:, heads : 2 * heads].unflatten(1, (groups, each)),
            draw(heads, dtype=torch.float32),
            draw(heads, dtype=torch.float32),
            draw(NUM_UNITS, 3 * heads, key, value, dtype=torch.float32)[:, heads : 2 * heads],
        )

    @classmethod
    def by_channel(
        cls, num_tokens: int, draw: Drawn, *, heads: int = 3, key: int = 16, value: int = 32
    ) -> DeltaCase:
        """Inputs of `channel_delta`; decays are so strong that some channels forget at once."""
        sizes = [heads * key, heads * key, heads * value]
        q, k, v = draw(num_tokens, sum(sizes)).split(sizes, dim=1)
        return cls(
            q.unflatten(1, (heads, key)),
            k.unflatten(1, (heads, key)),
            v.unflatten(1, (heads, value)),
            draw(num_tokens, heads, key) * 3,
            draw(num_tokens, heads + 2)[:, :heads],
            draw(heads, dtype=torch.float32),
            draw(heads, key, dtype=torch.float32),
            draw(NUM_UNITS, 3 * heads, key, value, dtype=torch.float32)[:, heads : 2 * heads],
        )

    def inputs(self) -> tuple[Tensor | DeltaGates, ...]:
        gates = DeltaGates(self.decay, self.beta, self.a_log, self.dt_bias)
        return self.q, self.k, self.v, gates


@dataclass
class ScanCase:
    """Inputs of Mamba-2's `scan`."""

    x: Tensor
    dt: Tensor
    a_log: Tensor
    dt_bias: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    state: Tensor
    least_step: float = 0.0

    @classmethod
    def draw(
        cls, num_tokens: int, draw: Drawn, *, groups: int = 2, each: int = 3, dim: int = 16,
        state: int = 32,
    ) -> ScanCase:  # fmt: skip
        heads = groups * each
        sizes = [heads * dim, groups * state, groups * state]
        x, b, c = draw(num_tokens, sum(sizes)).split(sizes, dim=1)
        return cls(
            x.unflatten(1, (heads, dim)),
            draw(num_tokens, heads + 3)[:, :heads],
            draw(heads, dtype=torch.float32),
            draw(heads, dtype=torch.float32),
            b.unflatten(1, (groups, state)),
            c.unflatten(1, (groups, state)) * state**-0.5,
            draw(heads, dtype=torch.float32),
            draw(NUM_UNITS, 2 * heads, dim, state, dtype=torch.float32)[:, :heads],
        )

    def inputs(self) -> tuple[Tensor | MambaSteps, ...]:
        steps = MambaSteps(self.dt, self.a_log, self.dt_bias, self.d, self.least_step)
        return self.x, self.b, self.c, steps
