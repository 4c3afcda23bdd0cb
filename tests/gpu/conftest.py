"""Where a CPU has no instructions for bfloat16, torch's products of it take a hundred times as long
as those of float32. Here they are float32's, rounded: what instructions for bfloat16 give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.models.chip import this_chip


@pytest.fixture(autouse=True, scope="session")
def quick_products() -> Iterator[None]:
    if torch.cuda.is_available() or not this_chip().is_slow_at(torch.bfloat16):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        kept = F.linear

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if x.dtype is not torch.bfloat16 or x.device.type != "cpu":
                return kept(x, weight, bias)
            more = None if bias is None else bias.float()
            return kept(x.float(), weight.float(), more).to(x.dtype)

        patch.setattr(F, "linear", linear)
        yield
