"""An adapter in the pool is where the tables say, by one copy or by many, in either layout; a slot
is its owner's and shows nothing of earlier owners."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from manyroots.errors import AdapterError, ConfigError
from manyroots.ids import AdapterSlot
from manyroots.kernels.fused_moe.adapters import PART_WIDTH, ExpertSite
from manyroots.kernels.lora_ops import torch_ops
from manyroots.kernels.lora_ops.sites import EmbeddingSite, LinearSite
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_files import read_adapter, read_folder
from manyroots.store.adapter_layouts import Layouts
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_region import Region
from manyroots.store.adapter_sites import LoraSite, SitePart
from manyroots.store.adapter_weights import AdapterWeights, LoraPair
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.unit.host_copies import host_copy, random_adapter

CPU = torch.device("cpu")
SLOT = AdapterSlot(0)
HIDDEN, WIDE, EXPERTS, VOCAB = 16, 24, 3, 32
FACTOR = 4.0
"""Of a model that scales its embedding: what an adapter adds to it is scaled, too."""
FOLDER = "model.layers.0"


def parts() -> dict[str, SitePart]:
    linear, experts = TargetKind.LINEAR, TargetKind.EXPERTS
    qkv = LoraSite(linear, HIDDEN, {"q_proj": 32, "k_proj": 16, "v_proj": 16})
    o = LoraSite(linear, 32, {"": HIDDEN})
    gate_up = LoraSite(experts, HIDDEN, {"gate_proj": WIDE, "up_proj": WIDE}, num_experts=EXPERTS)
    down = LoraSite(experts, WIDE, {"down_proj": HIDDEN}, num_experts=EXPERTS)
    embedding = LoraSite(TargetKind.EMBEDDING, VOCAB, {"": HIDDEN}, factor=FACTOR)
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
        check_b(site, slot, part, offset, rank, pair.b, pair.scaling)


def check_b(
    site: LinearSite | ExpertSite | EmbeddingSite,
    slot: int,
    part: int,
    offset: int,
    rank: int,
    wanted: Tensor,
    scaling: float,
) -> None:
    own = wanted.shape[1]
    b = site.b(offset, wanted.shape[0], rank)
    assert not b[:, own:].any()
    if site.is_transposed:
        assert rank == own
        assert b.t().is_contiguous()
        assert torch.equal(b, wanted * scaling)
        assert site.scalings[slot, part].item() == 1.0
    else:
        assert torch.equal(b[:, :own], wanted)
        assert site.scalings[slot, part].item() == pytest.approx(scaling)


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
            check_b(site, slot, part, b_offset + expert * b_step, rank, wanted, pair.scaling)


def check_embedding(site: EmbeddingSite, slot: int, pair: LoraPair | None) -> None:
    a_offset, rank, b_offset = site.table[slot].tolist()
    if pair is None:
        assert rank == 0
        return
    a = matrix(site.pool, a_offset, VOCAB, rank)
    assert torch.equal(a[:, : pair.rank], pair.a)
    assert not a[:, pair.rank :].any()
    check_b(site, slot, 0, b_offset, rank, pair.b, FACTOR * pair.scaling)


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
    [embedding] = pool.embedding_sites.values()
    check_embedding(embedding, slot, weights.pairs.get("model.embed_tokens"))
    if pool.is_transposed:
        check_views(pool, slot, weights)


def check_views(pool: AdapterPool, slot: int, weights: AdapterWeights) -> None:
    """The views that torch's operators get are of the memory that the tables tell of."""
    views = pool.weights(slot)
    assert set(views.linears) | set(views.lookups) | set(views.experts) == {
        site
        for sites in (pool.sites, pool.embedding_sites, pool.expert_sites)
        for host, site in sites.items()
        if any(part.site is host and name in weights.pairs for name, part in pool._parts.items())
    }
    for site, low in views.linears.items():
        row = site.table[slot].tolist()  # type: ignore[attr-defined]
        assert (low.a.storage_offset(), low.rank) == (row[0], row[1])
        entries = [row[i : i + 3] for i in range(2, len(row), 3)]
        assert [[p.ranks.start, p.ranks.stop - p.ranks.start, p.b.storage_offset()]
                for p in low.parts] == [entry for entry in entries if entry[1]]  # fmt: skip
    for site, low in views.lookups.items():
        row = site.table[slot].tolist()  # type: ignore[attr-defined]
        assert [low.a.storage_offset(), low.rank, low.parts[0].b.storage_offset()] == row
    for site, lows in views.experts.items():
        row = site.table[slot].tolist()  # type: ignore[attr-defined]
        found = {
            low.a[:, part.ranks].storage_offset(): part.b.storage_offset()
            for low in lows
            for part in low.parts
        }
        entries = [row[i : i + PART_WIDTH] for i in range(0, len(row), PART_WIDTH)]
        assert found == {entry[0]: entry[3] for entry in entries if entry[2]}


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")


def make_pool(
    *,
    num_slots: int = 1,
    max_rank: int = 16,
    is_transposed: bool = True,
    dtype: torch.dtype = torch.float32,
) -> AdapterPool:
    return AdapterPool(
        parts(),
        num_slots=num_slots,
        max_rank=max_rank,
        dtype=dtype,
        device=CPU,
        is_transposed=is_transposed,
    )


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("modules", [ALL, ALL[:-1], ("q_proj", "v_proj", "up_proj")])
@pytest.mark.parametrize(("rank", "is_one_copy"), [(8, True), (16, True), (5, False)])
def test_every_pair_is_where_the_tables_say(
    tmp_path: Path, modules: tuple[str, ...], rank: int, is_one_copy: bool, is_transposed: bool
) -> None:
    """Two slots, the second with another adapter; ranks that need no padding come by one copy,
    unless they must be turned."""
    first = adapter(tmp_path / "a", Recipe(rank=rank, modules=modules, seed=1))
    second = adapter(tmp_path / "b", Recipe(rank=rank, modules=modules, seed=2))
    pool = make_pool(num_slots=2, is_transposed=is_transposed)
    with mock.patch.object(Region, "fill", autospec=True, side_effect=Region.fill) as filled:
        pool.load(AdapterSlot(0), first)
        pool.load(AdapterSlot(1), second)
        pool.load(AdapterSlot(0), first)
    assert filled.call_count == (3 if is_one_copy and not is_transposed else 0)
    check(pool, 0, first)
    check(pool, 1, second)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_an_adapter_moves_from_slot_to_slot(tmp_path: Path, is_transposed: bool) -> None:
    """What was in one slot before goes to any other, and so does what is alike; their rows are
    worked out once. Once all are gone, nothing is kept of them."""
    recipe = Recipe(rank=8, modules=ALL, seed=1)
    targets = {name: part.target for name, part in parts().items()}
    layouts = Layouts(targets, max_rank=32, dtype=torch.float32, vocab_size=VOCAB)
    alike = []
    for seed in (1, 2):
        write_adapter(tmp_path / f"{seed}", targets, replace(recipe, seed=seed))
        alike.append(read_folder(tmp_path / f"{seed}", layouts)[1])
    pool = make_pool(num_slots=4, is_transposed=is_transposed)
    pool.load(AdapterSlot(2), alike[0])
    with mock.patch.object(Region, "place", side_effect=AssertionError):
        for slot in (3, 0, 1):
            pool.load(AdapterSlot(slot), alike[slot % 2])
    for slot in range(4):
        check(pool, slot, alike[slot % 2])
    del alike, layouts
    gc.collect()
    assert len(pool._rows) == 0


@pytest.mark.parametrize("is_transposed", [False, True])
def test_halves_in_another_order_come_one_by_one(tmp_path: Path, is_transposed: bool) -> None:
    """A host copy that was not read from files may lie in any way."""
    read = adapter(tmp_path, Recipe(rank=8, modules=ALL[:4]))
    flat = [half.flatten() for pair in read.pairs.values() for half in (pair.b, pair.a)]
    buffer = torch.cat(flat)
    cut = iter(torch.split(buffer, [half.numel() for half in flat]))
    pairs = {}
    for name, pair in read.pairs.items():
        b, a = next(cut).view(pair.b.shape), next(cut).view(pair.a.shape)
        pairs[name] = LoraPair(a, b, pair.scaling)
    pool = make_pool(max_rank=8, is_transposed=is_transposed)
    pool.load(AdapterSlot(0), AdapterWeights(read.digest, pairs, buffer))
    check(pool, 0, read)


@pytest.mark.parametrize("shared", ["nothing", "gates", "all"])
def test_experts_may_share_halves(shared: str) -> None:
    """What experts share lies once; the A of gates and ups are together where both are alike."""
    generator = torch.Generator().manual_seed(0)

    def half(count: int, *shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    gates = 1 if shared != "nothing" else EXPERTS
    ups = 1 if shared == "all" else EXPERTS
    folder = f"{FOLDER}.mlp.experts"
    weights = host_copy(
        {
            f"{folder}.gate_proj": (half(gates, 5, HIDDEN), half(EXPERTS, WIDE, 5), 0.5),
            f"{folder}.up_proj": (half(ups, 3, HIDDEN), half(EXPERTS, WIDE, 3), 2.0),
            f"{folder}.down_proj": (half(EXPERTS, 4, WIDE), half(ups, HIDDEN, 4), 1.5),
        },
        shared,
    )
    for is_transposed in (False, True):
        pool = make_pool(is_transposed=is_transposed)
        pool.load(SLOT, weights)
        check(pool, 0, weights)
    gate_up = next(iter(pool.expert_sites.values()))
    assert len(pool.weights(0).experts[gate_up]) == (2 if shared == "gates" else 1)


def some_adapter(ranks: dict[str, int], seed: int = 0) -> AdapterWeights:
    targets = {name: part.target for name, part in parts().items()}
    named = {f"{FOLDER}.self_attn.{name}": rank for name, rank in ranks.items()}
    return random_adapter(targets, named, seed=seed, scaling=0.5)


def sites_of(pool: AdapterPool) -> tuple[LinearSite, LinearSite]:
    """qkv and o."""
    first, second = pool.sites.values()
    return first, second


def delta(pool: AdapterPool, site: LinearSite, x: Tensor, *slots: int) -> Tensor:
    """What the adapters in these slots add to a product, a row each."""
    rows = torch_ops.prepare(torch.tensor(slots).numpy(), pool, CPU)
    assert rows is not None
    y = torch.zeros(len(x), sum(site.part_sizes))
    torch_ops.add_linear(y, x, site, rows)
    return y


def test_a_reused_slot_shows_nothing_of_its_last_owner_w09() -> None:
    """W09: X (q, k, v, o) then Y (q alone) in the same slot: what Y adds to o is exactly 0."""
    pool, fresh = make_pool(), make_pool()
    torch.manual_seed(0)
    x, wide = torch.randn(3, HIDDEN), torch.randn(3, 32)
    pool.load(SLOT, some_adapter(dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"], 8)))
    assert delta(pool, sites_of(pool)[1], wide, 0, 0, 0).abs().max() > 0
    y = some_adapter({"q_proj": 4}, seed=1)
    pool.load(SLOT, y)
    fresh.load(SLOT, y)
    assert torch.equal(delta(pool, sites_of(pool)[1], wide, 0, 0, 0), torch.zeros(3, HIDDEN))
    mine = delta(pool, sites_of(pool)[0], x, 0, 0, 0)
    alone = delta(fresh, sites_of(fresh)[0], x, 0, 0, 0)
    assert torch.equal(mine, alone)
    assert mine[:, :32].abs().max() > 0
    assert torch.equal(mine[:, 32:], torch.zeros_like(mine[:, 32:]))


def test_a_reused_slot_shows_nothing_in_stacks_either_w09() -> None:
    """W09: as above, for adapters that are computed together."""
    pool = make_pool(num_slots=2)
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    o = sites_of(pool)[1]
    pool.load(SLOT, some_adapter({"q_proj": 4, "o_proj": 4}))
    pool.load(AdapterSlot(1), some_adapter({"o_proj": 4}, seed=2))
    for _ in range(3):
        before = delta(pool, o, x, 0, 0, 1, 1)
    pool.load(SLOT, some_adapter({"q_proj": 4}, seed=1))
    for _ in range(3):
        after = delta(pool, o, x, 0, 0, 1, 1)
    rows = torch_ops.prepare(torch.tensor([0, 0, 1, 1]).numpy(), pool, CPU)
    assert rows is not None
    assert rows.batch is not None
    assert rows.batch.group is not None
    assert torch.equal(after[:2], torch.zeros(2, HIDDEN))
    assert torch.equal(after[2:], before[2:])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_an_adapter_that_comes_again_is_the_same_bit_by_bit(
    tmp_path: Path, is_transposed: bool
) -> None:
    """Whatever was in the slot meanwhile."""
    first = adapter(tmp_path / "a", Recipe(rank=5, modules=ALL, seed=1))
    other = adapter(tmp_path / "b", Recipe(rank=16, modules=ALL, seed=2))
    pool = make_pool(is_transposed=is_transposed)
    pool.load(SLOT, first)
    sites = [*pool.sites.values(), *pool.embedding_sites.values(), *pool.expert_sites.values()]
    tables = [site.table.clone() for site in sites]
    pool.load(SLOT, other)
    pool.clear(SLOT)
    pool.load(SLOT, first)
    check(pool, 0, first)
    for site, table in zip(sites, tables, strict=True):
        assert torch.equal(site.table, table)


def test_a_cleared_slot_is_empty_and_an_empty_slot_computes_nothing() -> None:
    pool = make_pool()
    pool.load(SLOT, some_adapter({"q_proj": 4}))
    assert pool.used_bytes > 0
    pool.clear(SLOT)
    pool.clear(SLOT)
    assert pool.used_bytes == 0
    with pytest.raises(RuntimeError, match="slot 0, which is empty"):
        pool.weights(SLOT)


def test_a_slot_takes_the_memory_of_its_adapters_own_ranks() -> None:
    pool = make_pool(num_slots=2)
    pool.load(SLOT, some_adapter({"q_proj": 16}))
    pool.load(AdapterSlot(1), some_adapter({"k_proj": 16}, seed=1))
    assert pool.used_bytes == 16 * (HIDDEN + 32) * 4 + 16 * (HIDDEN + 16) * 4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_taken_when_an_adapter_comes_and_given_back_when_it_goes() -> None:
    """Room for many adapters of a high rank takes nothing before they are there."""
    size, rank, mib = 4096, 1024, 2**20
    site = LoraSite(TargetKind.LINEAR, size, {"": size})
    a, b = torch.ones(rank, size), torch.ones(size, rank)
    weights = host_copy({"x": (a, b, 1.0)}, "large")
    before = resident_bytes()
    pool = AdapterPool(
        dict(site.targets("x")), num_slots=64, max_rank=rank, dtype=torch.float32, device=CPU
    )
    assert resident_bytes() - before < 8 * mib, "2 GiB are promised"
    pool.load(AdapterSlot(7), weights)
    assert 28 * mib < resident_bytes() - before < 48 * mib
    pool.clear(AdapterSlot(7))
    assert resident_bytes() - before < 16 * mib
    pool.load(AdapterSlot(7), weights)
    assert torch.equal(pool.weights(7).linears[pool.sites[site]].a, a)


def test_room_that_no_machine_has_is_refused_naming_the_flags_w01() -> None:
    """W01: at start, and not when the last slot is filled."""
    with pytest.raises(ConfigError, match=r"--max-loras or --max-lora-rank"):
        make_pool(num_slots=2**40)


def test_weights_that_are_not_finite_in_the_engines_arithmetic_are_refused() -> None:
    pool = make_pool(dtype=torch.float16)
    target = f"{FOLDER}.self_attn.q_proj"
    large = torch.full((32, 2), 6e4).half()
    weights = host_copy({target: (torch.ones(2, HIDDEN).half(), large, 2.0)}, "huge")
    with pytest.raises(AdapterError, match="not all finite"):
        pool.load(SLOT, weights)
    with pytest.raises(RuntimeError, match="empty"):
        pool.weights(SLOT)


def test_targets_of_another_model_are_refused() -> None:
    weights = host_copy({"model.layers.9.mlp.up": (torch.ones(1, 2), torch.ones(3, 1), 1.0)}, "x")
    with pytest.raises(RuntimeError, match=r"model\.layers\.9"):
        make_pool().load(SLOT, weights)
