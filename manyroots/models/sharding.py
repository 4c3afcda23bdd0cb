"""A rank's part of a description and of an adapter.

Takes whole objects (a spec, an adapter's pairs) and a rank's index; gives that rank's part. A
weight's layer defines the side that is cut, for checkpoints (`layers/weights/fill.py`) and for
adapters (`lora/targets.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.errors import ConfigError
from manyroots.layers.spec import BlockSpec, DenseSpec, Divide, ExpertsSpec, LayerSpec, SharedSpec
from manyroots.layers.weights.fill import piecewise, whole_size
from manyroots.lora.targets import Side, Target, Targets
from manyroots.models.spec import ModelSpec
from manyroots.store.adapter_weights import AdapterWeights, LoraPair


def rank_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The model that one rank computes: the same, with fewer heads and narrower blocks."""
    if shard.is_whole:
        return spec
    prediction = spec.prediction
    if prediction is not None:
        prediction = replace(prediction, layer=_rank_layer(prediction.layer, shard))
    layers = tuple(_rank_layer(layer, shard) for layer in spec.layers)
    return replace(spec, layers=layers, prediction=prediction)


def _rank_layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    divide = partial(_divide, shard)
    return replace(
        layer,
        mixers=tuple(mixer.cut(divide) for mixer in layer.mixers),
        feed_forward=_rank_block(layer.feed_forward, divide),
    )


def _rank_block(block: BlockSpec | None, divide: Divide) -> BlockSpec | None:
    match block:
        case None:
            return None
        case SharedSpec():
            experts = _rank_experts(block.experts, divide)
            return replace(block, experts=experts, shared=_rank_dense(block.shared, divide))
        case DenseSpec():
            return _rank_dense(block, divide)
        case ExpertsSpec():
            return _rank_experts(block, divide)


def _rank_dense(block: DenseSpec, divide: Divide) -> DenseSpec:
    inner = divide("feed-forward width", block.intermediate_size)
    return replace(block, intermediate_size=inner)


def _rank_experts(block: ExpertsSpec, divide: Divide) -> ExpertsSpec:
    return replace(block, intermediate_size=divide("expert width", block.intermediate_size))


def cut_adapter(weights: AdapterWeights, shard: Shard, targets: Targets) -> AdapterWeights:
    """The rank's part of an adapter, in separate memory; it keeps the digest of the whole.
    `targets`: the rank's part of each weight."""
    if shard.is_whole:
        return weights
    cut = {name: _cut_pair(pair, shard, targets[name]) for name, pair in weights.pairs.items()}
    sizes = [half.numel() for pair in cut.values() for half in (pair.a, pair.b)]
    is_pinned = weights.buffer.is_pinned()
    buffer = torch.empty(sum(sizes), dtype=weights.buffer.dtype, pin_memory=is_pinned)
    places = iter(torch.split(buffer, sizes))

    def place(half: Tensor) -> Tensor:
        return next(places).view(half.shape).copy_(half)

    pairs = {name: replace(pair, a=place(pair.a), b=place(pair.b)) for name, pair in cut.items()}
    return AdapterWeights(weights.digest, pairs, buffer)


def whole_targets(targets: Targets, shard: Shard, vocab_size: int) -> dict[str, Target]:
    """The targets of the whole model, from a rank's part: files describe the whole."""
    whole = {}
    for name, target in targets.items():
        match target.side:
            case Side.OUTPUT if name == "lm_head":
                target = replace(target, out_features=vocab_size)  # ranks' parts may differ
            case Side.OUTPUT if target.pieces:
                pieces = tuple(
                    piece if piece.is_whole else replace(piece, size=piece.size * shard.size)
                    for piece in target.pieces
                )
                size = whole_size(target.pieces, shard)
                target = replace(target, out_features=size, pieces=pieces)
            case Side.OUTPUT:
                target = replace(target, out_features=target.out_features * shard.size)
            case Side.INPUT:
                target = replace(target, in_features=target.in_features * shard.size)
        whole[name] = target
    return whole


def _cut_pair(pair: LoraPair, shard: Shard, target: Target) -> LoraPair:
    match target.side:
        case Side.OUTPUT if target.pieces:
            return replace(pair, b=piecewise(pair.b, -2, target.pieces, shard))
        case Side.OUTPUT:
            return replace(pair, b=pair.b[..., shard.part(pair.b.shape[-2]), :])
        case Side.INPUT:
            return replace(pair, a=pair.a[..., shard.part(pair.a.shape[-1])])
        case _:
            return pair


def _divide(shard: Shard, what: str, count: int) -> int:
    if count % shard.size:
        raise ConfigError(
            f"--tensor-parallel-size is {shard.size}, and the model's {what} ({count}) can't be "
            "divided by it; choose a size that divides it."
        )
    return count // shard.size
