"""Attention of long prompts on Hopper GPUs against the naive reference, and what is sent there.

Triton's interpreter can't run that kernel. Where there is no such GPU, the cases run through the
kernel that takes what it does not; `python -m tests.gpu.check kernels:hopper` is for the GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.paged_cases import SCALE, pages_for
from tests.unit.kernels.triton_cases import DEVICE, randn

from manyroots.kernels.attention import reference, triton_hopper  # isort: skip
from manyroots.kernels.attention import triton as fast  # isort: skip
from manyroots.kernels.attention.paged import PrefillSegments, query_blocks  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

IS_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
SEGMENTS = [[(5, 5), (20, 45), (130, 140)]]
if IS_HOPPER:
    SEGMENTS += [
        [(300, 700), (5, 5), (129, 1000), (1, 1)],
        [(128, 128), (1, 129), (64, 256), (140, 140), (1, 640)],
        [(1700, 1700)],
    ]


def batch_of(segments: list[tuple[int, int]], table: torch.Tensor) -> PrefillSegments:
    """With a block of padding, as steps in graphs have them."""
    starts, lens = [0], [context for _, context in segments]
    for num_queries, _ in segments:
        starts.append(starts[-1] + num_queries)
    blocks = torch.from_numpy(query_blocks(starts, lens))
    blocks = torch.cat([blocks, torch.tensor([[0, starts[-1]]], dtype=torch.int32)])
    return PrefillSegments(
        table,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        blocks.to(DEVICE),
    )


@pytest.mark.parametrize(("heads", "kv_heads", "page"), [(4, 1, 16), (2, 2, 128)])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_long_prompts_see_what_they_should_and_nothing_else(
    segments: list[tuple[int, int]], heads: int, kv_heads: int, page: int
) -> None:
    """Slots after the last token of a page hold NaN; table entries after the last page are no
    pages."""
    dtype = torch.bfloat16 if IS_HOPPER else torch.float32
    lens = [context for _, context in segments]
    layer_kv, table = pages_for(lens, kv_heads, triton_hopper.HEAD_DIM, dtype, page=page)
    for row, length in enumerate(lens):
        table[row, -(-length // page) :] = 10**8
    batch = batch_of(segments, table)
    q = randn(int(batch.query_starts[-1]), heads, triton_hopper.HEAD_DIM, dtype=dtype)
    attend = triton_hopper.prefill_attention if IS_HOPPER else fast.prefill_attention
    out = attend(q, layer_kv, batch, SCALE)
    assert_close("attention", out, reference.prefill_attention(q, layer_kv, batch, SCALE), dtype)


def test_what_is_sent_to_the_kernel_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_hopper, "is_hopper", lambda device: True)

    def takes(
        pages: torch.dtype = torch.bfloat16,
        dtype: torch.dtype = torch.bfloat16,
        dim: int = 128,
        page: int = 16,
        tokens: int = 4096,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> bool:
        layer_kv = torch.empty(1, 2, page, 2, dim, dtype=pages)
        table = torch.zeros(2, 3, dtype=torch.int32)
        batch = PrefillSegments(table, table[0], table[0], table)
        q = torch.empty(tokens, 4, dim, dtype=dtype)
        return triton_hopper.is_for(q, layer_kv, batch, window=window, sinks=sinks)

    assert takes()
    assert takes(page=128)
    assert not takes(torch.float32, torch.float32)
    assert not takes(torch.float8_e4m3fn)
    assert not takes(dim=64)
    assert not takes(page=8)
    assert not takes(page=24)
    assert not takes(tokens=2048)
    assert not takes(window=128)
    assert not takes(sinks=torch.zeros(4))
