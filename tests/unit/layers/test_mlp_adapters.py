"""A feed-forward block of many tokens with adapters, which a CPU computes in pieces, equals the
block whose weights have each token's adapter merged."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.ids import NO_ADAPTER, AdapterSlot
from manyroots.kernels.activation.kinds import Activation
from manyroots.kernels.lora_ops.torch_ops import prepare
from manyroots.kernels.scaled import plain
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.mlp import GatedMLP
from manyroots.layers.spec import DenseSpec
from manyroots.layers.step import Step
from manyroots.store.adapter_pool import AdapterPool
from tests.unit.host_copies import host_copy
from tests.unit.layers.contexts import cpu_context

CPU = torch.device("cpu")
HIDDEN, INNER = 32, 24
SPEC = DenseSpec(intermediate_size=INNER, activation=Activation.SILU, bias=False)
SIZES = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def pairs_of(slot: int) -> dict[str, tuple[Tensor, Tensor, float]]:
    return {
        f"mlp.{name}": (
            draw(slot, 2 + slot, num_in),
            draw(slot + 9, num_out, 2 + slot),
            0.5 + slot,
        )
        for name, (num_in, num_out) in SIZES.items()
    }


def merged(block: GatedMLP, x: Tensor, slot: int) -> Tensor:
    """Naively, of rows of one adapter."""
    gate_up, down = (plain(linear.weight.data, x.dtype) for linear in block.products())
    gate, up = torch.split(gate_up, INNER)
    weights = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    if slot != NO_ADAPTER:
        for name, (a, b, scaling) in pairs_of(slot).items():
            short = name.removeprefix("mlp.")
            weights[short] = weights[short] + scaling * b @ a
    hidden: Tensor = F.silu(x @ weights["gate_proj"].t()) * (x @ weights["up_proj"].t())
    return torch.matmul(hidden, weights["down_proj"].t())


def test_many_tokens_with_adapters_are_each_multiplied_with_their_own() -> None:
    """Decodes of three adapters, prompts of two of them that end within pieces, and base rows."""
    block = GatedMLP(SPEC, cpu_context(HIDDEN))
    for seed, linear in enumerate(block.products()):
        weight = plain(linear.weight.data, torch.float32)
        weight.copy_(draw(seed + 50, *weight.shape))
    pool = AdapterPool(
        dict(block.lora_parts("mlp")), num_slots=3, max_rank=8, dtype=torch.float32, device=CPU
    )
    for slot in range(3):
        pool.load(AdapterSlot(slot), host_copy(pairs_of(slot), f"adapter {slot}"))
    for linear in block.products():
        linear.pooled = pool.sites[linear.site]
    slots = np.array([-1, 0, 0, 1, 2, *[-1] * 30, *[0] * 200, *[2] * 260])
    assert len(slots) > 2 * block._kernels.gemm.ROWS_AT_ONCE
    for _ in range(2):  # decodes are computed together the second time
        rows = prepare(slots, pool, CPU)
    x = draw(99, len(slots), HIDDEN)
    product = block(x, Step(ropes=(), memories=(), lora=rows))
    own = product.finished(block._kernels)
    for slot in (-1, 0, 1, 2):
        at = torch.from_numpy(slots == slot)
        assert_close("lora", own[at], merged(block, x[at], slot), torch.float32)
