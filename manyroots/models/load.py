"""A source made into a model with its weights in place.

Takes a `ModelSource`, a dtype and a device; gives a model. Every weight of the model is filled
exactly once from the checkpoint or loading fails with the names: nothing is left at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.errors import ModelError
from manyroots.models.fields import check_config
from manyroots.models.llama import Llama
from manyroots.models.registry import architecture_of, model_class
from manyroots.models.sharding import cut_weights, rank_spec
from manyroots.models.source import ModelSource, SourceKind
from manyroots.models.spec import ModelSpec, model_spec
from manyroots.models.weight_bytes import check_fits, num_weights
from manyroots.models.weights import dummy, experts, gguf, safetensors, tied_head
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.progress import track

_MAX_NAMED = 6


def describe(source: ModelSource) -> ModelSpec:
    """The spec of a source's model, without loading it."""
    architecture = architecture_of(source.config)
    make = model_class(architecture)
    text = source.config.get_text_config()
    check_config(text, source.name)
    traits = make.traits(text)
    return model_spec(
        source.config,
        architecture,
        traits,
        eos_token_ids=source.eos_token_ids,
        rope_factors=source.rope_factors,
    )


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    shard: Shard = WHOLE,
) -> Llama:
    """Build a rank's part of the model and fill it; `load_format` is that of the settings."""
    spec = _as_in_the_checkpoint(describe(source), source, load_format, dtype)
    make = model_class(spec.architecture)
    own = rank_spec(spec, shard)
    rows = shard.part(spec.vocab_size)
    num_bytes = num_weights(own, rows.stop - rows.start) * dtype.itemsize
    check_fits(num_bytes, source.name, dtype, device)
    try:
        model = make(own, dtype=dtype, device=device, shard=shard)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(
            f"{source.name} does not fit into the memory of {device} as {dtype}: {error} "
            "Choose a smaller model or --dtype bfloat16."
        ) from error
    slots = model.weights()
    weights = _weights(source, spec, slots, load_format, seed)
    if not shard.is_whole and load_format != "dummy":  # which draws the part itself
        weights = cut_weights(weights, shard)
    fill(slots, track(weights, total=len(slots), label="Loading weights"), source.name)
    return model


def _as_in_the_checkpoint(
    spec: ModelSpec, source: ModelSource, load_format: str, dtype: torch.dtype
) -> ModelSpec:
    """With a head of its own where the config calls it tied and the weights differ."""
    if not spec.tie_word_embeddings or load_format == "dummy" or source.kind is SourceKind.GGUF:
        return spec  # a GGUF file is tied if it has no head
    return replace(spec, tie_word_embeddings=tied_head.is_tied(source.path, dtype))


def fill(
    slots: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], model_name: str
) -> None:
    """Copy each tensor into its slot; what is missing, unknown or misshapen is an error."""
    missing = set(slots)
    unexpected = []
    for name, tensor in weights:
        if name not in slots:
            if not _is_harmless(name):
                unexpected.append(name)
            continue
        slot = slots[name]
        if tensor.shape != slot.shape:
            raise ModelError(
                f"{name} of {model_name} has shape {list(tensor.shape)}, but its config implies "
                f"{list(slot.shape)}; config and weights belong to different models."
            )
        if name not in missing:
            raise ModelError(
                f"the checkpoint of {model_name} has {name} twice, as itself or in a stack of "
                "experts; it is not clear which one is meant. Export the model again."
            )
        slot.copy_(tensor)
        missing.discard(name)
    if missing or unexpected:
        raise ModelError(
            f"the checkpoint of {model_name} does not fit its config: "
            f"missing {_names(missing)}; unexpected {_names(unexpected)}. "
            "Check that all files are there and belong together."
        )


def _weights(
    source: ModelSource,
    spec: ModelSpec,
    slots: Mapping[str, Tensor],
    load_format: str,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    if load_format == "dummy":
        return dummy.tensors(slots, seed)
    if source.kind is SourceKind.GGUF:
        file = GGUFFile(source.path)
        heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
        return experts.per_expert(gguf.tensors(file, **heads))
    weights = safetensors.tensors(source.path)
    if spec.tie_word_embeddings:
        weights = tied_head.with_embedding(weights)
    return experts.per_expert(weights)


def _is_harmless(name: str) -> bool:
    """Tensors that old checkpoints carry and that follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    if not ordered:
        return "nothing"
    rest = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return ", ".join(ordered[:_MAX_NAMED]) + rest
