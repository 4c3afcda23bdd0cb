"""Latent attention: the torch set against the naive one, and absorbed products against expanded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.kernels.latent import reference, torch_ops
from manyroots.kernels.latent.inputs import (
    IndexNorm,
    KeyPiece,
    LatentAdapters,
    LatentNorm,
    SplitKeys,
    as_fp8_rows,
    from_fp8_rows,
    row_bytes,
)
from manyroots.kernels.lora_ops.batch import AdapterBatch
from manyroots.kernels.lora_ops.sites import LinearSite, LoraRows
from manyroots.kernels.lora_ops.weights import LowRank, Part, SlotWeights
from manyroots.kernels.qk_rope_kv_write import torch_ops as torch_rope
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping
from manyroots.kernels.tolerances import assert_close

CPU = torch.device("cpu")
LATENT, ROPE, NOPE, V, HEADS, PAGE = 20, 6, 10, 7, 3, 4
"""Odd on purpose: no two are equal and none is a power of two but a page."""
SCALE = 0.3


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def pages_of(rows: Tensor, num_pages: int, *, is_fp8: bool) -> Tensor:
    """Pages whose tokens are these rows, the others none at all."""
    pages = torch.full((num_pages, PAGE, rows.shape[1]), torch.nan)
    pages.view(-1, rows.shape[1])[: len(rows)] = rows
    if not is_fp8:
        return pages
    packed = as_fp8_rows(pages.flatten(0, 1), LATENT)
    return packed.view(num_pages, PAGE, -1)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("pairs", [ROPE // 2, 0])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_f07_latents_are_normalised_rotated_and_written(
    is_interleaved: bool, pairs: int, is_fp8: bool
) -> None:
    """F07: one row per token, the latent first; a token without a page is written nowhere."""
    tokens = 5
    q, kv = randn(tokens, HEADS, NOPE + ROPE), randn(tokens, LATENT + ROPE, seed=1)
    table = RopeTable.at(torch.arange(3, 3 + tokens), randn(pairs, seed=3).abs() + 0.1, 1.3)
    positions = torch.arange(tokens)
    norm = LatentNorm(randn(LATENT, seed=2), 1e-5)
    mapping = SlotMapping(int32(2, 0, -1, 1, 1), int32(3, 0, 0, 1, 2))
    width = row_bytes(LATENT + ROPE) if is_fp8 else LATENT + ROPE
    both = [
        torch.zeros(3, PAGE, width, dtype=torch.uint8 if is_fp8 else torch.float32)
        for _ in range(2)
    ]
    naive = reference.latent_write(
        q, kv, table, norm, both[0], mapping, is_interleaved=is_interleaved
    )
    angles = torch_rope.look_up(table, positions, torch.float32)
    ours = torch_ops.latent_write(
        q, kv, angles, norm, both[1], mapping, is_interleaved=is_interleaved
    )
    assert_close("rotary", ours, naive, torch.float32)
    at = torch.arange(3 * PAGE)
    read = [reference.read_rows(p, at, LATENT, ROPE, torch.float32) for p in both]
    assert_close("rotary", read[1], read[0], torch.float32)
    assert torch.equal(
        torch.cat(torch_ops.latent_read(both[0], at, LATENT, ROPE, torch.float32), 1), read[0]
    )
    written = {2 * PAGE + 3, 0, PAGE + 1, PAGE + 2}
    assert {row for row in at.tolist() if read[0][row].any()} == written
    latents = kv[0, :LATENT] * torch.rsqrt(kv[0, :LATENT].square().mean() + 1e-5) * norm.weight
    off = 0.04 * latents.abs().max() if is_fp8 else 1e-5
    assert (read[0][2 * PAGE + 3, :LATENT] - latents).abs().max() <= off
    if pairs:
        assert not torch.equal(naive[..., NOPE:], q[..., NOPE:])
        lengths = (x[..., NOPE:].square().sum(-1) for x in (naive, 1.3 * q))
        assert torch.allclose(*lengths, rtol=1e-4)
    else:
        assert torch.equal(naive, q)


def test_f07_partial_sums_of_queries_and_latents_are_added_up() -> None:
    """F07: as for whole products."""
    q, kv = randn(2, 4, HEADS, NOPE + ROPE), randn(3, 4, LATENT + ROPE, seed=1)
    table = RopeTable.at(torch.arange(4), randn(ROPE // 2, seed=3).abs() + 0.1)
    angles = torch_rope.look_up(table, torch.arange(4), torch.float32)
    norm = LatentNorm(torch.ones(LATENT), 1e-5)
    mapping = SlotMapping(int32(0, 0, 0, 0), int32(0, 1, 2, 3))
    found = []
    for given in ((q, kv), (q.sum(0), kv.sum(0))):
        pages = torch.zeros(1, PAGE, LATENT + ROPE)
        turned = torch_ops.latent_write(
            *given, angles, norm, pages, mapping, torch.float32, is_interleaved=True
        )
        found.append((turned, pages))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_f07_scores_do_not_depend_on_how_pairs_lie() -> None:
    """F07: a pair's coordinates side by side and in two halves are one rotation."""
    q, kv = randn(4, HEADS, NOPE + ROPE), randn(4, LATENT + ROPE, seed=1)
    table = RopeTable.at(torch.arange(4), randn(ROPE // 2, seed=3).abs() + 0.1)
    norm = LatentNorm(torch.ones(LATENT), 1e-5)
    order = torch.cat((torch.arange(0, ROPE, 2), torch.arange(1, ROPE, 2)))
    halves_q, halves_kv = q.clone(), kv.clone()
    halves_q[..., NOPE:], halves_kv[:, LATENT:] = (
        q[..., NOPE:][..., order],
        kv[:, LATENT:][:, order],
    )
    mapping = SlotMapping(int32(0, 0, 0, 0), int32(0, 1, 2, 3))
    found = []
    for values, is_interleaved in (((q, kv), True), ((halves_q, halves_kv), False)):
        pages = torch.zeros(1, PAGE, LATENT + ROPE)
        turned = reference.latent_write(
            *values, table, norm, pages, mapping, is_interleaved=is_interleaved
        )
        found.append((turned, pages))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("is_fp8", [False, True])
def test_f07_rows_attend_to_exactly_the_latents_they_see(
    is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F07: rows of any length, of one sequence or of several, and one that only pads. NaN follows a
    row's last token and does not matter. However few are gathered at once."""
    rows = randn(4 * PAGE + 1, LATENT + ROPE)
    pages = pages_of(rows, 8, is_fp8=is_fp8)
    queries = randn(5, HEADS, LATENT + ROPE, seed=1)
    table = int32(0, 1, 2, 3, 4, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4)
    table, lengths = table.view(5, 5), int32(4 * PAGE + 1, 3, 2, 0, 5)
    naive = reference.latent_decode(queries, pages, table, lengths, SCALE, LATENT)
    assert bool(torch.isfinite(naive).all())
    assert not naive[3].any()
    for most in (1 << 20, 1):
        monkeypatch.setattr(torch_ops, "MAX_GATHERED", most)
        ours = torch_ops.latent_decode(queries, pages, table, lengths, SCALE, LATENT)
        assert_close("attention", ours, naive, torch.float32)


@pytest.mark.parametrize("most_scores", [1 << 20, HEADS * 7])
def test_f07_pieces_of_keys_merge_to_the_whole(
    most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F07: keys in two pieces, of sequences with and without earlier tokens, equal all at once."""
    monkeypatch.setattr(torch_ops, "MAX_SCORES", most_scores)
    queries, contexts, cuts = (3, 5, 1), (3, 9, 4), (2, 5, 4)
    dk, dv = NOPE + ROPE, V
    q = randn(sum(queries), HEADS, dk)
    k, v = randn(sum(contexts), HEADS, NOPE, seed=1), randn(sum(contexts), HEADS, dv, seed=2)
    rotated = randn(sum(contexts), ROPE, seed=3)
    starts = np.concatenate(([0], np.cumsum(contexts)))

    def piece(bounds: list[tuple[int, int]]) -> tuple[SplitKeys, Tensor, KeyPiece]:
        """Of each sequence, its keys from one place to another."""
        both = zip(starts[:-1], bounds, strict=True)
        at = np.concatenate([np.arange(s + a, s + b) for s, (a, b) in both])
        sizes = [b - a for a, b in bounds]
        seen = [c - n - a for c, n, (a, _) in zip(contexts, queries, bounds, strict=True)]
        own = KeyPiece(
            int32(0, *np.cumsum(queries)), int32(0, *np.cumsum(sizes)), int32(*seen),
            max(queries),
        )  # fmt: skip
        return SplitKeys(k[at], rotated[at]), v[at], own

    keys, values, own = piece([(0, c) for c in contexts])
    whole, sums = reference.attend_piece(q, keys, values, own, SCALE)
    ours, our_sums = torch_ops.attend_piece(q, keys, values, own, SCALE)
    assert_close("attention", ours, whole, torch.float32)
    assert_close("attention", our_sums, sums, torch.float32)
    for kernels in (reference, torch_ops):
        first = kernels.attend_piece(q, *piece([(0, cut) for cut in cuts]), SCALE)
        second = kernels.attend_piece(q, *piece(list(zip(cuts, contexts, strict=True))), SCALE)
        assert bool(torch.isinf(second[1]).any()), "some queries see nothing of the second"
        merged, total = kernels.merge(*first, *second)
        assert_close("attention", merged, whole, torch.float32)
        assert_close("attention", total, sums, torch.float32)
    nothing = (torch.zeros_like(whole), torch.full_like(sums, -torch.inf))
    empty, none = torch_ops.merge(*nothing, *nothing)
    assert not empty.any()
    assert bool(torch.isinf(none).all())


RANKS = (3, 0, 8)


def adapters_for(slots: list[int]) -> tuple[LatentAdapters, list[Tensor]]:
    """Three adapters of `kv_b_proj`, the second without any part there; and what each adds."""
    out = HEADS * (NOPE + V)
    pieces, table, deltas, used = [], [], [], 0
    scalings = torch.tensor([[0.5], [1.0], [2.0]])
    pairs = {}
    for slot, rank in enumerate(RANKS):
        a, b = randn(rank, LATENT, seed=slot), randn(out, rank, seed=9 + slot)
        table.append([used, rank, 0, rank, used + a.numel()])
        pieces += [a.flatten(), b.flatten()]
        used += a.numel() + b.numel()
        deltas.append(float(scalings[slot, 0]) * b @ a)
        pairs[slot] = (a, b)
    site = LinearSite(
        torch.cat(pieces), torch.tensor(table), scalings, (out,), max(RANKS), is_transposed=False
    )
    weights = {}
    for slot, (a, b) in pairs.items():
        scaled = (b * scalings[slot, 0]).t().contiguous()
        low = LowRank(a, (Part(slice(0, len(a)), slice(0, out), scaled),), out)
        linears = {site: low} if len(a) else {}
        weights[slot] = SlotWeights(linears, {}, {}, len(a), a.flatten())
    batch = AdapterBatch.build(np.array(slots), weights, None, CPU)
    return LatentAdapters(site, LoraRows.build(slots, CPU, batch=batch)), deltas


def test_f07_absorbed_products_equal_expanded_ones_with_every_adapter() -> None:
    """F07: queries times latents is queries times keys, and attended latents give the values, also
    where each row's own adapter changes `kv_b_proj`: its two factors are never multiplied."""
    slots = [-1, 0, 0, 1, 2]
    adapters, deltas = adapters_for(slots)
    weight = randn(HEADS, NOPE + V, LATENT, seed=3)
    q, latents = randn(len(slots), HEADS, NOPE + ROPE), randn(len(slots), LATENT, seed=4)
    attended = randn(len(slots), HEADS, LATENT, seed=5)
    for own in (None, adapters):
        naive = reference.absorb_queries(q, weight, NOPE, own)
        assert_close("lora", torch_ops.absorb_queries(q, weight, NOPE, own), naive, torch.float32)
        values = reference.expand_values(attended, weight, NOPE, own)
        assert_close(
            "lora", torch_ops.expand_values(attended, weight, NOPE, own), values, torch.float32
        )
        for row, slot in enumerate(slots):
            whole = weight.flatten(0, 1)
            if own is not None and slot >= 0:
                whole = whole + deltas[slot]
            by_head = whole.view(weight.shape)
            keys = by_head[:, :NOPE] @ latents[row]
            scores = (keys * q[row, :, :NOPE]).sum(-1)
            absorbed = naive[row, :, :LATENT] @ latents[row]
            assert torch.allclose(absorbed, scores, rtol=1e-4, atol=1e-4)
            expected = torch.einsum("hvl,hl->hv", by_head[:, NOPE:], attended[row])
            assert torch.allclose(values[row], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(naive[..., LATENT:], q[..., NOPE:])


def test_f07_rows_in_fp8_keep_a_scale_for_either_part() -> None:
    """F07: a latent and a rotated part of very different sizes are both kept to 2 or 3 digits."""
    rows = randn(6, LATENT + ROPE)
    rows[:, LATENT:] *= 1000.0
    packed = as_fp8_rows(rows, LATENT)
    assert packed.shape == (6, row_bytes(LATENT + ROPE))
    back = from_fp8_rows(packed, LATENT + ROPE, LATENT, torch.float32)
    for part in (slice(0, LATENT), slice(LATENT, None)):
        largest = rows[:, part].abs().amax(1, keepdim=True)
        assert bool(((back - rows)[:, part].abs() <= largest / 16).all())


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_f10_index_keys_are_normalised_rotated_and_written(is_interleaved: bool) -> None:
    """F10: the first part of keys and queries is rotated; a token without a page is written
    nowhere."""
    tokens, dim = 5, 14
    q, k = randn(tokens, HEADS, dim), randn(tokens, dim, seed=1) + 0.5
    table = RopeTable.at(torch.arange(3, 3 + tokens), randn(ROPE // 2, seed=3).abs() + 0.1, 1.3)
    norm = IndexNorm(randn(dim, seed=2), randn(dim, seed=4), 1e-5)
    slots = SlotMapping(int32(2, 0, -1, 0, 1), int32(3, 0, 1, 1, 2))
    both = [torch.full((3, PAGE, dim), torch.nan) for _ in range(2)]
    naive = reference.index_write(q, k, table, norm, both[0], slots, is_interleaved=is_interleaved)
    rows = torch_rope.look_up(table, torch.arange(tokens), torch.float32)
    ours = torch_ops.index_write(q, k, rows, norm, both[1], slots, is_interleaved=is_interleaved)
    assert_close("rotary", ours, naive, torch.float32)
    assert torch.equal(both[0].isnan(), both[1].isnan())
    assert both[0].isnan().sum() == (3 * PAGE - 4) * dim
    assert_close("rotary", both[1].nan_to_num(), both[0].nan_to_num(), torch.float32)
    plain = torch.nn.functional.layer_norm(k[0], (dim,), norm.weight, norm.bias, 1e-5)
    assert_close("rotary", both[0][2, 3, ROPE:], plain[ROPE:], torch.float32)
    assert torch.equal(naive[..., ROPE:], q[..., ROPE:])


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("most_gathered", [1, 1 << 22])
def test_f10_queries_attend_to_what_they_chose(
    most_gathered: int, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F10: in whatever order and however many at once; rows that were not chosen are not read, and
    a query that chose none gives zeros."""
    monkeypatch.setattr(torch_ops, "MAX_GATHERED", most_gathered)
    pages = pages_of(randn(3 * PAGE, LATENT + ROPE), 4, is_fp8=is_fp8)
    slots = torch.tensor([[5, 0, 11, 7], [2, 3, -1, -1], [-1, -1, -1, -1], [9, -1, -1, -1]])
    queries = randn(4, HEADS, LATENT + ROPE, seed=1)
    naive = reference.attend_chosen(queries, pages, slots, SCALE, LATENT)
    ours = torch_ops.attend_chosen(queries, pages, slots, SCALE, LATENT)
    assert_close("attention", ours, naive, torch.float32)
    assert ours[2].eq(0).all()
    rows = reference.read_rows(pages, slots[0], LATENT, ROPE, torch.float32)
    alone = reference.latent_decode(
        queries[:1], rows[None], torch.zeros(1, 1, dtype=torch.int32), int32(4), SCALE, LATENT
    )
    assert_close("attention", naive[:1], alone, torch.float32)
