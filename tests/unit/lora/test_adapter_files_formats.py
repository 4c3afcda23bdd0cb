"""Good adapters read back as what was written, in every format, spelling and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from manyroots.lora.spec import AdapterSpec
from manyroots.lora.targets import Targets
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_weights import AdapterWeights
from tests.adapter_folders import ExpertFormat, Pair, Recipe, tiny_targets, write_adapter

DENSE = tiny_targets()
MOE = tiny_targets(num_experts=3)


def read(
    folder: Path, targets: Targets, *, dtype: torch.dtype = torch.float32, max_rank: int = 64
) -> tuple[AdapterSpec, AdapterWeights]:
    return read_adapter(folder, targets, max_rank=max_rank, dtype=dtype, pin=False, vocab_size=64)


def check_equal(weights: AdapterWeights, wanted: Mapping[str, Pair], targets: Targets) -> None:
    assert list(weights.pairs) == [name for name in targets if name in wanted]
    for name, pair in weights.pairs.items():
        assert torch.equal(pair.a.float(), wanted[name].a), name
        assert torch.equal(pair.b.float(), wanted[name].b), name
        assert pair.scaling == wanted[name].scaling


@pytest.mark.parametrize("rank", [1, 3, 16, 64])
def test_w14_every_module_of_a_dense_model_is_read_with_the_rank_it_has(
    tmp_path: Path, rank: int
) -> None:
    """W14: attention, feed-forward, embedding and head, each in its canonical shape."""
    wanted = write_adapter(tmp_path, DENSE, Recipe(rank=rank, seed=rank))
    spec, weights = read(tmp_path, DENSE)
    check_equal(weights, wanted, DENSE)
    assert spec.rank == rank
    assert spec.digest == weights.digest
    assert len(spec.digest) == 32
    assert weights.pairs["model.embed_tokens"].a.shape == (64, rank)
    assert weights.num_bytes == spec.num_bytes
    assert sum(p.a.numel() + p.b.numel() for p in weights.pairs.values()) * 4 == spec.num_bytes


@pytest.mark.parametrize("form", list(ExpertFormat))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w15_every_expert_format_is_told_from_names_and_shapes(
    tmp_path: Path, form: ExpertFormat, dtype: torch.dtype
) -> None:
    """W15: per-expert 2-D keys, stacked 3-D keys with either side shared, fused and flat."""
    modules = ("q_proj", "gate_proj", "up_proj", "down_proj")
    wanted = write_adapter(tmp_path, MOE, Recipe(experts=form, dtype=dtype, modules=modules))
    _, weights = read(tmp_path, MOE)
    check_equal(weights, wanted, MOE)
