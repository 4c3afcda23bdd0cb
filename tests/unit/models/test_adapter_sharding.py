"""W16: ranks that each have a part of an adapter add, together, what the whole adapter adds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.lora.targets import Target, TargetKind
from manyroots.models.sharding import Side, cut_adapter, side_of, whole_targets
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_weights import AdapterWeights
from tests.adapter_folders import ExpertFormat, Recipe, tiny_targets, write_adapter


def read(folder: Path, form: ExpertFormat) -> AdapterWeights:
    targets = tiny_targets(num_experts=4)
    write_adapter(folder, targets, Recipe(experts=form))
    _, weights = read_adapter(
        folder, targets, max_rank=64, dtype=torch.float32, pin=False, vocab_size=1000
    )
    return weights


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ExpertFormat)
def test_w16_parts_of_an_adapter_make_up_the_whole(
    form: ExpertFormat, size: int, tmp_path: Path
) -> None:
    """W16: B is cut by output, A by input; side by side the parts are the whole."""
    whole = read(tmp_path, form)
    parts = [cut_adapter(whole, Shard(rank, size)) for rank in range(size)]
    for name, pair in whole.pairs.items():
        own = [part.pairs[name] for part in parts]
        match side_of(name):
            case Side.OUTPUT:
                assert all(torch.equal(part.a, pair.a) for part in own)
                assert torch.equal(torch.cat([part.b for part in own], -2), pair.b)
            case Side.INPUT:
                assert all(torch.equal(part.b, pair.b) for part in own)
                assert torch.equal(torch.cat([part.a for part in own], -1), pair.a)
            case None:
                assert "embed" in name
                assert all(torch.equal(part.a, pair.a) for part in own)
                assert all(torch.equal(part.b, pair.b) for part in own)


def test_a_part_has_memory_of_its_own_and_the_digest_of_the_whole(tmp_path: Path) -> None:
    whole = read(tmp_path, ExpertFormat.STACKED)
    part = cut_adapter(whole, Shard(0, 2))
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
    assert cut_adapter(whole, WHOLE) is whole


def test_files_are_checked_against_the_whole_model() -> None:
    part = {
        "model.embed_tokens": Target(TargetKind.EMBEDDING, 97, 48),
        "model.layers.0.self_attn.q_proj": Target(TargetKind.LINEAR, 48, 24),
        "model.layers.0.self_attn.o_proj": Target(TargetKind.LINEAR, 24, 48),
        "model.layers.0.mlp.experts.down_proj": Target(TargetKind.EXPERTS, 12, 48, 8),
        "lm_head": Target(TargetKind.LINEAR, 48, 49),
    }
    assert whole_targets(part, Shard(0, 2), vocab_size=97) == {
        "model.embed_tokens": Target(TargetKind.EMBEDDING, 97, 48),
        "model.layers.0.self_attn.q_proj": Target(TargetKind.LINEAR, 48, 48),
        "model.layers.0.self_attn.o_proj": Target(TargetKind.LINEAR, 48, 48),
        "model.layers.0.mlp.experts.down_proj": Target(TargetKind.EXPERTS, 24, 48, 8),
        "lm_head": Target(TargetKind.LINEAR, 48, 97),
    }
