"""Loads a source into a model.

Takes a `ModelSource`, a dtype and a device; gives a model. Every weight of the model is filled
exactly once from the checkpoint, or loading fails with the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.choice import Kernels, kernels_for
from manyroots.layers.spec import LatentSpec
from manyroots.layers.weights.fill import Fill
from manyroots.layers.weights.formats import PLAIN, PackedFormat
from manyroots.layers.weights.fp8 import check_gpu
from manyroots.models.architecture import Architecture
from manyroots.models.decoder import Decoder
from manyroots.models.families import pages_in, with_pages_in
from manyroots.models.fields import check_fields
from manyroots.models.quantization import FP8, format_on, keeps_blocks, weight_format
from manyroots.models.registry import FIELDS, architecture_of, known_architecture
from manyroots.models.sharding import rank_spec
from manyroots.models.source import ModelSource, SourceKind
from manyroots.models.spec import ConfigReader, ModelSpec, PredictionSpec
from manyroots.models.weight_bytes import check_fits, may_pack, weight_bytes
from manyroots.models.weights import dummy, gguf, prediction, safetensors, tied_head
from manyroots.models.weights.gguf_file import GGUFFile
from manyroots.process.progress import track

_MAX_NAMED = 6
_PREDICTION_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Fields of configs that count layers that predict tokens ahead."""
_OF_PAGES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Scales of keys and values."""


def describe(source: ModelSource, *, predicts_by: int | None = None) -> ModelSpec:
    """The spec of a source's model, without loading it. `predicts_by`: with the layer that predicts
    tokens ahead, for pages of this many tokens."""
    architecture = architecture_of(source.config)
    known = known_architecture(architecture)
    text = source.config.get_text_config()
    values = {name: getattr(text, name) for name in FIELDS if hasattr(text, name)}
    check_fields(values, source.name, FIELDS)
    weight_format(source.config)  # refuses unreadable formats
    reader = ConfigReader(
        source.config,
        architecture,
        eos_token_ids=source.eos_token_ids,
        rope_factors=source.rope_factors,
    )
    spec = known.describe(reader)
    if predicts_by is None:
        return spec
    _check_prediction(source, spec, known)
    return replace(spec, prediction=PredictionSpec.of(spec, predicts_by))


def _check_prediction(source: ModelSource, spec: ModelSpec, known: Architecture) -> None:
    """Refuse models that have no layer that predicts tokens ahead, or one with an index."""
    text = source.config.get_text_config()
    counts = {getattr(text, field, None) for field in _PREDICTION_COUNTS} - {None}
    mixers = (mixer for layer in spec.layers for mixer in layer.mixers)
    has_index = any(isinstance(mixer, LatentSpec) and mixer.index is not None for mixer in mixers)
    if known.prediction is None or counts == {0} or has_index:
        reason = "has no layer of this kind that this version computes"
    elif source.kind is SourceKind.GGUF:
        reason = "is a GGUF file, of which this version does not read these layers"
    else:
        return
    raise ConfigError(
        f"--speculative-config has method 'mtp', and {source.name} {reason}. Choose method "
        "'suffix', which needs no such layer."
    )


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    shard: Shard = WHOLE,
    kernels: Kernels | None = None,
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    predicts_by: int | None = None,
) -> Decoder:
    """Build a rank's part of the model and fill it; `load_format`, `quantization` and
    `kv_cache_dtype` are those of the settings. `predicts_by`: as in `describe`."""
    spec = describe(source, predicts_by=predicts_by)
    spec = _as_in_the_checkpoint(spec, source, load_format, dtype)
    spec = with_pages_in(spec, kv_cache_dtype)
    own = rank_spec(spec, shard)
    rows = shard.part(spec.vocab_size)
    kept = format_on(device, source.config, quantization)
    kept.check(device)
    if pages_in(spec) == FP8:
        check_gpu(device, "--kv-cache-dtype fp8 needs", "Leave it out")
    if load_format == "dummy":
        kept = kept.made_up()
    elif kept.is_stored:
        kept = kept.as_stored(_named(source, spec))
    num_bytes = weight_bytes(own, rows.stop - rows.start, dtype, kept)
    check_fits(num_bytes, source.name, dtype, device)
    as_blocks = keeps_blocks(quantization, source, dtype, device)
    packs = kept == PLAIN and kernels in (None, kernels_for(device))
    if packs and (as_blocks or may_pack(num_bytes, dtype, device)):
        kept = PackedFormat(as_blocks=as_blocks)
    try:
        model = Decoder(own, dtype=dtype, device=device, shard=shard, kernels=kernels, format=kept)
        fills = model.weights()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(
            f"{source.name} does not fit into the memory of {device} as {dtype}: {error} "
            "Choose a smaller model or --dtype bfloat16."
        ) from error
    # Products that are kept unquantized take more than `weight_bytes` says. A CPU's memory is not
    # in use before it is filled, so it is not too late to refuse the model.
    model.num_bytes = sum(fill.nbytes for fill in fills.values())
    check_fits(model.num_bytes, source.name, dtype, device)
    weights = _weights(source, spec, fills, load_format, seed)
    fill(fills, track(weights, total=len(fills), label="Loading weights"), source.name)
    model.pack_weights()
    return model


def rehearse(model: Decoder, source: ModelSource) -> None:
    """Check other weights of the same model like `refill`, without changing anything: raises if
    they do not fit."""
    stored, kept = weight_format(source.config), model.format
    if kept.is_stored and stored.name != kept.name:
        raise ModelError(
            f"{source.name} is {stored.name}, and the weights that are served are {kept.name}; "
            f"give weights in {kept.name}."
        )
    spec = _spec_for(model, source)
    if rank_spec(spec, model.shard) != model.spec:
        raise ModelError(
            f"the config of {source.name} describes another model than the one that is served; "
            "give weights of the same architecture and sizes."
        )
    fills = model.weights()
    fill(fills, _weights(source, spec, fills, "auto", 0), source.name, is_rehearsal=True)


def refill(model: Decoder, source: ModelSource) -> None:
    """Load other weights of the same model in place; only after `rehearse`, since an error here
    leaves the model half-filled."""
    fills = model.weights()
    fill(fills, _weights(source, _spec_for(model, source), fills, "auto", 0), source.name)
    model.pack_weights()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _spec_for(model: Decoder, source: ModelSource) -> ModelSpec:
    own = model.spec.prediction
    spec = describe(source, predicts_by=None if own is None else own.memory.group)
    spec = _as_in_the_checkpoint(spec, source, "auto", model.dtype)
    return with_pages_in(spec, pages_in(model.spec))


def _as_in_the_checkpoint(
    spec: ModelSpec, source: ModelSource, load_format: str, dtype: torch.dtype
) -> ModelSpec:
    """With a separate head if the config calls it tied and the weights differ."""
    if not spec.tie_word_embeddings or load_format == "dummy" or source.kind is SourceKind.GGUF:
        return spec  # a GGUF file is tied if it has no head
    translate = known_architecture(spec.architecture).translate
    return replace(spec, tie_word_embeddings=tied_head.is_tied(source.path, dtype, translate))


def fill(
    fills: Mapping[str, Fill],
    weights: Iterable[tuple[str, Tensor]],
    model_name: str,
    *,
    is_rehearsal: bool = False,
) -> None:
    """Copy each tensor to its destination; missing, unknown or misshapen tensors are errors.
    `is_rehearsal`: copy nothing."""
    missing = set(fills)
    unexpected = []
    for name, tensor in weights:
        if name not in fills:
            if not _is_harmless(name):
                unexpected.append(name)
            continue
        place = fills[name]
        part = place.part_of(tensor)
        if part.shape != place.shape:
            raise ModelError(
                f"{name} of {model_name} has shape {list(tensor.shape)}, but its config implies "
                f"{place.whole_shape}; config and weights belong to different models."
            )
        if _is_quantized(tensor.dtype) and not _is_quantized(place.source_dtype):
            raise ModelError(
                f"{name} of {model_name} is in {tensor.dtype}: its weights are quantized, and its "
                "config does not say how. Use an unquantized checkpoint."
            )
        if name not in missing:
            raise ModelError(
                f"the checkpoint of {model_name} has {name} twice, as itself or in a stack of "
                "experts; it is not clear which one is meant. Export the model again."
            )
        if not is_rehearsal:
            place.take(part)
        missing.discard(name)
    if missing and not unexpected and all(map(prediction.is_prediction, missing)):
        raise ModelError(
            f"the checkpoint of {model_name} has no weights for {_names(missing)}, which predict "
            "tokens ahead; choose method 'suffix' in --speculative-config, or a checkpoint that "
            "has them."
        )
    if missing or unexpected:
        raise ModelError(
            f"the checkpoint of {model_name} does not fit its config: "
            f"missing {_names(missing)}; unexpected {_names(unexpected)}. "
            "Check that all files are there and belong together."
        )


def _weights(
    source: ModelSource,
    spec: ModelSpec,
    fills: Mapping[str, Fill],
    load_format: str,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    if load_format == "dummy":
        return dummy.tensors(fills, seed)
    weights = _named(source, spec)
    if source.kind is SourceKind.GGUF:
        return weights
    if pages_in(spec) == FP8:
        weights = _without_page_scales(weights)
    weights = weight_format(source.config).read(weights, fills)
    return tied_head.with_embedding(weights) if spec.tie_word_embeddings else weights


def _named(source: ModelSource, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors, with the decoder's names. A tensor of safetensors is a view of its file,
    whose numbers are read when they are first used."""
    known = known_architecture(spec.architecture)
    if source.kind is SourceKind.GGUF:
        assert known.gguf is not None, "a GGUF file's config is of an architecture that has them"
        stored = gguf.tensors(GGUFFile(source.path), known.gguf, spec)
    else:
        stored = safetensors.tensors(source.path)
    weights = known.translate(stored)
    if known.prediction is not None:
        weights = prediction.named(
            weights, known.prediction, spec.num_layers, is_used=spec.prediction is not None
        )
    return weights


def _without_page_scales(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Refuse scales of keys and values, which FP8 pages do not support here."""
    for name, tensor in weights:
        if name.endswith(_OF_PAGES) and bool((tensor != 1).any()):
            raise ModelError(
                f"--kv-cache-dtype is fp8, and the checkpoint has {name} of "
                f"{float(tensor.float().max()):g} for it; this version keeps keys and values "
                "without scales. Leave the flag out: pages are in the model's dtype then."
            )
        yield name, tensor


def _is_quantized(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype need scales, or are no weights."""
    return dtype.itemsize == 1 or not dtype.is_floating_point


def _is_harmless(name: str) -> bool:
    """Tensors in old checkpoints that follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    if not ordered:
        return "nothing"
    rest = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return ", ".join(ordered[:_MAX_NAMED]) + rest
