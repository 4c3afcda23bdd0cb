"""Latent attention in Triton against the naive reference.

On a Hopper GPU the sizes of DeepSeek's models go through `triton_hopper.py` and
`triton_hopper_prompt.py`, which Triton's interpreter cannot run.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, make_rows, make_site, randn

from manyroots.kernels.latent import reference, triton_hopper, triton_hopper_prompt  # isort: skip
from manyroots.kernels.latent import triton_rows  # isort: skip
from manyroots.kernels.latent import triton as fast  # isort: skip
from manyroots.kernels.lora_ops.sites import LinearSite  # isort: skip
from manyroots.kernels.latent.inputs import (  # isort: skip
    KeyPiece,
    LatentAdapters,
    LatentNorm,
    SplitKeys,
    as_fp8_rows,
    row_bytes,
)
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

IS_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
LATENT, ROPE, NOPE, V, HEADS = 20, 6, 10, 7, 3
"""Odd on purpose: none is a power of two."""
SCALE = 0.11
LENS = [0, 1, 17, 70, 33]
SIZES = [(dtype, *sizes) for dtype in DTYPES for sizes in ((3, 20, 6, 4), (20, 32, 16, 16))]
"""Dtype, heads, latent, rope and tokens of a page."""
if DEVICE.type == "cuda":
    SIZES += [
        (torch.bfloat16, heads, 512, 64, page)
        for heads, page in ((16, 16), (20, 32), (40, 64), (128, 16))
    ]
    SIZES.append((torch.float32, 16, 512, 64, 16))
    LENS += [64, 65, 128, 129, 1000, 0, 3000]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def pages_for(
    lens: list[int], latent: int, rope: int, page: int, dtype: torch.dtype, *, is_fp8: bool
) -> tuple[Tensor, Tensor]:
    """One of several layers' pages in reverse order, and their table; what follows a row's last
    token is not a number, and entries after the last page are no pages."""
    counts = [-(-length // page) for length in lens]
    width = latent + rope
    arena = torch.full((sum(counts) + 1, 2, page, width), torch.nan, dtype=dtype, device=DEVICE)
    table = torch.full((len(lens), max(counts)), 10**8, dtype=torch.int32)
    left = sum(counts)
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        own = torch.arange(left - 1, left - count - 1, -1)
        left -= count
        table[row, :count] = own.to(torch.int32)
        latents = randn(count * page, width, dtype=dtype, seed=row)
        latents[length:] = torch.nan
        arena[own.to(DEVICE), 1] = latents.view(count, page, width)
    layer = arena[:, 1]
    if is_fp8:
        rows = as_fp8_rows(arena.flatten(0, 2), latent)
        layer = rows.view(*arena.shape[:3], -1)[:, 1]
    return layer, table.to(DEVICE)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(("dtype", "heads", "latent", "rope", "page"), SIZES)
def test_f07_rows_attend_to_exactly_the_latents_they_see(
    dtype: torch.dtype, heads: int, latent: int, rope: int, page: int, is_fp8: bool
) -> None:
    """F07: rows of any length, one without tokens; also of one sequence."""
    layer, table = pages_for(LENS, latent, rope, page, dtype, is_fp8=is_fp8)
    table[2, : -(-LENS[2] // page)] = table[3, : -(-LENS[2] // page)]
    lengths = int32(*LENS)
    q = randn(len(LENS), heads, latent + rope, dtype=dtype, seed=9)
    ours = fast.latent_decode(q, layer, table, lengths, SCALE, latent)
    naive = reference.latent_decode(q, layer, table, lengths, SCALE, latent)
    assert not ours[0].any()
    assert_close("attention", ours, naive, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("pairs", [ROPE // 2, 0])
def test_f07_latents_are_normalised_rotated_written_and_read(
    pairs: int, is_interleaved: bool, is_fp8: bool, dtype: torch.dtype
) -> None:
    """F07: from a view of a wider product, and a token without a page is written nowhere."""
    tokens, heads, page = 5, 9, 4
    q = randn(tokens, heads, NOPE + ROPE, dtype=dtype)
    kv = randn(tokens, 5 + LATENT + ROPE, dtype=dtype, seed=1)[:, 5:]
    table = RopeTable.at(torch.arange(3, 3 + tokens), torch.linspace(0.1, 1.1, pairs), 1.3)
    angles = RopeTable(table.cos.to(DEVICE), table.sin.to(DEVICE))
    norm = LatentNorm(randn(LATENT, dtype=dtype, seed=2), 1e-5)
    mapping = SlotMapping(int32(2, 0, -1, 1, 1), int32(3, 0, 0, 1, 2))
    width = row_bytes(LATENT + ROPE) if is_fp8 else LATENT + ROPE
    kept = torch.uint8 if is_fp8 else dtype
    both = [torch.zeros(3, 2, page, width, dtype=kept, device=DEVICE)[:, 1] for _ in range(2)]
    naive, ours = (
        kernels.latent_write(q, kv, angles, norm, pages, mapping, is_interleaved=is_interleaved)
        for kernels, pages in zip((reference, fast), both, strict=True)
    )
    assert ours.data_ptr() == q.data_ptr()
    assert_close("rotary", ours, naive, dtype)
    at = torch.arange(3 * page, device=DEVICE)
    read = [reference.read_rows(pages, at, LATENT, ROPE, torch.float32) for pages in both]
    if is_fp8:
        assert_close("kept", read[1], read[0], torch.float8_e4m3fn)
    else:
        assert_close("rotary", read[1], read[0], dtype)
    slots = at.flip(0)[1:]
    again = fast.latent_read(both[0], slots, LATENT, ROPE, dtype)
    right = reference.latent_read(both[0], slots, LATENT, ROPE, dtype)
    assert all(map(torch.equal, again, right))
    written = {2 * page + 3, 0, page + 1, page + 2}
    assert {row for row in at.tolist() if read[1][row].any()} == written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_splits", "kv_splits"), [(3, 2), (1, 4)])
@pytest.mark.parametrize("pairs", [ROPE // 2, 0])
def test_f07_partial_sums_of_queries_and_latents_are_added_up(
    pairs: int, q_splits: int, kv_splits: int, dtype: torch.dtype
) -> None:
    """F07: as the products of few rows leave them; queries come out in the model's dtype."""
    tokens, heads, page = 3, 9, 4
    q = randn(q_splits, tokens, heads, NOPE + ROPE)
    kv = randn(kv_splits, tokens, 5 + LATENT + ROPE, seed=1)[..., 5:]
    table = RopeTable.at(torch.arange(3, 3 + tokens), torch.linspace(0.1, 1.1, pairs), 1.3)
    angles = RopeTable(table.cos.to(DEVICE), table.sin.to(DEVICE))
    norm = LatentNorm(randn(LATENT, dtype=dtype, seed=2), 1e-5)
    mapping = SlotMapping(int32(2, 0, 1), int32(3, 0, 1))
    both = [torch.zeros(3, page, LATENT + ROPE, dtype=dtype, device=DEVICE) for _ in range(2)]
    naive, ours = (
        kernels.latent_write(q, kv, angles, norm, pages, mapping, dtype, is_interleaved=True)
        for kernels, pages in zip((reference, fast), both, strict=True)
    )
    assert ours.dtype == naive.dtype == dtype
    assert_close("rotary", ours, naive, dtype)
    assert_close("rotary", both[1], both[0], dtype)
    whole = reference.latent_write(
        q.sum(0), kv.sum(0), angles, norm, both[0].zero_(), mapping, is_interleaved=True
    )
    assert_close("rotary", ours, whole.to(dtype), dtype)
    assert_close("rotary", both[1], both[0], dtype)


PIECES = [
    # queries, keys and the keys that the first query sees, of each sequence
    [(3, 3, 0), (5, 9, 4), (1, 4, 10), (2, 0, 5), (4, 6, -2)],
    [(40, 90, 50), (70, 33, 100), (70, 70, 0)],
]
DIMS = [(16, 7), (24, 16)]
if DEVICE.type == "cuda":
    PIECES += [
        [(300, 300, 0), (700, 1500, 800), (128, 128, 0), (1, 640, 639)],
        [(1000, 500, -300), (257, 4000, 5000), (130, 1, 0), (64, 0, 0)],
    ]
    DIMS += [(192, 128), (256, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim"), DIMS)
@pytest.mark.parametrize("sequences", PIECES)
def test_f07_queries_see_what_they_should_of_a_piece(
    sequences: list[tuple[int, int, int]], key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    """F07: all, some or none of its keys. Values of other sequences do not matter, not even those
    that are no numbers."""
    queries, keys, seen = zip(*sequences, strict=True)
    q = randn(sum(queries), HEADS, key_dim, dtype=dtype)
    shared = randn(sum(keys), min(key_dim // 2, 64), dtype=dtype, seed=1)
    nope = key_dim - shared.shape[1]
    both = randn(sum(keys), HEADS, nope + value_dim, dtype=dtype, seed=2)
    k, v = SplitKeys(both[..., :nope], shared), both[..., nope:]
    piece = KeyPiece(
        int32(0, *accumulate(queries)), int32(0, *accumulate(keys)), int32(*seen), max(queries),
    )  # fmt: skip
    out, sums = fast.attend_piece(q, k, v, piece, SCALE)
    expected, expected_sums = reference_piece(q, k, v, piece)
    assert_close("attention", out, expected, dtype)
    assert_close("attention", sums, expected_sums, dtype)
    v[: keys[0]] = torch.nan
    again, _ = fast.attend_piece(q, k, v, piece, SCALE)
    assert torch.equal(again[queries[0] :], out[queries[0] :])
    halves = [x[:, :2].contiguous() for x in (out, expected)]
    both = [x[:, :2].contiguous() for x in (sums, expected_sums)]
    merged = fast.merge(halves[0], both[0], halves[1], both[1])
    right = reference.merge(halves[0], both[0], halves[1], both[1])
    assert_close("attention", merged[0], right[0], dtype)
    assert_close("attention", merged[1], right[1], torch.float32)


def reference_piece(q: Tensor, k: SplitKeys, v: Tensor, piece: KeyPiece) -> tuple[Tensor, Tensor]:
    """The naive one where it ends within a second, else the torch set's in float32."""
    if q.shape[0] < 256:
        return reference.attend_piece(q, k, v, piece, SCALE)
    from manyroots.kernels.latent import torch_ops

    keys = SplitKeys(k.own.float(), k.shared.float())
    return torch_ops.attend_piece(q.float(), keys, v.float(), piece, SCALE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ((NOPE, V, LATENT, HEADS), 1),
        ((32, 48, 160, 5), 1),
        ((32, 48, 160, 5), 4),
        ((16, 8, 24, 2), 12),
    ],
)
def test_f07_absorbed_products_with_every_adapter(
    sizes: tuple[int, int, int, int], times: int, dtype: torch.dtype
) -> None:
    """F07: of rows without an adapter, with one that leaves `kv_b_proj` alone, and with others; of
    more rows than one tile has; in a graph, which has programs for more blocks. The counters are as
    they were."""
    nope, v, latent, heads = sizes
    site = make_site(latent, (heads * (nope + v),), [(8,), (0,), (24,)], dtype)
    slots = [-1, 0, 0, 1, 2, -1] * times
    rows = make_rows(*slots)
    weight = randn(heads, nope + v, latent, dtype=dtype, seed=3) * latent**-0.5
    q = randn(len(slots), heads, nope + ROPE, dtype=dtype)
    attended = randn(len(slots), heads, latent, dtype=dtype, seed=5)
    blocks = torch.full((rows.max_blocks + 40, 3), 2**30, dtype=torch.int32, device=DEVICE)
    blocks[: rows.max_blocks] = rows.blocks
    captured = replace(rows, blocks=blocks, max_blocks=len(blocks))
    assert captured.num_programs > rows.max_blocks or times != 4
    for own in (None, LatentAdapters(site, captured), LatentAdapters(site, rows)):
        for ours, naive in (
            (fast.absorb_queries, reference.absorb_queries),
            (fast.expand_values, reference.expand_values),
        ):
            x = q if ours is fast.absorb_queries else attended
            assert_close("lora", ours(x, weight, nope, own), naive(x, weight, nope, own), dtype)


@pytest.mark.parametrize("rope", [ROPE, 0])
@pytest.mark.parametrize("num_keys", [0, 1, 70])
def test_f07_keys_have_a_part_of_their_own_and_a_shared_one(num_keys: int, rope: int) -> None:
    """F07: of views of wider products."""
    own = randn(num_keys, HEADS, NOPE + V)[..., :NOPE]
    shared = randn(num_keys, LATENT + rope, seed=1)[:, LATENT:]
    keys = triton_rows.join_keys(SplitKeys(own, shared))
    assert torch.equal(keys, reference.join_keys(SplitKeys(own, shared)))
    assert torch.equal(keys[..., :NOPE], own)
    for head in range(HEADS):
        assert torch.equal(keys[:, head, NOPE:], shared)


def test_f07_a_product_and_what_an_adapter_adds_are_rounded_once() -> None:
    """F07: an adapter that takes back 31 of 32 parts; what the product alone would lose by rounding
    is a tenth of what is left."""
    heads, nope, v, latent, half = 2, 8, 16, 16, torch.float16
    weight = randn(heads, nope + v, latent, dtype=half)
    unit = torch.eye(latent, dtype=half, device=DEVICE)
    less = -weight.flatten(0, 1) * (31 / 32)
    site = LinearSite(
        torch.cat((unit.flatten(), less.flatten())),
        torch.tensor([[0, latent, 0, latent, latent * latent]], device=DEVICE),
        torch.ones(1, 1, device=DEVICE), (heads * (nope + v),), latent,
    )  # fmt: skip
    adapters = LatentAdapters(site, make_rows(0, 0))
    q = 64 * randn(2, heads, nope + ROPE, dtype=half)
    attended = 64 * randn(2, heads, latent, dtype=half, seed=5)
    for ours, naive, x in (
        (fast.absorb_queries, reference.absorb_queries, q),
        (fast.expand_values, reference.expand_values, attended),
    ):
        exact = naive(x, weight, nope, adapters).float()
        alone = naive(x, weight, nope, None).float()
        error = (ours(x, weight, nope, adapters).float() - exact).abs().max()
        assert error <= 2**-10 * exact.abs().max()
        assert (alone - exact).abs().max() > exact.abs().max()


def test_f07_what_is_sent_to_the_kernels_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """F07: bfloat16 of DeepSeek's or GLM's dimensions, pages that fill tiles, prompts that are not
    short."""
    half = torch.bfloat16
    for module in (triton_hopper, triton_hopper_prompt):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)

    def decodes(
        width: int = 576, latent: int = 512, page: int = 16, dtype: torch.dtype = half
    ) -> bool:
        queries, pages = torch.empty(2, 4, width, dtype=half), torch.empty(3, page, width)
        return triton_hopper.is_for(queries, pages.to(dtype), latent)

    assert decodes()
    assert decodes(page=128)
    assert not decodes(page=8)
    assert not decodes(width=512, latent=448)
    assert not decodes(dtype=torch.uint8)

    def attends(
        key_dim: int = 192,
        value_dim: int = 128,
        tokens: int = 256,
        keys: int = 300,
        dtype: torch.dtype = half,
    ) -> bool:
        q, shared = torch.empty(tokens, 2, key_dim, dtype=dtype), torch.empty(keys, 64, dtype=dtype)
        nope = key_dim - 64
        both = torch.empty(keys, 2, nope + value_dim, dtype=dtype)
        k, v = SplitKeys(both[..., :nope], shared), both[..., nope:]
        starts = torch.tensor([0, tokens])
        return triton_hopper_prompt.is_for(q, k, v, KeyPiece(starts, starts, starts[:1], tokens))

    assert attends()
    assert attends(key_dim=256, value_dim=256)
    assert not attends(key_dim=256)
    assert not attends(key_dim=160)
    assert not attends(tokens=100)
    assert not attends(keys=0)
    assert not attends(dtype=torch.float32)


def test_f07_how_latent_decode_is_divided_on_hopper() -> None:
    """F07: pairs of tiles for many heads, if parts are about as many as rows; few heads are padded
    to what a program has, and their parts are merged a head at a time."""
    way_for = triton_hopper.way_for
    assert [way_for(8, heads, 132).heads for heads in (3, 16, 20, 32, 33, 128)] == [
        16, 16, 32, 32, 64, 64,
    ]  # fmt: skip
    assert not way_for(4096, 32, 132).in_pairs
    assert [way_for(rows, 128, 132).in_pairs for rows in (8, 32, 33, 64)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert [way_for(rows, 64, 132).in_pairs for rows in (64, 66)] == [False, True]
    assert (way_for(64, 128, 132).unit, way_for(8, 128, 132).unit) == (128, 64)
    assert way_for(64, 16, 132).merged_heads == 1
