"""Q04: keys and values in FP8, written and read in Triton, against the naive references."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from manyroots.kernels.attention import reference  # isort: skip
from manyroots.kernels.attention import triton as fast  # isort: skip
from manyroots.kernels.attention.paged import (  # isort: skip
    DecodeRows,
    PrefillSegments,
    query_blocks,
)
from manyroots.kernels.qk_rope_kv_write import reference as rope_reference  # isort: skip
from manyroots.kernels.qk_rope_kv_write import torch_ops as rope_ops  # isort: skip
from manyroots.kernels.qk_rope_kv_write import triton as rope  # isort: skip
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping, RopeTable  # isort: skip
from manyroots.kernels.scaled import LARGEST  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip
from tests.unit.kernels.paged_cases import SCALE, pages_for  # isort: skip

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", DTYPES)
def test_q04_keys_and_values_are_rounded_into_their_pages(dtype: torch.dtype) -> None:
    heads, kv_heads, dim, tokens = 4, 2, 32, 7
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype) * 3
    qkv[3, -1] = 2.0**12
    angles = RopeTable.at(torch.arange(tokens, device=DEVICE), randn(dim // 2, seed=9).abs())
    slot_mapping = SlotMapping(
        torch.tensor([4, 0, 2, 1, 3, 2, -1], device=DEVICE),
        torch.tensor([1, 2, 3, 0, 3, 0, 0], device=DEVICE),
    )
    ours, theirs = (
        torch.zeros(5, 2, 4, kv_heads, dim, dtype=torch.uint8, device=DEVICE).view(FP8)
        for _ in range(2)
    )
    q = rope.qk_rope_kv_write(qkv, angles, None, ours, slot_mapping, None, dtype)
    expected = rope_reference.qk_rope_kv_write(qkv, angles, None, theirs, slot_mapping, None, dtype)
    assert q.dtype is dtype
    assert_close("lora", q, expected, dtype)
    assert_close("kept", ours.float(), theirs.float(), FP8)
    assert ours[1, 1, 0, -1, -1].float() == LARGEST  # not infinite, and not no number
    if DEVICE.type == "cpu":
        ops = torch.zeros_like(theirs.view(torch.uint8)).view(FP8)
        rows = rope_ops.look_up(angles, torch.arange(tokens), dtype)
        real = SlotMapping(
            slot_mapping.pages[:-1], slot_mapping.offsets[:-1], tokens=torch.arange(tokens - 1)
        )
        assert_close("lora", rope_ops.qk_rope_kv_write(qkv, rows, None, ops, real), expected, dtype)
        assert_close("kept", ops.float(), theirs.float(), FP8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3])
def test_q04_decodes_read_fp8(parts: int, dtype: torch.dtype) -> None:
    lens = [1, 17, 70]
    layer_kv, table = pages_for(lens, 2, 32, torch.float32)
    layer_kv = layer_kv.to(FP8)
    rows = DecodeRows(table, torch.tensor(lens, dtype=torch.int32, device=DEVICE))
    q = randn(len(lens), 4, 32, dtype=dtype)
    tiling = fast.DecodeTiling(parts, 16, 1, 2, pages_ahead=True)
    out = fast.decode_attention(q, layer_kv, rows, SCALE, tiling=tiling)
    assert out.dtype is dtype
    expected = reference.decode_attention(q, layer_kv, rows, SCALE)
    assert_close("attention", out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_q04_prompts_read_fp8(dtype: torch.dtype) -> None:
    starts, lens = [0, 5, 45], [30, 60]
    layer_kv, table = pages_for(lens, 2, 32, torch.float32)
    layer_kv = layer_kv.to(FP8)
    batch = PrefillSegments(
        table,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        torch.from_numpy(query_blocks(starts, lens)).to(DEVICE),
    )
    q = randn(starts[-1], 4, 32, dtype=dtype)
    out = fast.prefill_attention(q, layer_kv, batch, SCALE)
    expected = reference.prefill_attention(q, layer_kv, batch, SCALE)
    assert_close("attention", out, expected, dtype)
