"""Products with torch's operators against the naive reference, with biases and adapters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.ids import AdapterDigest, AdapterSlot
from manyroots.kernels.gemm import reference, torch_ops
from manyroots.kernels.lora_ops.reference import expanded
from manyroots.kernels.lora_ops.torch_ops import prepare
from manyroots.kernels.tolerances import assert_close
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_sites import LoraSite
from manyroots.store.adapter_weights import AdapterWeights, LoraPair

CPU = torch.device("cpu")
IN, OUTS = 40, {"q": 24, "k": 8}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adapter(ranks: dict[str, int], dtype: torch.dtype, seed: int) -> AdapterWeights:
    pairs = {
        f"m.{name}": LoraPair(
            draw(rank, IN, dtype=dtype, seed=seed) * IN**-0.5,
            draw(OUTS[name], rank, dtype=dtype, seed=seed + 1) * 0.5,
            0.5,
        )
        for name, rank in ranks.items()
    }
    halves = [half for pair in pairs.values() for half in (pair.a, pair.b)]
    flat = torch.cat([half.flatten() for half in halves])
    return AdapterWeights(AdapterDigest(bytes([seed])), pairs, flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("slots", [[-1, -1], [0], [-1, 0, 0, 1, 1, -1], [*[1] * 40, *[0] * 3]])
def test_a_product_with_adapters_equals_the_reference_and_leaves_nothing_to_finish(
    slots: list[int], has_bias: bool, dtype: torch.dtype
) -> None:
    site = LoraSite(TargetKind.LINEAR, IN, OUTS)
    pool = AdapterPool(
        dict(site.targets("m")), num_slots=2, max_rank=8, dtype=dtype, device=CPU
    )  # fmt: skip
    pool.load(AdapterSlot(0), adapter({"q": 3, "k": 8}, dtype, seed=5))
    pool.load(AdapterSlot(1), adapter({"k": 4}, dtype, seed=9))
    weight = draw(sum(OUTS.values()), IN, dtype=dtype, seed=1) * IN**-0.5
    bias = draw(sum(OUTS.values()), dtype=dtype, seed=2) if has_bias else None
    x = draw(len(slots), IN, dtype=dtype, seed=3)
    rows, pooled = prepare(np.array(slots), pool, CPU), pool.sites[site]
    assert torch_ops.is_for(len(slots), weight)
    out, term = torch_ops.linear(x, weight, pooled, rows, bias)
    assert term is None
    assert out.dtype is dtype
    naive, naive_term = reference.linear(x, weight, pooled, rows, bias)
    expected = naive[0] if naive_term is None else naive[0] + expanded(naive_term)
    assert_close("lora", out, expected, dtype)
