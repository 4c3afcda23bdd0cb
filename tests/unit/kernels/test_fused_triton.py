"""The fused kernels between the matrix products, in Triton, against their naive references."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, make_rows, make_site, randn

from manyroots.kernels.activation import reference as activation_reference  # isort: skip
from manyroots.kernels.activation import torch_ops as activation_ops  # isort: skip
from manyroots.kernels.activation import triton as activation  # isort: skip
from manyroots.kernels.activation.kinds import CLAMP_LIMIT, Activation  # isort: skip
from manyroots.kernels.gemm import reference as gemm_reference  # isort: skip
from manyroots.kernels.gemm import triton as gemm  # isort: skip
from manyroots.kernels.lora_ops.sites import LoraRows, LoraTerm  # isort: skip
from manyroots.kernels.norm import reference as norm_reference  # isort: skip
from manyroots.kernels.norm import triton as norm  # isort: skip
from manyroots.kernels.qk_rope_kv_write import reference as rope_reference  # isort: skip
from manyroots.kernels.qk_rope_kv_write import triton as rope  # isort: skip
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, QkNorm, SlotMapping  # isort: skip
from manyroots.kernels.lora_ops.sites import block_rows_for  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

EPS = 1e-6
SLOTS = (-1, -1, 0, 0, 0, 1, 2)
MANY_SLOTS = (-1, *[0] * 30, 1, 1, 2)
FULL_SLOTS = (-1, *[0] * 40, 1, *[2] * 30)
"""A program per row, and one per block of rows; 30 rows of one adapter are two blocks, but 40 are
one where a step has more than 64 rows: more than a program has at a time. Of the adapter with most
ranks there are two rows in one of them and one in another, which are multiplied differently."""
MIXED_SLOTS = (0, 0, 1, 2, 2, -1) * 10
"""More blocks than there are programs: each takes several."""


def term(
    part_sizes: tuple[int, ...],
    ranks: list[tuple[int, ...]],
    dtype: torch.dtype,
    slots: tuple[int, ...] = SLOTS,
) -> LoraTerm:
    """Of a graph that has room for more blocks than the step has."""
    site = make_site(32, part_sizes, ranks, dtype)
    rows = make_rows(*slots, block_rows=block_rows_for(len(slots)))
    empty = rows.blocks.new_zeros(2, 3)
    roomy = LoraRows(
        rows.slots, torch.cat([rows.blocks, empty]), rows.num_blocks, rows.max_blocks + 2
    )
    return LoraTerm(randn(2, len(slots), site.width, seed=5), site, roomy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("has_post", [False, True])
@pytest.mark.parametrize("shape", [(7, 96), (1, 7, 96), (3, 7, 96)])
def test_add_rms_norm_equals_the_reference(
    shape: tuple[int, ...], has_post: bool, has_adapters: bool, dtype: torch.dtype
) -> None:
    """What is added may have a norm of its own; weights of such models are in float32."""
    residual, other = randn(7, 96, dtype=dtype), randn(7, 96, dtype=dtype)
    weight_dtype = torch.float32 if has_post else dtype
    delta, weight = randn(*shape, dtype=dtype, seed=1), randn(96, dtype=weight_dtype, seed=2)
    lora = term((96,), [(8,), (16,), (0,)], dtype) if has_adapters else None
    post = randn(96, seed=3) if has_post else None
    factor = 0.3 if len(shape) == 3 else 1.0
    out = norm.add_rms_norm(residual, delta, weight, EPS, lora, post, factor)
    expected = norm_reference.add_rms_norm(other, delta, weight, EPS, lora, post, factor)
    assert_close("norm", out, expected, dtype)
    assert_close("norm", residual, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_norms_add_two_products(has_adapters: bool, is_whole: bool, dtype: torch.dtype) -> None:
    """Chosen experts in the order of tokens, and a shared block's partial sums or its product."""
    chosen = randn(7, 4, 96, seed=1).transpose(0, 1)
    also = randn(7, 96, dtype=dtype, seed=4) if is_whole else randn(3, 7, 96, seed=4)
    weight = randn(96, dtype=dtype, seed=2)
    lora = term((96,), [(8,), (16,), (0,)], dtype) if has_adapters else None
    residuals = [randn(7, 96, dtype=dtype) for _ in range(4)]
    ours, naive = (
        kernels.add_rms_norm(residual, chosen, weight, EPS, lora, also=also)
        for kernels, residual in zip((norm, norm_reference), residuals[:2], strict=True)
    )
    assert_close("norm", ours, naive, dtype)
    assert_close("norm", residuals[0], residuals[1], dtype)
    alone = norm_reference.add_rms_norm(randn(7, 96, dtype=dtype), chosen, weight, EPS, lora)
    assert not torch.allclose(naive, alone, atol=0.1)
    if lora is not None:
        undivided, expected = (
            kernels.add_norm(residual, chosen, weight, EPS, lora, also=also)
            for kernels, residual in zip((norm, norm_reference), residuals[2:], strict=True)
        )
        assert_close("norm", residuals[2], residuals[0], dtype)
        assert_close("norm", undivided.values, expected.values, dtype)
        assert_close("lora", undivided.factors, expected.factors, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_rows_of_a_wider_product_are_added_up_and_normalised(
    num_splits: int, dtype: torch.dtype
) -> None:
    shape = (num_splits, 5, 200) if num_splits else (5, 200)
    sums = randn(*shape, dtype=torch.float32 if num_splits else dtype)[..., 8:128]
    weight = randn(120, dtype=dtype, seed=2)
    ours = norm.sum_rms_norm(sums, weight, EPS, dtype)
    assert ours.dtype == dtype
    assert_close("norm", ours, norm_reference.sum_rms_norm(sums, weight, EPS, dtype), dtype)
    whole = sums.float().sum(0) if num_splits else sums
    assert_close("norm", ours, norm_reference.rms_norm(whole, weight, EPS).to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [SLOTS, MANY_SLOTS, FULL_SLOTS, MIXED_SLOTS])
@pytest.mark.parametrize(("size", "splits"), [(384, 1), (640, 3)])
def test_add_norm_and_a_product_equal_the_whole_norm_and_the_product(
    size: int, splits: int, slots: tuple[int, ...], dtype: torch.dtype
) -> None:
    num_rows = len(slots)
    residual, other = randn(num_rows, size, dtype=dtype), randn(num_rows, size, dtype=dtype)
    delta, weight = randn(splits, num_rows, size, seed=1), randn(size, dtype=dtype, seed=2)
    lora = term((size,), [(8,), (136,), (0,)], dtype, slots)
    normed = norm.add_norm(residual, delta, weight, EPS, lora)
    expected = norm_reference.add_norm(other, delta, weight, EPS, lora)
    assert_close("norm", residual, other, dtype)
    assert_close("norm", normed.values, expected.values, dtype)
    assert_close("lora", normed.factors, expected.factors, dtype)
    matrix = randn(72, size, dtype=dtype, seed=4) * size**-0.5
    site = make_site(size, (32, 16), [(8, 16), (40, 8), (0, 24)], dtype)
    out, shrunk = gemm.linear(normed, matrix, site, lora.rows, tiling=gemm.Tiling(32, 64, 2, 2, 4))
    whole = norm_reference.rms_norm(residual, weight, EPS)
    expected_out, expected_shrunk = gemm_reference.linear(whole, matrix, site, lora.rows)
    assert_close("lora", out.float().sum(0), expected_out[0], dtype)
    assert shrunk is not None
    assert expected_shrunk is not None
    assert_same_hidden(shrunk, expected_shrunk, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_leaves_its_input_alone(dtype: torch.dtype) -> None:
    x, weight = randn(5, 200, dtype=dtype), randn(200, dtype=dtype, seed=2)
    before = x.clone()
    out = norm.rms_norm(x, weight, EPS)
    assert_close("norm", out, norm_reference.rms_norm(x, weight, EPS), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("slots", [SLOTS, MANY_SLOTS, MIXED_SLOTS])
def test_gated_equals_the_reference(
    slots: tuple[int, ...], splits: int, has_adapters: bool, dtype: torch.dtype
) -> None:
    gate_up = randn(splits, len(slots), 2 * 150, dtype=dtype)
    ranks = [(8, 8), (16, 24), (0, 40)]
    lora = term((150, 150), ranks, dtype, slots) if has_adapters else None
    factor = 0.7 if splits == 2 else 1.0
    out = activation.gated(gate_up, Activation.SILU, dtype, lora, factor)
    expected = activation_reference.gated(gate_up, Activation.SILU, dtype, lora, factor)
    assert_close("lora", out, expected, dtype)


ALONE_OR_FEW = tuple(slot for slot in range(-1, 18) for _ in range(1 + slot % 6))
"""More than 64 rows, of up to six of each adapter."""


@pytest.mark.parametrize("ranks", [[(8, 8, 8), (8, 0, 8)], [(16, 8, 8), (8, 16, 0)]])
@pytest.mark.parametrize("slots", [ALONE_OR_FEW, (*ALONE_OR_FEW, *[17] * 470)])
def test_blocks_of_few_and_of_many_rows_equal_the_reference(
    slots: tuple[int, ...], ranks: list[tuple[int, ...]]
) -> None:
    """Rows one by one and together, and as many that a program loads the next ones ahead."""
    dtype, tokens, dim = torch.float32, len(slots), 16
    lora = term((40, 40), [own[:2] for own in ranks] * 9, dtype, slots)
    gate_up = randn(tokens, 80, dtype=dtype)
    out = activation.gated(gate_up, Activation.SILU, dtype, lora)
    expected = activation_reference.gated(gate_up, Activation.SILU, dtype, lora)
    assert_close("lora", out, expected, dtype)
    lora = term((2 * dim, dim, dim), ranks * 9, dtype, slots)
    angles = RopeTable.at(torch.arange(tokens, device=DEVICE), randn(dim // 2, seed=9).abs())
    pages = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
    args = (randn(tokens, 4 * dim, dtype=dtype), angles, None)
    places = SlotMapping(pages, torch.zeros_like(pages))
    kept = [torch.zeros(tokens, 2, 1, 1, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    q = rope.qk_rope_kv_write(*args, kept[0], places, lora)
    expected = rope_reference.qk_rope_kv_write(*args, kept[1], places, lora)
    assert_close("lora", q, expected, dtype)
    assert_close("lora", *kept, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", Activation)
def test_every_activation_equals_the_reference(kind: Activation, dtype: torch.dtype) -> None:
    """Large enough that gates and ups are cut off on every side where they are."""
    gate_up = randn(7, 2 * 150, dtype=dtype) * 2.4
    assert gate_up.float().abs().max() > CLAMP_LIMIT
    expected = activation_reference.gated(gate_up, kind, dtype)
    assert_close("lora", activation.gated(gate_up, kind, dtype), expected, dtype)
    before = gate_up.clone()
    out = activation_ops.gated(gate_up.cpu(), kind, dtype)
    assert_close("lora", out.to(DEVICE), expected, dtype)
    out = activation_ops.gated(gate_up.cpu(), kind, dtype, None, 0.6)
    expected = activation_reference.gated(gate_up, kind, dtype, None, 0.6)
    assert_close("lora", out.to(DEVICE), expected, dtype)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("norm_of", ["none", "the model's dtype", "float32"])
@pytest.mark.parametrize("row_slots", [SLOTS, MANY_SLOTS, MIXED_SLOTS])
def test_qk_rope_kv_write_gives_q_and_fills_exactly_the_slots(
    row_slots: tuple[int, ...], norm_of: str, has_adapters: bool, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim, tokens = 6, 2, 32, len(row_slots)
    qkv = randn(2, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.tensor([0, 5, 6, 7, 300, 2, 1] * 9, device=DEVICE)[:tokens]
    # Many rows' heads are turned in part, and without a norm not at all.
    num_pairs = dim // 2 if row_slots is SLOTS else dim // 8
    num_pairs = 0 if norm_of == "none" and row_slots is MANY_SLOTS else num_pairs
    angles = RopeTable.at(positions, randn(num_pairs, seed=9).abs())
    of = torch.float32 if norm_of == "float32" else dtype
    norms = QkNorm(randn(dim, dtype=of), randn(dim, dtype=of, seed=3), EPS)
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    ranks = [(8, 8, 16), (16, 0, 8), (24, 8, 8)]
    lora = term(sizes, ranks, dtype, row_slots) if has_adapters else None
    # A view of one layer of an arena, as the store gives it; the last row writes nowhere.
    arena = torch.full((16, 3, 2, 4, kv_heads, dim), 7.0, dtype=dtype, device=DEVICE)
    other = arena.clone()
    places = torch.randperm(64, generator=torch.Generator().manual_seed(6))[:tokens].int()
    pages, offsets = places // 4, places % 4
    pages[-1] = -1
    slots = SlotMapping(pages.to(DEVICE), offsets.to(DEVICE))
    args = (qkv, angles, None if norm_of == "none" else norms)
    q = rope.qk_rope_kv_write(*args, arena[:, 1], slots, lora)
    expected = rope_reference.qk_rope_kv_write(*args, other[:, 1], slots, lora)
    assert_close("lora", q, expected, dtype)
    assert_close("lora", arena, other, dtype)
    assert torch.equal(arena[:, 0], other[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", [gemm.Tiling(16, 32, 1, 2, 4), gemm.Tiling(32, 32, 3, 2, 4)])
@pytest.mark.parametrize("slots", [None, SLOTS, (0,) * 20, (-1,)])
def test_linear_gives_partial_sums_of_the_product_and_of_the_adapters_shrink(
    slots: tuple[int, ...] | None, tiling: gemm.Tiling, dtype: torch.dtype
) -> None:
    rows: LoraRows | None = None if slots is None else make_rows(*slots)
    site = make_site(192, (32, 16), [(8, 16), (40, 8), (0, 24)], dtype)
    x = randn(len(slots or SLOTS), 192, dtype=dtype)
    weight = randn(72, 192, dtype=dtype, seed=4) * 192**-0.5
    out, shrunk = gemm.linear(x, weight, None if rows is None else site, rows, tiling=tiling)
    expected, expected_shrunk = gemm_reference.linear(x, weight, site, rows)
    assert_close("lora", out.float().sum(0), expected[0], dtype)
    assert (shrunk is None) == (rows is None)
    if shrunk is not None and expected_shrunk is not None:
        assert_same_hidden(shrunk, expected_shrunk, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k_size", [192, 200, 40])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("slots", [None, SLOTS])
def test_a_product_of_any_inner_size_has_its_bias_once(
    slots: tuple[int, ...] | None, splits: int, k_size: int, dtype: torch.dtype
) -> None:
    """Splits that are not equally long, and an empty one; NaN follows the rows."""
    num_rows = len(slots or SLOTS)
    rows = None if slots is None else make_rows(*slots)
    site = make_site(k_size, (32, 16), [(8, 16), (40, 8), (0, 24)], dtype)
    behind = torch.full((num_rows + 1, k_size), float("nan"), dtype=dtype, device=DEVICE)
    behind[:-1] = randn(num_rows, k_size, dtype=dtype)
    x = behind[:-1]
    weight = randn(72, k_size, dtype=dtype, seed=4) * k_size**-0.5
    bias = randn(72, dtype=dtype, seed=5)
    tiling = gemm.Tiling(32, 64, splits, 2, 4)
    out, shrunk = gemm.linear(x, weight, site, rows, bias, tiling=tiling)
    expected, expected_shrunk = gemm_reference.linear(x, weight, site, rows, bias)
    assert_close("lora", out.float().sum(0), expected[0], dtype)
    if shrunk is not None and expected_shrunk is not None:
        assert_same_hidden(shrunk, expected_shrunk, dtype)
    rows_of_norm = norm_reference.add_norm(
        x.clone(), x, randn(k_size, dtype=dtype, seed=6), EPS, term((k_size,), [(8,)] * 3, dtype)
    )
    out, _ = gemm.linear(rows_of_norm, weight, None, None, bias, tiling=tiling)
    expected, _ = gemm_reference.linear(rows_of_norm, weight, None, None, bias)
    assert_close("lora", out.float().sum(0), expected[0], dtype)


def test_more_rows_are_for_narrow_weights_and_for_those_with_adapters() -> None:
    """Of bfloat16; the widest, a head's, is the library's in any case."""
    narrow, wide, head = (torch.empty(n, 8, dtype=torch.bfloat16) for n in (4096, 6144, 151_936))
    assert all(gemm.is_for(64, weight) for weight in (narrow, wide, head))
    assert [gemm.is_for(65, weight) for weight in (narrow, wide, head)] == [
        True,
        False,
        False,
    ]
    of_many = [gemm.is_for(128, weight, has_adapters=True) for weight in (narrow, wide, head)]
    assert of_many == [True, True, False]
    assert not gemm.is_for(129, narrow, has_adapters=True)
    assert not gemm.is_for(65, narrow.float(), has_adapters=True)


@pytest.mark.parametrize("num_rows", [1, 16, 33, 64, 65, 128])
@pytest.mark.parametrize("k_size", [576, 640, 1152, 2880, 2048, 4096, 6912, 768, 200])
@pytest.mark.parametrize("n_size", [32, 1536, 5120, 201088])
def test_every_split_of_a_product_has_something_to_do(
    n_size: int, k_size: int, num_rows: int
) -> None:
    splits = gemm.tiling_for(num_rows, n_size, k_size).num_splits
    pieces = -(-k_size // gemm.BLOCK_K)
    assert (splits - 1) * -(-pieces // splits) < pieces
    if k_size % (2 * gemm.BLOCK_K) == 0:
        assert pieces % splits == 0


def assert_same_hidden(actual: LoraTerm, expected: LoraTerm, dtype: torch.dtype) -> None:
    """What adapters shrink rows to; values beyond their ranks are not compared."""
    for row, slot in enumerate(expected.rows.slots.tolist()):
        if slot >= 0:
            total = int(expected.site.table[slot, 1])
            got = actual.hidden[:, row, :total].sum(0)
            assert_close("lora", got, expected.hidden[0, row, :total], dtype)
