"""Chooses the weight format from the config's quantization and the user's flag.

Each format reads its own part of a config (`layers/weights/`); this file knows only their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyroots.errors import ConfigError, ModelError
from manyroots.kernels.blocks import can_multiply_blocks, pack_blocks
from manyroots.kernels.fp8_rows import Fp8Form, in_fp8
from manyroots.layers.weights.compressed import groups_of
from manyroots.layers.weights.formats import PLAIN, WeightFormat
from manyroots.layers.weights.fp8 import Fp8Format
from manyroots.layers.weights.int8 import Int8Format
from manyroots.layers.weights.mxfp4 import Mxfp4Format
from manyroots.models.fields import shown
from manyroots.models.source import ModelSource, SourceKind

FP8 = "fp8"
W4A8 = "w4a8"
FORMATS: dict[str, type[WeightFormat]] = {
    FP8: Fp8Format,
    "mxfp4": Mxfp4Format,
    "int8": Int8Format,
}
"""By the values of --quantization; a new format is a file in `layers/weights` and a line here."""
_SIDE = 128
"""Side of a matrix by which the bytes of formats are compared."""


def weight_format(config: Any, asked: str = "auto") -> WeightFormat:
    """`asked` is --quantization."""
    said = quantization_of(config)
    stored = PLAIN if said is None else _stored(said, config.model_type)
    if asked in ("auto", W4A8):
        return stored
    wanted = FORMATS[asked]
    if said is None:
        return wanted.rounding(config.model_type)
    if type(stored) is not wanted:
        raise ConfigError(
            f"--quantization is {asked!r}, and the checkpoint is quantized already "
            f"({said['quant_method']}); leave the flag out."
        )
    return stored


def format_on(device: torch.device, config: Any, asked: str) -> WeightFormat:
    """The result of `weight_format`, unless the device multiplies another form faster."""
    return weight_format(config, asked).on(device, is_asked=asked in FORMATS)


def itemsizes_on(
    device: torch.device, config: Any, asked: str, dtype: torch.dtype
) -> tuple[float, float]:
    """Bytes per number of the layers' products, and of experts."""
    kept = format_on(device, config, asked)
    count = _SIDE * _SIDE
    return kept.num_bytes(count, dtype) / count, kept.expert_bytes(_SIDE, _SIDE, dtype) / count


def keeps_blocks(asked: str, source: ModelSource, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether 4-bit weights are multiplied without conversion; `asked` is --quantization."""
    if asked != W4A8:
        return False
    if source.kind is not SourceKind.GGUF:
        raise ConfigError(
            f"--quantization is {W4A8!r}, which multiplies the 4-bit blocks of a GGUF file as they "
            f"are, and {source.name} is none; leave the flag out."
        )
    if not can_multiply_blocks(device, dtype):
        raise ConfigError(
            f"--quantization is {W4A8!r}, for which torch has a fast operator on Arm CPUs with "
            f"KleidiAI and --dtype float32 alone, not on this {device.type} in {dtype}; leave the "
            "flag out."
        )
    return True


def product_of_blocks(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """Computes x W^T + b [..., k] from 4-bit blocks; None if the weight has none."""
    matrix = pack_blocks(weight)
    if matrix is None:
        return None
    blocks = matrix

    def product(x: Tensor) -> Tensor:
        return blocks.times(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)

    return product


def as_in_prompts(x: Tensor) -> Tensor:
    """Activations [..., k] as a GPU rounds them for products of many rows with FP8 weights."""
    return _rounded(x, Fp8Form(1, x.shape[-1]))


def as_in_decodes(x: Tensor) -> Tensor:
    """The same for products of few rows."""
    return _rounded(x, Fp8Form(2, None))


def _rounded(x: Tensor, form: Fp8Form) -> Tensor:
    rows = in_fp8(x.reshape(-1, x.shape[-1]), form)
    return rows.plain().to(x.dtype).view(x.shape)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The config's own entry; a model with vision may have it in the text model's config."""
    said = getattr(config, "quantization_config", None)
    if said is None:
        said = getattr(getattr(config, "text_config", None), "quantization_config", None)
    if said is None:
        return None
    words: dict[str, Any] = said if isinstance(said, dict) else said.to_dict()
    method = words.get("quant_method")
    return {**words, "quant_method": getattr(method, "value", method)}


def _stored(said: dict[str, Any], model_type: str) -> WeightFormat:
    for kind in FORMATS.values():
        stored = kind.stored_in(said, model_type)
        if stored is not None:
            return stored
    groups = groups_of(said)
    what = f"method {said['quant_method'] or 'unknown'!r}"
    if "quant_algo" in said:
        what += f", quant_algo {shown(said['quant_algo'])}"
    if groups:
        own = groups[0]
        what += f", weights of {own.get('num_bits')} bits, " + ", ".join(
            f"{word} {own.get(word)!r}" for word in ("type", "strategy", "symmetric")
        )
    known = ", ".join(kind.name for kind in FORMATS.values())
    raise ModelError(
        f"the checkpoint is quantized ({what}); this version loads {known}, GGUF files and "
        "unquantized safetensors. Use one of these for this model, or save it unquantized with "
        "transformers."
    )
