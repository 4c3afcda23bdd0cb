"""W16: ranks that each have a part of an adapter add, together, what the whole adapter adds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.ids import AdapterSlot
from manyroots.kernels.tolerances import assert_close
from manyroots.lora.targets import Side, Target, TargetKind, Targets
from manyroots.models.decoder import Decoder
from manyroots.models.sharding import cut_adapter, whole_targets
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.adapter_folders import ExpertFormat, Recipe, tiny_targets, write_adapter
from tests.unit.models.lockstep import in_lockstep
from tests.unit.models.paged import PagedModel
from tests.unit.models.peft_models import pool_for
from tests.unit.models.test_sharding import load_worker
from tests.unit.models.tiny import load_tiny, save_tiny

TARGETS = tiny_targets(num_experts=4)


def read(folder: Path, form: ExpertFormat) -> AdapterWeights:
    write_adapter(folder, TARGETS, Recipe(experts=form))
    return read_for(folder, TARGETS)


def read_for(folder: Path, targets: Targets) -> AdapterWeights:
    _, weights = read_adapter(folder, targets, max_rank=64, dtype=torch.float32, vocab_size=1000)
    return weights


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ExpertFormat)
def test_w16_parts_of_an_adapter_make_up_the_whole(
    form: ExpertFormat, size: int, tmp_path: Path
) -> None:
    """W16: B is cut by output, A by input; side by side the parts are the whole."""
    whole = read(tmp_path, form)
    parts = [cut_adapter(whole, Shard(rank, size), TARGETS) for rank in range(size)]
    for name, pair in whole.pairs.items():
        own = [part.pairs[name] for part in parts]
        match TARGETS[name].side:
            case Side.OUTPUT:
                assert all(torch.equal(part.a, pair.a) for part in own)
                assert torch.equal(torch.cat([part.b for part in own], -2), pair.b)
            case Side.INPUT:
                assert all(torch.equal(part.b, pair.b) for part in own)
                assert torch.equal(torch.cat([part.a for part in own], -1), pair.a)
            case None:
                assert "embed" in name or name.endswith(".mlp.gate")
                assert all(torch.equal(part.a, pair.a) for part in own)
                assert all(torch.equal(part.b, pair.b) for part in own)


def test_a_part_has_memory_of_its_own_and_the_digest_of_the_whole(tmp_path: Path) -> None:
    whole = read(tmp_path, ExpertFormat.STACKED)
    part = cut_adapter(whole, Shard(0, 2), TARGETS)
    assert part.digest == whole.digest
    assert part.num_bytes < whole.num_bytes
    assert part.num_bytes == sum(
        half.numel() * half.element_size()
        for pair in part.pairs.values()
        for half in (pair.a, pair.b)
    )
    for pair in part.pairs.values():
        assert pair.a.is_contiguous()
        assert pair.a.untyped_storage().data_ptr() == part.buffer.untyped_storage().data_ptr()


def test_one_rank_has_the_adapter_itself(tmp_path: Path) -> None:
    whole = read(tmp_path, ExpertFormat.STACKED)
    assert cut_adapter(whole, WHOLE, TARGETS) is whole


def test_files_are_checked_against_the_whole_model() -> None:
    by_output, by_input = (partial(Target, side=side) for side in (Side.OUTPUT, Side.INPUT))
    part = {
        "model.embed_tokens": Target(TargetKind.EMBEDDING, 97, 48),
        "model.layers.0.self_attn.q_proj": by_output(TargetKind.LINEAR, 48, 24),
        "model.layers.0.self_attn.o_proj": by_input(TargetKind.LINEAR, 24, 48),
        "model.layers.0.mlp.experts.down_proj": by_input(TargetKind.EXPERTS, 12, 48, 8),
        "lm_head": by_output(TargetKind.LINEAR, 48, 49),
    }
    assert whole_targets(part, Shard(0, 2), vocab_size=97) == {
        "model.embed_tokens": Target(TargetKind.EMBEDDING, 97, 48),
        "model.layers.0.self_attn.q_proj": by_output(TargetKind.LINEAR, 48, 48),
        "model.layers.0.self_attn.o_proj": by_input(TargetKind.LINEAR, 48, 48),
        "model.layers.0.mlp.experts.down_proj": by_input(TargetKind.EXPERTS, 24, 48, 8),
        "lm_head": by_output(TargetKind.LINEAR, 48, 97),
    }


@dataclass(frozen=True)
class Request:
    adapter: int | None
    tokens: list[int]


HYBRIDS = ["qwen3-next", "qwen3.5", "granite-h", "granite-h-dense", "falcon-h1-norm"]
WITH_EXPERTS = ["qwen3-next", "granite-h"]
REQUESTS = {
    f"{adapter}, {number}": Request(adapter, [(7 * number + 5 * at) % 90 + 3 for at in range(17)])
    for number, adapter in enumerate([None, 0, 1, 2, 1, None])
}


def logits(model: Decoder, adapters: list[AdapterWeights]) -> dict[str, Tensor]:
    """Of requests of the base and of every adapter together: a prefill, then decodes."""
    pool = pool_for(model, num_slots=len(adapters))
    for slot, weights in enumerate(adapters):
        pool.load(AdapterSlot(slot), cut_adapter(weights, model.shard, model.adapter_targets()))
    paged = PagedModel(model, pool)
    paged.slot_of = {
        name: request.adapter for name, request in REQUESTS.items() if request.adapter is not None
    }
    first = paged.step({name: request.tokens[:14] for name, request in REQUESTS.items()})
    found = {name: [part] for name, part in first.items()}
    for at in range(14, 17):
        step = paged.step({name: request.tokens[at : at + 1] for name, request in REQUESTS.items()})
        for name, part in step.items():
            found[name].append(part)
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize(
    ("kind", "form"),
    [(kind, ExpertFormat.STACKED) for kind in ("llama", "llama-tied", "lfm2-biased")]
    + [("qwen3-moe-mixed", form) for form in ExpertFormat]
    + [(kind, ExpertFormat.PER_EXPERT) for kind in HYBRIDS],
)
def test_w16_two_ranks_give_one_ranks_logits_with_adapters(
    kind: str, form: ExpertFormat, tmp_path: Path
) -> None:
    """W16: every target and every format of experts, mixed with the base in one batch."""
    # Twice an expert's width is not the hidden size: else some formats could be read in two ways.
    sizes = {"intermediate_size" if kind == "granite-h" else "moe_intermediate_size": 20}
    has_experts = kind in WITH_EXPERTS or "moe" in kind
    save_tiny(tmp_path, kind, **(sizes if has_experts else {}))
    alone = load_tiny(tmp_path)
    targets = alone.adapter_targets()
    assert has_experts == any(t.kind is TargetKind.EXPERTS for t in targets.values())
    adapters = []
    for rank in (1, 4, 16):
        folder = tmp_path / f"rank {rank}"
        write_adapter(folder, targets, Recipe(rank=rank, experts=form, seed=rank, scale=0.1))
        adapters.append(read_for(folder, targets))
    expected = logits(alone, adapters)
    results, _ = in_lockstep(2, lambda shard: logits(load_worker(tmp_path, shard), adapters))
    for result in results:
        for name, wanted in expected.items():
            assert_close("logits", result[name], wanted, torch.float32)
    part = load_worker(tmp_path, Shard(0, 2))
    assert whole_targets(part.adapter_targets(), part.shard, part.spec.vocab_size) == targets
