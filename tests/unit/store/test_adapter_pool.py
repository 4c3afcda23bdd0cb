"""An adapter in the pool is where the tables say, by one copy or by many."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from manyroots.ids import AdapterSlot
from manyroots.kernels.lora_sites.sites import LinearSite
from manyroots.kernels.moe_pairs.adapters import PART_WIDTH, ExpertSite
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_region import Region
from manyroots.store.adapter_sites import LoraSite, SitePart
from manyroots.store.adapter_weights import AdapterWeights, LoraPair
from tests.adapter_folders import Recipe, write_adapter

CPU = torch.device("cpu")
HIDDEN, WIDE, EXPERTS, VOCAB = 16, 24, 3, 32
FOLDER = "model.layers.0"


def parts() -> dict[str, SitePart]:
    linear, experts = TargetKind.LINEAR, TargetKind.EXPERTS
    qkv = LoraSite(linear, HIDDEN, {"q_proj": 32, "k_proj": 16, "v_proj": 16})
    o = LoraSite(linear, 32, {"": HIDDEN})
    gate_up = LoraSite(experts, HIDDEN, {"gate_proj": WIDE, "up_proj": WIDE}, num_experts=EXPERTS)
    down = LoraSite(experts, WIDE, {"down_proj": HIDDEN}, num_experts=EXPERTS)
    embedding = LoraSite(TargetKind.EMBEDDING, VOCAB, {"": HIDDEN})
    return {
        **dict(embedding.targets("model.embed_tokens")),
        **dict(qkv.targets(f"{FOLDER}.self_attn")),
        **dict(o.targets(f"{FOLDER}.self_attn.o_proj")),
        **dict(gate_up.targets(f"{FOLDER}.mlp.experts")),
        **dict(down.targets(f"{FOLDER}.mlp.experts")),
    }


def adapter(folder: Path, recipe: Recipe) -> AdapterWeights:
    targets = {name: part.target for name, part in parts().items()}
    write_adapter(folder, targets, recipe)
    return read_adapter(folder, targets, max_rank=32, dtype=torch.float32, vocab_size=VOCAB)[1]


def matrix(pool: Tensor, offset: int, rows: int, columns: int) -> Tensor:
    return pool[offset : offset + rows * columns].view(rows, columns)


def check_linear(site: LinearSite, slot: int, pairs: list[LoraPair | None], in_size: int) -> None:
    row = site.table[slot].tolist()
    a = matrix(site.pool, row[0], row[1], in_size)
    for part, pair in enumerate(pairs):
        start, rank, offset = row[2 + 3 * part : 5 + 3 * part]
        assert rank >= (0 if pair is None else pair.rank)
        if pair is None:
            assert rank == 0
            continue
        assert torch.equal(a[start : start + pair.rank], pair.a)
        assert not a[start + pair.rank : start + rank].any()
        b = matrix(site.pool, offset, pair.b.shape[0], rank)
        assert torch.equal(b[:, : pair.rank], pair.b)
        assert not b[:, pair.rank :].any()
        assert site.scalings[slot, part].item() == pytest.approx(pair.scaling)


def check_experts(site: ExpertSite, slot: int, pairs: list[LoraPair | None]) -> None:
    for part, pair in enumerate(pairs):
        row = site.table[slot].tolist()[PART_WIDTH * part : PART_WIDTH * (part + 1)]
        a_offset, a_step, rank, b_offset, b_step = row
        if pair is None:
            assert rank == 0
            continue
        for expert in range(EXPERTS):
            wanted = pair.a[expert if a_step else 0]
            a = matrix(site.pool, a_offset + expert * a_step, rank, wanted.shape[1])
            assert torch.equal(a[: pair.rank], wanted)
            wanted = pair.b[expert if b_step else 0]
            b = matrix(site.pool, b_offset + expert * b_step, wanted.shape[0], rank)
            assert torch.equal(b[:, : pair.rank], wanted)


def check(pool: AdapterPool, slot: int, weights: AdapterWeights) -> None:
    """All that the tables say of a slot is the host copy's."""
    names: dict[LoraSite, list[str]] = {}
    for name, part in pool._parts.items():
        names.setdefault(part.site, []).append(name)
    for host, site in pool.sites.items():
        pairs = [weights.pairs.get(name) for name in names[host]]
        check_linear(site, slot, pairs, host.in_features)
    for host, expert_site in pool.expert_sites.items():
        check_experts(expert_site, slot, [weights.pairs.get(name) for name in names[host]])
    embedding = weights.pairs.get("model.embed_tokens")
    if embedding is not None:
        lookup = pool._lookups[slot]
        assert torch.equal(lookup.a, embedding.a)
        assert torch.equal(lookup.b, embedding.b)


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")


@pytest.mark.parametrize("modules", [ALL, ALL[:-1], ("q_proj", "v_proj", "up_proj")])
@pytest.mark.parametrize(("rank", "is_one_copy"), [(8, True), (16, True), (5, False)])
def test_every_pair_is_where_the_tables_say(
    tmp_path: Path, modules: tuple[str, ...], rank: int, is_one_copy: bool
) -> None:
    """Two slots, the second with another adapter; ranks that need no padding come by one copy."""
    first = adapter(tmp_path / "a", Recipe(rank=rank, modules=modules, seed=1))
    second = adapter(tmp_path / "b", Recipe(rank=rank, modules=modules, seed=2))
    pool = AdapterPool(parts(), num_slots=2, max_rank=16, dtype=torch.float32, device=CPU)
    with mock.patch.object(Region, "fill", autospec=True, side_effect=Region.fill) as filled:
        pool.load(AdapterSlot(0), first)
        pool.load(AdapterSlot(1), second)
        pool.load(AdapterSlot(0), first)
    assert filled.call_count == (3 if is_one_copy else 0)
    check(pool, 0, first)
    check(pool, 1, second)


def test_halves_in_another_order_come_one_by_one(tmp_path: Path) -> None:
    """A host copy that was not read from files may lie in any way."""
    read = adapter(tmp_path, Recipe(rank=8, modules=ALL[:4]))
    flat = [half.flatten() for pair in read.pairs.values() for half in (pair.b, pair.a)]
    buffer = torch.cat(flat)
    cut = iter(torch.split(buffer, [half.numel() for half in flat]))
    pairs = {}
    for name, pair in read.pairs.items():
        b, a = next(cut).view(pair.b.shape), next(cut).view(pair.a.shape)
        pairs[name] = LoraPair(a, b, pair.scaling)
    pool = AdapterPool(parts(), num_slots=1, max_rank=8, dtype=torch.float32, device=CPU)
    pool.load(AdapterSlot(0), AdapterWeights(read.digest, pairs, buffer))
    check(pool, 0, read)
