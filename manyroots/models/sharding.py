"""Which rank has which part of a model: along which side each weight is cut.

Takes whole things (a spec, a checkpoint's tensors, an adapter's pairs) and a rank's place; gives
that rank's part. The rule, for a weight W [out, in] and an adapter's delta B A:

    q, k, v, gate, up, head   by output   W and B are cut, A is whole; nothing to add up
    o, down                   by input    W and A are cut, B is whole; ranks add up their products
    all else                  whole       embeddings, norms, routers

Heads are never cut: a rank has whole key-value heads with all queries that read them. Experts are
cut like dense blocks, each of them, so that every rank has a part of every expert.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.errors import ConfigError
from manyroots.lora.targets import Target, Targets
from manyroots.models.spec import ModelSpec
from manyroots.store.adapter_weights import AdapterWeights, LoraPair


class Side(enum.Enum):
    """What of a projection is divided among ranks."""

    OUTPUT = "output"
    INPUT = "input"


SIDES = {
    "q_proj": Side.OUTPUT,
    "k_proj": Side.OUTPUT,
    "v_proj": Side.OUTPUT,
    "gate_proj": Side.OUTPUT,
    "up_proj": Side.OUTPUT,
    "lm_head": Side.OUTPUT,
    "o_proj": Side.INPUT,
    "down_proj": Side.INPUT,
}
"""By the last part of a projection's name; projections that are not here are whole everywhere."""


def side_of(target: str) -> Side | None:
    """Of a projection, by its checkpoint name without `.weight`."""
    return SIDES.get(target.rpartition(".")[2])


def rank_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The model that one rank computes: the same, with fewer heads and narrower blocks."""
    if shard.is_whole:
        return spec
    traits, dense_width = spec.traits, spec.intermediate_size
    num_kv_heads = _divide("number of key-value heads", spec.num_kv_heads, shard)
    if traits.experts is not None:
        width = _divide("expert width", traits.experts.intermediate_size, shard)
        traits = replace(traits, experts=replace(traits.experts, intermediate_size=width))
    if len(traits.sparse_layers) < spec.num_layers:
        dense_width = _divide("feed-forward width", dense_width, shard)
    return replace(
        spec,
        num_kv_heads=num_kv_heads,
        num_heads=spec.num_heads // shard.size,  # a multiple of the key-value heads
        intermediate_size=dense_width,
        traits=traits,
    )


def cut_weights(
    weights: Iterable[tuple[str, Tensor]], shard: Shard
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors as views of the rank's part."""
    for name, tensor in weights:
        target, _, kind = name.rpartition(".")
        match side_of(target), kind:
            case Side.OUTPUT, "weight" | "bias" if tensor.ndim > 0:
                yield name, tensor[shard.part(tensor.shape[0])]
            case Side.INPUT, "weight" if tensor.ndim > 1:
                yield name, tensor[:, shard.part(tensor.shape[1])]
            case Side.INPUT, "bias" if not shard.is_first:
                yield name, torch.zeros_like(tensor)  # the sum over ranks must have it once
            case _:
                yield name, tensor


def cut_adapter(weights: AdapterWeights, shard: Shard) -> AdapterWeights:
    """The rank's part of an adapter, in memory of its own; its digest is still the whole one's."""
    if shard.is_whole:
        return weights
    cut = {name: _cut_pair(name, pair, shard) for name, pair in weights.pairs.items()}
    sizes = [half.numel() for pair in cut.values() for half in (pair.a, pair.b)]
    is_pinned = weights.buffer.is_pinned()
    buffer = torch.empty(sum(sizes), dtype=weights.buffer.dtype, pin_memory=is_pinned)
    places = iter(torch.split(buffer, sizes))

    def place(half: Tensor) -> Tensor:
        return next(places).view(half.shape).copy_(half)

    pairs = {name: replace(pair, a=place(pair.a), b=place(pair.b)) for name, pair in cut.items()}
    return AdapterWeights(weights.digest, pairs, buffer)


def whole_targets(targets: Targets, shard: Shard, vocab_size: int) -> dict[str, Target]:
    """What adapters may change of the whole model, given a rank's part: files are of the whole."""
    whole = {}
    for name, target in targets.items():
        match side_of(name):
            case Side.OUTPUT if name == "lm_head":
                target = replace(target, out_features=vocab_size)  # ranks' parts may differ
            case Side.OUTPUT:
                target = replace(target, out_features=target.out_features * shard.size)
            case Side.INPUT:
                target = replace(target, in_features=target.in_features * shard.size)
        whole[name] = target
    return whole


def _cut_pair(name: str, pair: LoraPair, shard: Shard) -> LoraPair:
    match side_of(name):
        case Side.OUTPUT:
            return replace(pair, b=pair.b[..., shard.part(pair.b.shape[-2]), :])
        case Side.INPUT:
            return replace(pair, a=pair.a[..., shard.part(pair.a.shape[-1])])
        case _:
            return pair


def _divide(what: str, count: int, shard: Shard) -> int:
    if count % shard.size:
        raise ConfigError(
            f"--tensor-parallel-size is {shard.size}, and the model's {what} ({count}) can't be "
            "divided by it; choose a size that divides it."
        )
    return count // shard.size
