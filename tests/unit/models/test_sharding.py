"""W16: ranks that each have a part of a model compute, together, what one rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from manyroots.config import ModelSettings
from manyroots.distributed.shard import WHOLE, Shard
from manyroots.errors import ConfigError
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.spec import AttentionSpec, GatedNormKind, MambaSpec
from manyroots.layers.weights.fill import Fill
from manyroots.models.decoder import Decoder
from manyroots.models.load import load_model
from manyroots.models.sharding import rank_spec
from manyroots.models.source import resolve_source
from tests.unit.models.lockstep import LockstepShard, in_lockstep
from tests.unit.models.paged import PagedModel
from tests.unit.models.test_logits_parity import prompts
from tests.unit.models.tiny import MODELS, load_tiny, save_tiny, tiny_spec


def load_worker(folder: Path, shard: Shard) -> Decoder:
    return load_model(
        resolve_source(ModelSettings(model=str(folder))),
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="auto",
        seed=0,
        shard=shard,
    )


def chunked(model: Decoder) -> dict[str, Tensor]:
    """Logits of every prompt, computed in two steps."""
    paged = PagedModel(model)
    first = paged.step({name: tokens[:5] for name, tokens in prompts().items()})
    rest = paged.step({name: tokens[5:] for name, tokens in prompts().items()})
    return {name: torch.cat((first[name], rest[name])) for name in first}


@pytest.mark.parametrize("kind", MODELS)
def test_w16_two_ranks_give_one_ranks_logits(kind: str, tmp_path: Path) -> None:
    """W16: every architecture, biases once, a vocabulary (97) that two ranks can't halve."""
    save_tiny(tmp_path, kind)
    model = load_tiny(tmp_path)
    alone = chunked(model)

    def rank(shard: LockstepShard) -> dict[str, Tensor]:
        return chunked(load_worker(tmp_path, shard))

    results, meeting = in_lockstep(2, rank)
    for result in results:
        for name, logits in alone.items():
            assert_close("logits", result[name], logits, torch.float32)
    # A sum for each half of a layer and one join, in each of two steps; and one for a norm of all
    # channels or heads.
    mixers = [mixer for layer in model.spec.layers for mixer in layer.mixers]
    num_norms = sum(
        mixer.norm is not GatedNormKind.GATE_ONLY and mixer.norm_groups == 1
        if isinstance(mixer, MambaSpec)
        else isinstance(mixer, AttentionSpec) and mixer.norm_spans_heads
        for mixer in mixers
    )
    layers = model.spec.layers
    num_halves = sum(bool(layer.mixers) + (layer.feed_forward is not None) for layer in layers)
    assert meeting.num_meetings == 2 * (num_halves + 1 + num_norms)


def test_w16_four_ranks_give_one_ranks_logits(tmp_path: Path) -> None:
    """W16: more ranks than two; the last has fewer tokens of the vocabulary."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    save_tiny(tmp_path, **sizes)
    alone = chunked(load_tiny(tmp_path))
    results, _ = in_lockstep(4, lambda shard: chunked(load_worker(tmp_path, shard)))
    for result in results:
        for name, logits in alone.items():
            assert_close("logits", result[name], logits, torch.float32)


def test_a_rank_has_its_share_of_weights_and_of_keys_and_values(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    whole, part = load_tiny(tmp_path), load_worker(tmp_path, Shard(1, 2))
    kv_heads = [model.spec.layers[0].attention.memory.kv_heads for model in (part, whole)]
    assert kv_heads[0] * 2 == kv_heads[1]
    small, large = part.weights(), whole.weights()
    assert set(small) == set(large)
    for name, fill in small.items():
        is_whole = "norm" in name or "embed" in name
        assert fill.place.numel() <= large[name].place.numel() * (1 if is_whole else 0.5)


@pytest.mark.parametrize(
    ("size", "what"),
    [(4, "key-value heads \\(2\\)"), (3, "key-value heads"), (6, "--tensor-parallel-size is 6")],
)
def test_sizes_that_do_not_divide_the_model_are_refused(size: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        rank_spec(tiny_spec(), Shard(0, size))


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"feed-forward width \(81\)"):
        rank_spec(tiny_spec(intermediate_size=81), Shard(0, 2))
    with pytest.raises(ConfigError, match=r"expert width \(25\)"):
        rank_spec(tiny_spec("qwen3-moe", moe_intermediate_size=25), Shard(0, 2))


def test_a_dense_width_that_no_layer_has_is_no_obstacle() -> None:
    spec = rank_spec(tiny_spec("qwen3-moe", intermediate_size=81), Shard(0, 2))
    assert spec.layers[0].attention.num_heads == 3


def test_one_rank_is_the_model_itself() -> None:
    spec = tiny_spec()
    assert rank_spec(spec, WHOLE) is spec


def test_parts_cover_everything_once() -> None:
    for count in (1, 5, 8, 97):
        for size in (1, 2, 3, 8):
            covered = [
                n for rank in range(size) for n in range(count)[Shard(rank, size).part(count)]
            ]
            assert covered == list(range(count))


def test_biases_behind_a_sum_are_added_by_the_first_rank_alone() -> None:
    first, second = (
        Fill(torch.full((4,), 9.0), shard=Shard(rank, 2), is_first_only=True) for rank in (0, 1)
    )
    for fill in (first, second):
        fill.take(fill.part_of(torch.ones(4)))
    assert first.place.tolist() == [1.0] * 4
    assert second.place.tolist() == [0.0] * 4
