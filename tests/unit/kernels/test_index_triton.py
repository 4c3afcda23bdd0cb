"""An index of tokens in Triton against the naive references: keys, choices, and attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from manyroots.kernels.compressed import reference as naive_choice  # isort: skip
from manyroots.kernels.compressed import triton as fast_choice  # isort: skip
from manyroots.kernels.compressed import triton_index  # isort: skip
from manyroots.kernels.compressed.step import RowsStep  # isort: skip
from manyroots.kernels.fused_moe import reference as naive_moe  # isort: skip
from manyroots.kernels.fused_moe import triton as fast_moe  # isort: skip
from manyroots.kernels.fused_moe.routing import Scoring  # isort: skip
from manyroots.kernels.latent import reference as naive  # isort: skip
from manyroots.kernels.latent import triton as fast  # isort: skip
from manyroots.kernels.latent.inputs import IndexNorm, as_fp8_rows  # isort: skip
from manyroots.kernels.latent.step import PromptLens  # isort: skip
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

PAGE, DIM, ROPE = 4, 22, 6
SIZES = [(13, 22), (16, 32)]
"""Heads and numbers of a head."""
if DEVICE.type == "cuda":
    SIZES.append((64, 128))


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim"), SIZES)
def test_f10_index_keys_are_those_of_the_reference(
    heads: int, dim: int, is_interleaved: bool, dtype: torch.dtype
) -> None:
    """F10: from inputs with strides, into one part of a page; a token without a page writes
    nothing."""
    tokens = 5
    q = randn(tokens, heads, dim + 3, dtype=dtype)[..., :dim]
    k = randn(tokens, 5 + dim, dtype=dtype, seed=1)[:, 5:] + 0.5
    table = RopeTable.at(
        torch.arange(3, 3 + tokens, device=DEVICE), randn(ROPE // 2, seed=3).abs() + 0.1, 1.3
    )
    norm = IndexNorm(randn(dim, dtype=dtype, seed=2), randn(dim, dtype=dtype, seed=4), 1e-5)
    slots = SlotMapping(int32(2, 0, -1, 0, 1), int32(3, 0, 1, 1, 2))
    arenas = [torch.full((3, 2, PAGE, dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    ours, right = (
        kind.index_write(q, k, table, norm, arena[:, 1], slots, is_interleaved=is_interleaved)
        for kind, arena in zip((fast, naive), arenas, strict=True)
    )
    assert_close("rotary", ours, right, dtype)
    assert_close("rotary", arenas[0], arenas[1], dtype)
    assert arenas[0][:, 0].eq(7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(("heads", "latent", "most"), [(3, 20, 7), (20, 32, 70)])
def test_f10_chosen_latents_are_attended_to_as_by_the_reference(
    heads: int, latent: int, most: int, is_fp8: bool, dtype: torch.dtype
) -> None:
    """F10: in any order, by rows that chose all, some and none; in several parts."""
    pages = randn(30, PAGE, latent + ROPE, dtype=dtype)
    if is_fp8:
        pages = as_fp8_rows(pages.flatten(0, 1), latent).view(30, PAGE, -1)
    order = torch.rand(4, 30 * PAGE, generator=torch.Generator().manual_seed(1)).argsort(1)
    slots = order[:, :most].to(DEVICE)
    slots[1, most // 2 :] = -1
    slots[2] = -1
    queries = randn(4, heads, latent + ROPE, dtype=dtype, seed=2)
    ours = fast.attend_chosen(queries, pages, slots, 0.2, latent)
    assert_close("attention", ours, naive.attend_chosen(queries, pages, slots, 0.2, latent), dtype)
    assert ours[2].eq(0).all()


def rows_step(group: int, prompts: PromptLens | None, decodes: list[int]) -> RowsStep:
    lens = [*decodes, *([] if prompts is None else prompts.context_lens.tolist())]
    order = torch.randperm(20 * len(lens), generator=torch.Generator().manual_seed(5))
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    return RowsStep(
        page_table=order.view(len(lens), 20).int().to(DEVICE),
        context_lens=int32(*lens), num_decodes=len(decodes), slot_mapping=SlotMapping(none, none),
        page_size=PAGE, group=group, prompts=prompts,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("num_chosen", [1, 9, 100])
@pytest.mark.parametrize(("max_ranks", "bits"), [(1, 8), (1 << 26, 6)])
def test_f10_queries_choose_what_they_choose_in_the_reference(
    max_ranks: int, bits: int, num_chosen: int, group: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """F10: decodes and prompts of one step, among rows of tokens and of groups. Of equal scores,
    also of zeros with either sign, the earlier row counts."""
    monkeypatch.setattr(triton_index, "MAX_RANKS", max_ranks)
    monkeypatch.setattr(triton_index, "MAX_SCORES", 7 * max_ranks)
    monkeypatch.setattr(triton_index, "COUNTED", 16)
    monkeypatch.setattr(triton_index, "BITS", bits)
    monkeypatch.setattr(triton_index, "QUERIES", 2)
    monkeypatch.setattr(triton_index, "ROWS", 32)
    monkeypatch.setattr(triton_index, "ROWS_OF_BLOCK", 32)
    prompts = PromptLens(np.array([3, 5]), np.array([70, 5]))
    step = rows_step(group, prompts, [1, 33, 0])
    pages = randn(100, PAGE // group, 9 + DIM, dtype=dtype)
    pages[40:] = pages[:60].clone()  # equal keys, and so equal scores
    q, weights = randn(11, 13, DIM, dtype=dtype, seed=1), randn(11, 13, seed=2)
    q[4] = 0.0
    weights[4] = -weights[4].abs()
    ours = fast_choice.choose_entries(q, weights, pages, step, num_chosen)
    right = naive_choice.choose_entries(q, weights, pages, step, num_chosen)
    count = right.shape[1]
    assert torch.equal(ours[:, :count].sort(1).values, right.sort(1).values)
    assert ours[:, count:].eq(-1).all()
    # What is chosen comes first.
    assert ours[:, 1:].ge(0).le(ours[:, :-1].ge(0)).all()
    decodes = rows_step(group, None, [1, 33, 0])
    ours = fast_choice.choose_entries(q[:3], weights[:3], pages, decodes, num_chosen)
    right = naive_choice.choose_entries(q[:3], weights[:3], pages, decodes, num_chosen)
    assert torch.equal(ours[:, : right.shape[1]], right)
    assert ours[:, right.shape[1] :].eq(-1).all()


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_f10_experts_by_table_are_weighed_as_by_the_reference(num_tokens: int) -> None:
    """F10: whatever the router finds likeliest, the table's experts are chosen; with weights of
    their own scores."""
    scores = randn(num_tokens, 9)
    order = torch.rand(num_tokens, 9, generator=torch.Generator().manual_seed(3)).argsort(1)
    chosen = order[:, :3].to(DEVICE)
    given = {"scoring": Scoring.SQRT_SOFTPLUS_RENORMALISED, "factor": 1.5, "chosen": chosen}
    ours = fast_moe.route(scores, 3, **given)
    right = naive_moe.route(scores, 3, **given)
    assert torch.equal(ours.experts.cpu(), chosen.int().cpu())
    assert_close("experts", ours.weights, right.weights, torch.float32)
